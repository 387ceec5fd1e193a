"""The error of a call that failed because of the sandbox. Pure.

A handler sees a refused connection, a name that does not exist or a socket that it may not make. Its error keeps its
name and message; its code becomes E_SANDBOX_DENIED and the message begins with what was refused, so that a model does
not take the wall for a fault of the network.

Source: docs/design/sandbox.md section 6; requirement RESULT-05.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from goondan.schemas.worker_frames import WorkerError
from goondan.toolhost.egress.messages import Denied

#: Codes of operating systems for a failed connection.
NETWORK_CODES: Final = frozenset(
    ("ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "ENETDOWN", "ETIMEDOUT", "EPIPE")
)
#: Codes that say nothing about the cause.
_UNSPECIFIC: Final = frozenset((None, "E_TOOL", *NETWORK_CODES))


def with_denial(error: WorkerError, denied: Sequence[Denied]) -> WorkerError:
    """The error of a call; `denied` are the denials in its jail while it ran, oldest first."""
    if not denied or error.code not in _UNSPECIFIC:
        return error
    last = next((one for one in reversed(denied) if _is_named(one, error.message)), denied[-1])
    return _denied(
        error, f"{shown(last.host, last.port)} is not reachable from this sandbox: {last.reason}", _suggestion(last)
    )


def without_network(error: WorkerError) -> WorkerError:
    """The error of a call whose tool has no network at all."""
    if error.code not in NETWORK_CODES:
        return error
    return _denied(error, "no network was granted to this tool (spec.sandbox.network is none)", None)


def shown(host: str, port: int) -> str:
    """A host, and the port where one is known (not 0)."""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}" if port else host


def _is_named(denied: Denied, message: str) -> bool:
    return denied.host in message or (denied.port > 0 and str(denied.port) in message)


def _suggestion(denied: Denied) -> str:
    target = shown(denied.host, denied.port) if denied.port else f"{denied.host}:PORT"
    return f"Grant it: spec.sandbox.network: {{allow: ['{target}']}}, or `gdn call --allow-net {target}`."


def _denied(error: WorkerError, reason: str, suggestion: str | None) -> WorkerError:
    message = f"{reason} ({error.message})" if error.message else reason
    return WorkerError(name=error.name, message=message, code="E_SANDBOX_DENIED", suggestion=suggestion)
