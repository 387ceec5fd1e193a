"""The exporter: `python -m goondan.features.telemetry.process`, a program that the supervisor runs when the environment
names an OTLP collector.

It reads what agents store, as `gdn trace` does, so no turn waits for it and none is lost with it. `spans.py` makes
spans of a turn, `collector.py` has the server, and `exporter.py` the rest.

Source: docs/decisions/175; docs/design/traces.md.
"""

from __future__ import annotations

from typing import Final

from goondan.features.telemetry.wire import TELEMETRY
from goondan.kernel import spawn
from goondan.kernel.supervisor.programs import Program

#: "true": texts, arguments and results are exported as well.
CONTENTS: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
#: Variables of each of which there is one for traces and one for everything.
_BOTH: Final = ("PROTOCOL", "TIMEOUT", "COMPRESSION", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
_OTLP: Final = [f"OTEL_EXPORTER_OTLP{of}_{name}" for name in _BOTH for of in ("", "_TRACES")]
#: Where the collector is, and keys for it, which an address may have, too. They come on a descriptor.
SECRETS: Final = tuple(f"OTEL_EXPORTER_OTLP{of}_{name}" for name in ("ENDPOINT", "HEADERS") for of in ("", "_TRACES"))


#: The collector may be behind the same proxy as the servers of models.
PROGRAM: Final = Program(
    *(TELEMETRY, "goondan.features.telemetry.process", lambda state_dir: ["--state-dir", state_dir]),
    spawn.AGENT_ENVIRONMENT.union(_OTLP, (CONTENTS, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")),
    SECRETS,
)
