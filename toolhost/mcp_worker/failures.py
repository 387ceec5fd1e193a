"""What went wrong between us and a server, as the error of a result. Pure.

Source: docs/errors.md, the codes E_MCP_*.
"""

from __future__ import annotations

from typing import Final

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
from pydantic import ValidationError

from goondan.schemas.worker_frames import WorkerError
from goondan.toolhost.mcp_worker import bounds
from goondan.toolhost.mcp_worker.lines import GONE, NOT_LET_THROUGH, NOT_REACHED
from goondan.toolhost.mcp_worker.shaping import TooLarge

#: Characters of an error's message. The host cuts it to the tool's own limit.
MAX_MESSAGE: Final = 20_000


class Failure(Exception):
    """Something that a call, a listing or a connection fails with."""

    def __init__(self, code: str, message: str, *, name: str = "McpError") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


def error_of(error: BaseException) -> WorkerError:
    """Any exception of a call as the error of its result. Nothing of our own inside is shown."""
    failure = _failure(error)
    return WorkerError(
        name=failure.name,
        message=bounds.text(str(failure), MAX_MESSAGE),
        code=failure.code if failure.code != "E_TOOL" else None,
    )


def is_gone(error: MCPError) -> bool:
    """Whether an answer did not come because the connection has ended."""
    return error.code == GONE or (error.code == CONNECTION_CLOSED and error.message in _CLOSED)


#: What the SDK says of connections over HTTP that have ended.
_CLOSED: Final = (
    "Connection closed",
    "SSE stream ended without a response",
    "SSE stream ended and reconnection attempts were exhausted",
)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, BaseExceptionGroup):
        return _failure(error.exceptions[0])
    if isinstance(error, Failure):
        return error
    if isinstance(error, MCPError):
        return _answered(error)
    if isinstance(error, ValidationError):
        return Failure("E_MCP_PROTOCOL", f"the server's answer is not of the protocol: {_first(error)}")
    if isinstance(error, TooLarge):
        return Failure("E_TOOL_LIMIT", str(error), name="OutputTooLarge")
    if isinstance(error, TimeoutError):
        return Failure("E_TOOL_TIMEOUT", str(error) or "the server did not answer in time", name="TimeoutError")
    return Failure("E_MCP_PROTOCOL", f"the server could not be spoken with: {type(error).__name__}: {error}"[:2000])


def _answered(error: MCPError) -> Failure:
    message = bounds.text(error.message, MAX_MESSAGE)
    if is_gone(error):
        return Failure("E_MCP_GONE", message)
    if error.code == REQUEST_TIMEOUT:
        return Failure("E_TOOL_TIMEOUT", message, name="TimeoutError")
    if error.code == NOT_LET_THROUGH:
        return Failure("E_MCP_PROTOCOL", message)
    if error.code == NOT_REACHED:
        code = "E_SANDBOX_DENIED" if message.startswith("E_SANDBOX_DENIED") else "E_MCP_CONNECT"
        return Failure(code, f"the server could not be asked: {message}")
    return Failure("E_MCP_REFUSED", f"the server answered with error {error.code}: {message}")


def _first(error: ValidationError) -> str:
    """The first fault, without what the server sent."""
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in fault["loc"])
        return bounds.line(f"{place}: {fault['msg']}" if place else fault["msg"], 500)
    return "it has another shape"
