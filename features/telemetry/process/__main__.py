"""`python -m goondan.features.telemetry.process`: the exporter, under a supervisor or by hand.

It says hello on the control socket, and tells the broker how it does when that has changed. The work has a thread of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Final

from goondan.features.telemetry import process
from goondan.features.telemetry.wire import TELEMETRY, Exporting
from goondan.kernel import lock
from goondan.kernel.supervisor import program_start
from goondan.kernel.traces.follow import Follower
from goondan.schemas.system import secrecy
from goondan.schemas.text.times import rfc3339
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame

#: How long the last spans may take to leave when the program is told to leave (seconds).
LEAVE_S: Final = 0.7

log = logging.getLogger(TELEMETRY)


def _export(state_dir: str, leave: threading.Event, tell: Callable[[Exporting], object]) -> None:
    """Export, until `leave` is set."""
    try:
        from opentelemetry.sdk.resources import Resource  # all of this takes a quarter of a second

        from goondan.features.telemetry.process import collector, exporter

        def rest(seconds: float) -> None:
            if leave.wait(seconds):
                raise exporter.Left

        if any(os.environ.get(name, process.SPOKEN) != process.SPOKEN for name in process.PROTOCOLS):
            raise ValueError
        if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            os.environ.setdefault("OTEL_SERVICE_NAME", "goondan")
        resource = Resource.create({"service.version": version("goondan-kernel")})
        record = lock.read_record(state_dir)
        since = rfc3339(time.time()) if record is None else record.started_at
        shell = exporter.Shell(rest, tell, os.environ.get(process.CONTENTS, "").strip().lower() == "true")
        turns = Follower(state_dir, f"{state_dir}/{TELEMETRY}/position.json", since)
        exporter.Exporter(turns, collector.Collector(), resource, shell).run()
    except Exception as error:  # most likely what OpenTelemetry thinks of a variable; its text may have a value
        missing = isinstance(error, ImportError)
        why = "pip install 'goondan-kernel[telemetry]'" if missing else f"{type(error).__name__} in OTEL_* variables"
        log.error("nothing is exported: %s", why)
        tell(Exporting(f"exporting nothing: {why}"))


async def _serve(options: argparse.Namespace, token: str) -> int:
    """Serve until SIGTERM, or until the broker refuses us. Raises GoondanError without a welcome."""
    said = [Exporting("exporting")]

    def send() -> None:
        link.send(Frame("runtime.event", payload=to_raw(said[0])))

    def tell(news: Exporting) -> None:
        if news != said[0]:
            said[0] = news
            loop.call_soon_threadsafe(send)

    loop, leave = asyncio.get_running_loop(), threading.Event()
    link = Link(options.endpoint, token, on_frame=lambda _: None, on_welcome=lambda _: send(), by_reference=False)
    over = await program_start.begin(link, options)
    worker = threading.Thread(target=_export, args=(options.state_dir, leave, tell), daemon=True)
    worker.start()
    await over
    leave.set()
    await asyncio.to_thread(worker.join, LEAVE_S)
    return await program_start.end(link)


def main(arguments: list[str] | None = None) -> int:
    """Serve until the end. Returns 0, 1 when the broker refused us, or 2 for bad usage."""
    secrecy.close_memory()
    parser = program_start.parser("goondan.features.telemetry.process", "Exports the traces of a kernel by OTLP.")
    options = parser.parse_args(arguments)
    return program_start.run(TELEMETRY, options, lambda token: _serve(options, token))


if __name__ == "__main__":
    sys.exit(main())
