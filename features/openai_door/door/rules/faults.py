"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.

The packages of OpenAI send a request again by themselves after 408, 409, 429 and 5xx, unless the answer says
`x-should-retry: false`. A turn that has begun may have called tools, so whatever follows from it says so; only what was
refused before anything happened may come again.

Source: https://platform.openai.com/docs/guides/error-codes; docs/error-causes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload

#: `type` of an error that the caller has made, and of one that it has not.
INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"


class Fault(Struct, frozen=True):
    """One error, as it is sent."""

    #: The HTTP status.
    status: int
    #: What is wrong, and what to do about it.
    message: str
    #: OpenAI's class of the error.
    type: str = INVALID
    #: OpenAI's name for it where there is one, else ours (docs/errors.md).
    code: str | None = None
    #: The parameter that is wrong.
    param: str | None = None
    #: Whether the same request may succeed in a moment, and has done nothing yet.
    again: bool = False
    #: After how many milliseconds.
    after_ms: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The value of `error`."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """What the answer has besides."""
        found = {"x-should-retry": "true" if self.again else "false"}
        if self.after_ms is not None:
            found["retry-after"] = str(max(1, -(-self.after_ms // 1000)))
            found["retry-after-ms"] = str(self.after_ms)
        return found


class RefusedError(Exception):
    """A request that is refused. `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def refused(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> RefusedError:
    """The exception for a request that its caller has to write otherwise."""
    return RefusedError(Fault(status, message, param=param, code=code))


def no_model(name: str) -> RefusedError:
    """The exception for an agent that is not there, or that the caller may not speak to: it is told the same."""
    message = f"The model `{name[:64]}` does not exist or you do not have access to it. GET /v1/models lists yours."
    return refused(message, "model", "model_not_found", 404)


#: Of our codes: the status, OpenAI's type, and its code where OpenAI has one.
_KNOWN: Final[Mapping[str, tuple[int, str, str | None]]] = {
    "E_AGENT_NOT_FOUND": (404, INVALID, "model_not_found"),
    "E_CONTEXT_OVERFLOW": (400, INVALID, "context_length_exceeded"),
    "E_MODEL_QUOTA": (429, "insufficient_quota", "insufficient_quota"),
    "E_MODEL_CANNOT_SEE": (400, INVALID, None),
    "E_FILE_INVALID": (400, INVALID, None),
    "E_FRAME_TOO_LARGE": (413, INVALID, None),
    "E_FRAME_INVALID": (400, INVALID, None),
    "E_USAGE": (400, INVALID, None),
    "E_FORBIDDEN": (403, "permission_error", None),
    "E_EVENT_NOT_FOUND": (404, INVALID, None),
    "E_ANSWER_GONE": (404, INVALID, None),
    "E_INSTANCE_DELETED": (409, INVALID, None),
    "E_CANCELLED": (409, INVALID, None),
    "E_EXTENSION_DENIED": (403, "permission_error", None),
    "E_OVERLOADED": (503, SERVER, None),
    "E_AGENT_TIMEOUT": (504, SERVER, None),
    "E_KERNEL_NOT_RUNNING": (503, SERVER, None),
    "E_KERNEL_STOPPED": (503, SERVER, None),
    "E_KERNEL_LOST": (503, SERVER, None),
    "E_LINK_CLOSED": (503, SERVER, None),
    "E_DISK_FULL": (507, SERVER, None),
}
#: Codes of what was refused before it was accepted.
_AGAIN: Final = frozenset({"E_OVERLOADED", "E_KERNEL_NOT_RUNNING"})


def fault_of(error: ErrorPayload, *, begun: bool = False) -> Fault:
    """What OpenAI's clients are told of our error. `begun`: it may be the end of a turn."""
    status, kind, code = _KNOWN.get(error.code, (500, SERVER, None))
    message = " ".join(filter(None, (error.message, error.suggestion)))
    again = error.code in _AGAIN and not begun
    return Fault(status, message, kind, code or error.code, None, again, error.retry_after_ms if again else None)


def fault_of_exception(error: GoondanError | RefusedError, *, begun: bool = False) -> Fault:
    """The same, of what was raised."""
    return error.fault if isinstance(error, RefusedError) else fault_of(error.info, begun=begun)
