"""Errors as answers of HTTP: problem documents (RFC 9457) with our code, its advice and its page.

Source: docs/errors.md; RFC 9457; RFC 9110 section 15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.responses import Response

from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload

MEDIA_TYPE: Final = "application/problem+json"

_BY_STATUS: Final[dict[int, str]] = {
    400: "E_USAGE E_FRAME_INVALID E_FRAME_TYPE E_TOOL_INVALID_ARGS E_FILE_INVALID E_BLOB_INVALID E_BLOB_MISMATCH "
    "E_DOOR_REQUEST",
    401: "E_HELLO_REQUIRED E_DOOR_REFUSED",
    402: "E_BUDGET_SPENT",
    403: "E_FORBIDDEN E_SANDBOX_DENIED E_EXTENSION_DENIED E_CLASS_MISMATCH E_APPROVAL_DENIED",
    404: "E_AGENT_NOT_FOUND E_EVENT_NOT_FOUND E_INSTANCE_NOT_FOUND E_TURN_NOT_FOUND E_TOOL_NOT_FOUND "
    "E_TOOL_NOT_IN_CATALOG E_APPROVAL_NOT_FOUND E_PATCH_NOT_FOUND E_BLOB_MISSING",
    409: "E_STATE_CONFLICT E_INSTANCE_BUSY E_INSTANCE_DELETED E_APPROVAL_DECIDED E_AGENT_CYCLE E_CANCELLED "
    "E_RESTART_REFUSED E_LEASE_LOST E_CALL_ENDED E_PRINCIPAL_BUSY "
    "E_APPROVAL_WAITS E_APPROVAL_MISMATCH E_KERNEL_RUNNING E_UNDO_REFUSED",
    410: "E_ANSWER_GONE",
    413: "E_FRAME_TOO_LARGE",
    422: "E_MODEL_CANNOT_SEE E_CONTEXT_OVERFLOW E_TOOL_LIMIT E_MAX_STEPS",
    501: "E_CONFIG_UNSUPPORTED E_FEATURE_MISSING",
    502: "E_MODEL_FAILED E_MODEL_QUOTA E_OUTPUT_INVALID E_AGENT_FAILED E_AGENT_SPAWN_FAILED E_EXTENSION_FAILED "
    "E_MIDDLEWARE E_TOOL E_TOOL_CRASHED E_TOOL_BAD_OUTPUT E_TOOL_OUTCOME_UNKNOWN",
    503: "E_OVERLOADED E_KERNEL_NOT_RUNNING E_KERNEL_SLOW E_KERNEL_LOST E_KERNEL_STOPPED E_LINK_CLOSED "
    "E_TOKEN_INVALID E_BROKER_UNTRUSTED E_SANDBOX_UNAVAILABLE E_BLOB_UNAVAILABLE E_RUN_DIR",
    504: "E_AGENT_TIMEOUT E_TOOL_TIMEOUT E_TURN_STALLED",
    507: "E_DISK_FULL E_STORE_FULL",
}
#: The HTTP status of each code. What is not in here is a fault of the swarm: its bundle, its state, the kernel.
STATUS: Final[Mapping[str, int]] = {code: status for status, codes in _BY_STATUS.items() for code in codes.split()}


def status_of(code: str) -> int:
    """The HTTP status of an error's code (pure)."""
    return STATUS.get(code, 500)


class Problem(Struct, omit_defaults=True, rename="camel"):
    """Why a request failed (RFC 9457)."""

    #: The page of the error's code.
    type: str
    #: The code.
    title: str
    #: The status of the answer.
    status: int
    #: What is wrong.
    detail: str
    #: The code: docs/errors.md has all of them.
    code: str
    #: What to do about it.
    suggestion: str | None = None
    #: After how many milliseconds to try again.
    retry_after_ms: int | None = None
    #: Of a message: its id.
    event_id: str | None = None
    #: Of a turn that failed: the turn.
    turn_id: str | None = None
    #: Its trace.
    trace_id: str | None = None
    #: Why it ended.
    finish_reason: str | None = None


def document(error: ErrorPayload, status: int | None = None, **more: Any) -> Problem:
    """The problem document of an error (pure). `more`: its members that are of a message."""
    return Problem(
        *(error.help_url or "about:blank", error.code, status or status_of(error.code), error.message, error.code),
        *(error.suggestion, error.retry_after_ms),
        **more,
    )


def problem(error: GoondanError, status: int | None = None, **more: Any) -> Response:
    """The answer to a request that failed. `more`: members of its document that are of a message."""
    told = document(error.info, status, **more)
    headers = {}
    if error.info.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, -(-error.info.retry_after_ms // 1000)))
    return Response(msgspec.json.encode(told), told.status, headers, MEDIA_TYPE)
