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

from goondan.features.serve.api.problems import status_of
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload

#: Of our codes those that OpenAI has: the status, and its code.
_THEIRS: Final[Mapping[str, tuple[int, str]]] = {
    "E_AGENT_NOT_FOUND": (404, "model_not_found"),
    "E_CONTEXT_OVERFLOW": (400, "context_length_exceeded"),
    "E_MODEL_QUOTA": (429, "insufficient_quota"),
}
#: OpenAI's class of an error, by status; others are `invalid_request_error`, and from 500 on `server_error`.
_TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
#: Codes of what was refused before it was accepted.
_AGAIN: Final = frozenset({"E_OVERLOADED", "E_KERNEL_NOT_RUNNING"})


class Fault(Struct, frozen=True):
    """One error, as it is sent."""

    #: The HTTP status.
    status: int
    #: What is wrong, and what to do about it.
    message: str
    #: OpenAI's name for it where there is one, else ours (docs/errors.md).
    code: str | None = None
    #: The parameter that is wrong.
    param: str | None = None
    #: Whether the same request may succeed in a moment, and has done nothing yet.
    again: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The value of `error`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


class RefusedError(GoondanError):
    """A request that is refused. `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(ErrorPayload("E_DOOR_REQUEST", fault.message))
        self.fault = fault


def refused(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> RefusedError:
    """The exception for a request that its caller has to write otherwise."""
    return RefusedError(Fault(status, message, code, param))


def no_model(name: str) -> RefusedError:
    """The exception for an agent that is not there, or that the caller may not speak to: it is told the same."""
    message = f"The model `{name[:64]}` does not exist or you do not have access to it. GET /v1/models lists yours."
    return refused(message, "model", "model_not_found", 404)


def fault_of(error: ErrorPayload, status: int = 0, *, begun: bool = False) -> Fault:
    """What OpenAI's clients are told of our error. `status`: of HTTP, if its code does not say it. `begun`: it may be
    the end of a turn.
    """
    status, code = _THEIRS.get(error.code, (status or status_of(error.code), error.code))
    message = " ".join(filter(None, (error.message, error.suggestion)))
    return Fault(status, message, code, None, error.code in _AGAIN and not begun)
