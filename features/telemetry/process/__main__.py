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
from collections.abc import Callable
from importlib.metadata import version
from typing import Final

from goondan.features.telemetry import process
from goondan.features.telemetry.wire import TELEMETRY, Exporting
from goondan.kernel.supervisor import program_start
from goondan.kernel.traces.follow import Follower
from goondan.kernel.traces.search import running_since
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame

#: What is spoken; only the one.
SPOKEN: Final = "http/protobuf"
#: How long the last spans may take to leave when the program is told to leave (seconds).
LEAVE_S: Final = 0.7

log = logging.getLogger(TELEMETRY)


def _export(state_dir: str, leave: threading.Event, tell: Callable[[Exporting], object]) -> None:
    """Export, until `leave` is set."""
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # all of this takes 0.1 s

        from goondan.features.telemetry.process import collector, exporter

        def rest(seconds: float) -> None:
            if leave.wait(seconds):
                raise exporter.Left

        if any(os.environ.get(f"OTEL_EXPORTER_OTLP{of}_PROTOCOL", SPOKEN) != SPOKEN for of in ("", "_TRACES")):
            raise ValueError(SPOKEN)
        ours = Resource({"service.name": "goondan", "service.version": version("goondan-kernel")})
        shell = exporter.Shell(rest, tell, os.environ.get(process.CONTENTS, "").strip().lower() == "true")
        turns = Follower(state_dir, f"{state_dir}/{TELEMETRY}/position.json", running_since(state_dir) or "")
        made = exporter.Exporter(turns, collector.Collector(), ours.merge(OTELResourceDetector().detect()), shell)
    except Exception as error:  # most likely what OpenTelemetry thinks of a variable; its text may have a value
        missing = isinstance(error, ImportError)
        why = "pip install 'goondan-kernel[telemetry]'" if missing else f"{type(error).__name__} in OTEL_* variables"
        log.error("nothing is exported: %s", why)
        tell(Exporting(f"exporting nothing: {why}"))
        return
    try:
        made.run()
    except Exception as error:  # without its text, which may be what was stored; the next program goes on here
        log.error("a fault of ours: %s", type(error).__name__)
        os._exit(1)


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
    link = program_start.link(options, token, on_welcome=lambda _: send())
    over = await program_start.begin(link, options)
    worker = threading.Thread(target=_export, args=(options.state_dir, leave, tell), daemon=True)
    worker.start()
    await over
    leave.set()
    await asyncio.to_thread(worker.join, LEAVE_S)
    return await program_start.end(link)


def main(arguments: list[str] | None = None) -> int:
    """Serve until the end. Returns 0, 1 when the broker refused us, or 2 for bad usage."""
    parser = program_start.parser("goondan.features.telemetry.process", "Exports the traces of a kernel by OTLP.")
    return program_start.run(TELEMETRY, parser.parse_args(arguments), _serve)


if __name__ == "__main__":
    sys.exit(main())
