"""`python -m goondan.features.telemetry.process`: the exporter, under a supervisor or by hand.

It says hello on the control socket, and tells the broker how it does when that has changed. The work has a thread of
its own. An answer of the collector that never ends holds that thread: then the program ends, and the next one goes on
at the position.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, Final

import msgspec

from goondan.features.telemetry import process, wire
from goondan.features.telemetry.process.exporter import Exporter
from goondan.kernel import lock
from goondan.schemas.system import secrecy, startup
from goondan.schemas.text.times import rfc3339
from goondan.schemas.text.visible import visible_line
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame

#: How often the broker is told of changes, and the thread is looked at (seconds).
TELL_S: Final = 1.0
#: How long one step of the thread may take (seconds): longer than a request with its tries, whose time is 10 s unless
#: a variable says more.
STUCK_S: Final = 180.0
#: How long the last spans may take to leave when the program is told to leave (seconds).
LEAVE_S: Final = 0.7
#: How long queued frames may take to leave (seconds).
LINGER_S: Final = 0.2

log = logging.getLogger("telemetry")


class Worker:
    """The thread that exports. `state_dir`: of the workspace."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began: float | None = None
        self.said = wire.Exporting(condition="exporting")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """End, if that takes no longer than this."""
        self._leave.set()
        self._thread.join(wait_s)

    def is_stuck(self, now: float) -> bool:
        """Whether a step takes too long. `now`: of the monotonic clock."""
        began = self._began
        return began is not None and now - began > STUCK_S

    def _run(self) -> None:
        try:
            exporter = self._made()
        except ImportError:
            self._idle("the extra is not installed: pip install 'goondan-kernel[telemetry]'")
            return
        except Exception as error:  # what OpenTelemetry thinks of a variable; its text may have a value
            self._idle(f"the variables of OpenTelemetry cannot be used: {type(error).__name__}")
            return
        wait_s = 0.0
        while not self._leave.wait(wait_s):
            wait_s = self._step(exporter)
        self._step(exporter, last=True)

    def _made(self) -> Exporter:
        from importlib.metadata import PackageNotFoundError, version

        from goondan.features.telemetry.process.collector import Collector  # OpenTelemetry takes a quarter of a second

        spoken = next(filter(None, map(os.environ.get, process.PROTOCOLS)), "http/protobuf")
        if spoken != "http/protobuf":
            raise ValueError(spoken)
        try:
            ours = version("goondan-kernel")
        except PackageNotFoundError:
            ours = "unknown"
        record = lock.read_record(self._state_dir)
        since = rfc3339(time.time()) if record is None else record.started_at
        contents = os.environ.get(process.CONTENTS, "").strip().lower() == "true"
        return Exporter(self._state_dir, Collector(ours), time.time, since=since, contents=contents)

    def _step(self, exporter: Exporter, *, last: bool = False) -> float:
        self._began = time.monotonic()
        try:
            return exporter.step(last=last)
        except Exception as error:
            # Without its text: it may contain what was stored, or what a server has said.
            log.error("a fault of ours: %s", type(error).__name__)
            return STUCK_S
        finally:
            self._began = None
            self.said = exporter.says()

    def _idle(self, why: str) -> None:
        log.error("nothing is exported: %s", why)
        self.said = wire.Exporting(condition="idle", why=why)


async def _serve(link: Link, worker: Worker, ready_fd: int | None) -> int:
    """Serve until SIGTERM, or until the broker refuses us. Raises GoondanError without a welcome."""
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, leave.set)
    await link.start()
    startup.report_ready(ready_fd)
    worker.start()
    told: wire.Exporting | None = None
    while not (leave.is_set() or link.closed.done()):
        if worker.is_stuck(time.monotonic()):
            log.error("an answer of the collector does not end; the next program goes on here")
            os._exit(1)
        if told != worker.said:
            told = worker.said
            link.send(Frame("runtime.event", payload=to_raw(told)))
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(leave.wait()), link.closed]
        await asyncio.wait(waiting, timeout=TELL_S, return_when=asyncio.FIRST_COMPLETED)
        waiting[0].cancel()
    left = link.closed.done()
    await asyncio.to_thread(worker.stop, LEAVE_S)
    await link.close(LINGER_S)
    return 1 if left else 0


def main(arguments: list[str] | None = None) -> int:
    """Serve until the end. Returns 0, 1 when the broker refused us, or 2 for bad usage."""
    secrecy.close_memory()
    parser = argparse.ArgumentParser(
        prog="python -m goondan.features.telemetry.process", description="Exports the traces of a kernel by OTLP."
    )
    parser.add_argument("--endpoint", required=True, help="the broker's control socket, ipc://DIR/control.sock")
    parser.add_argument("--token-fd", type=int, help="descriptor to read the launch token from")
    parser.add_argument("--token-file", help="file to read the launch token from")
    parser.add_argument("--secrets-fd", type=int, help="descriptor to read secret variables from (msgpack)")
    parser.add_argument("--state-dir", required=True, help="the workspace's state directory")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when the broker has welcomed us")
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--broker-uid", type=int, help="user of the broker (default: ours)")
    options = parser.parse_args(arguments)
    startup.close_to_others()
    startup.die_with_parent(options.parent_pid)
    startup.set_process_name("gdn-telemetry")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s telemetry %(message)s")
    try:
        token = startup.read_token(options.token_fd, options.token_file)
        if options.secrets_fd is not None:
            with open(options.secrets_fd, "rb") as source:
                for name, value in msgspec.msgpack.decode(source.read(), type=dict[str, bytes]).items():
                    os.environ[name] = os.fsdecode(value)

        async def life() -> int:
            link = Link(
                options.endpoint,
                token,
                on_frame=lambda frame: None,
                by_reference=False,
                broker_uid=options.broker_uid,
            )
            return await _serve(link, Worker(options.state_dir), options.ready_fd)

        return asyncio.run(life())
    except GoondanError as error:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        startup.report_failure(options.ready_fd, error.info)
        return 2 if error.info.code == "E_USAGE" else 1


if __name__ == "__main__":
    sys.exit(main())
