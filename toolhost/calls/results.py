"""The results of calls as the bus carries them. Pure.

An output is forwarded as the worker encoded it; an error is cut to its tool's limit and completed with what ERROR-02,
ERROR-06 and ERROR-07 ask for. A code of the kernel is the kernel's word: one that a handler says without having it from
the kernel is a code of the handler's own (`own_error`).

Where the sandbox was the reason, a handler sees a refused connection, a name that does not exist or a socket that it
may not make. Its error keeps its name and message; its code becomes E_SANDBOX_DENIED and the message begins with what
was refused, so that a model does not take the wall for a fault of the network.

Source: docs/design/tools.md sections 5 and 9; docs/design/sandbox.md section 6; requirements RESULT-01 to RESULT-05,
ERROR-01 to ERROR-07, HANDLER-07.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import CODES, cut_message, help_url, tool_error
from goondan.schemas.wire.frames import ErrorPayload, ToolError, ToolResult
from goondan.schemas.worker.worker_frames import Result, WorkerError
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.pending import full_handle
from goondan.toolhost.traffic.messages import Denied
from goondan.toolhost.untrusted import Violation, check_json, output_limit

#: Characters of an error's name, code and other texts beside its message; a handler has no reason to send more.
MAX_NAME: Final = 200
MAX_CODE: Final = 100
MAX_SUGGESTION: Final = 2000
MAX_URL: Final = 1000
#: The form of a code.
_CODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
#: Before a code of the kernel that a handler says of its own accord.
OWN: Final = "tool:"
#: Codes of the kernel that any handler may say of its own call, and those that the bundled tools say besides.
OF_HANDLERS: Final = frozenset(
    ("E_TOOL", "E_TOOL_INVALID_ARGS", "E_TOOL_LIMIT", "E_TOOL_BAD_OUTPUT", "E_TOOL_NOT_FOUND", "E_CALL_ENDED")
)
OF_BUNDLED: Final = frozenset(
    ("E_SANDBOX_DENIED", "E_TOKEN_MISSING", "E_SCRIPT_FAILED", "E_SCRIPT_LANGUAGE", "E_CANCELLED", "E_TOOL_TIMEOUT")
)
_NIL: Final = b"\xc0"
# {"status": "ok", "output": …, "receipt": …} up to the output, and from there to the receipt
_OK: Final = encode_value({"status": "ok", "output": None, "receipt": None}).partition(b"\xc0")[0]
_RECEIPT: Final = encode_value("receipt")
#: Codes of operating systems for a failed connection.
NETWORK_CODES: Final = frozenset(
    ("ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "ENETDOWN", "ETIMEDOUT", "EPIPE")
)
#: Codes that say nothing about the cause.
_UNSPECIFIC: Final = frozenset((None, "E_TOOL", *NETWORK_CODES))


def shape(result: Result, receipt: Raw, tool: ToolSpec) -> Raw:
    """Make the payload of `tool.result` from a worker's result, within the tool's limits, with the host's receipt.

    Raises Violation when the result breaks the protocol.
    """
    message_limit = tool.error_message_limit
    if result.status == "ok":
        output = bytes(result.output) if result.output is not None else _NIL
        limit = output_limit(tool.sandbox.limits.output_mb)
        if len(output) > limit:
            return error_result(_too_large(len(output), limit), message_limit, receipt)
        check_json(output)
        return Raw(_OK + output + _RECEIPT + bytes(receipt))
    if result.status == "pending":
        handle = full_handle(tool.name, result.handle or "")
        if handle is None:
            raise Violation("the worker sent a pending result without a proper handle")
        return Raw(encode_value(ToolResult(status="pending", handle=handle, receipt=receipt)))
    if result.error is None:
        raise Violation("the worker sent an error result without an error")
    return error_result(_completed(result.error), message_limit, receipt)


def error_result(error: ToolError, message_limit: int, receipt: Raw | None = None) -> Raw:
    """Make the payload of `tool.result` from an error. Its message is cut (ERROR-03). `receipt` if a jail had the
    call.
    """
    if len(error.message) > message_limit:
        error = msgspec.structs.replace(error, message=cut_message(error.message, message_limit))
    return Raw(encode_value(ToolResult(status="error", error=error, receipt=receipt)))


def own_error(error: WorkerError, call: Call) -> WorkerError:
    """The error of a handler, whose code is none of the kernel's unless the kernel has said it to this very call.

    A jail may say what it likes. What the kernel says is obeyed, by agents that repeat a call and by people that read
    what to do about it. The worker of an MCP server is no jail.
    """
    code = error.code
    if code is None or call.tool.server is not None:
        return error
    if not _CODE.fullmatch(code):
        code = "E_TOOL"
    elif code in CODES and not (
        code in OF_HANDLERS or code in call.heard or (call.tool.bundled and code in OF_BUNDLED)
    ):
        code = OWN + code
    return error if code == error.code else msgspec.structs.replace(error, code=code)


def refusal(info: ErrorPayload, *, name: str = "ToolHostError") -> ToolError:
    """Make the error of a result from one of our own errors."""
    return ToolError(
        message=info.message, name=name, code=info.code, suggestion=info.suggestion, help_url=info.help_url
    )


def _too_large(size: int, limit: int) -> ToolError:
    message = f"the output has {size} bytes, limit {limit} (outputMb)"
    return tool_error("E_TOOL_LIMIT", message, name="OutputTooLarge")


def _completed(error: WorkerError) -> ToolError:
    code = (error.code or "E_TOOL")[:MAX_CODE]
    return ToolError(
        message=error.message,
        name=error.name[:MAX_NAME] or "Error",
        code=code,
        suggestion=(error.suggestion or CODES.get(code) or CODES["E_TOOL"])[:MAX_SUGGESTION],
        help_url=(error.help_url or help_url("E_TOOL" if code.startswith(OWN) else code))[:MAX_URL],
    )


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
