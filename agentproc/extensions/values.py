"""Converts the values and exceptions of an extension's code for the wire (pure).

Source: docs/design/turns.md section 8; requirements ERROR-03, RESULT-05, HANDLER-07, CALL-13, CALL-14.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

from msgspec import Raw

from goondan.agentproc.conversation import error_result
from goondan.agentproc.extensions.contexts import ToolCallResult
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.schemas.codec import DECODE_ERRORS, check_depth, check_json, encode_value, from_raw
from goondan.schemas.errors import CODES, GoondanError, error_payload, help_url, is_os_error_code, tool_error
from goondan.schemas.frames import ErrorPayload, ToolError, ToolResult
from goondan.schemas.results import cut_message

#: The longest message of a failed turn (characters).
MAX_MESSAGE: Final = 1000
_UNCHANGEABLE: Final = frozenset((str, int, float, bool, type(None)))
_CODE: Final = re.compile(r"E_[A-Z0-9_]{1,60}")


def error_of(error: BaseException, code: str, what: str) -> ErrorPayload:
    """An exception as the error of a turn. `what` says where it came from. The exception's own `code`, `suggestion` and
    `help_url` are kept.
    """
    if isinstance(error, GoondanError):
        return error.info
    told = str(error) if isinstance(error, MiddlewareError) else f"{type(error).__name__}: {error}"
    own = _own_code(error)
    stock = error_payload(own or code, cut_message(f"{what}: {told}", MAX_MESSAGE))
    return ErrorPayload(
        code=stock.code,
        message=stock.message,
        suggestion=_text(error, "suggestion") or stock.suggestion,
        help_url=_text(error, "help_url") or stock.help_url,
        name=type(error).__name__,
    )


def tool_error_of(error: BaseException, code: str) -> ToolError:
    """An exception as the error of a call's result, with the exception's own words."""
    if isinstance(error, GoondanError):
        info = error.info
        return tool_error(info.code, info.message, name=info.name or type(error).__name__, suggestion=info.suggestion)
    own = _own_code(error) or code
    return ToolError(
        message=str(error) or type(error).__name__,
        name=type(error).__name__,
        code=own,
        suggestion=_text(error, "suggestion") or CODES.get(own),
        help_url=_text(error, "help_url") or help_url(own),
    )


def given_error(value: Any) -> ErrorPayload | None:
    """The error that middleware put into a result: an ErrorPayload, an exception, a text or None."""
    if value is None or isinstance(value, ErrorPayload):
        return value
    if isinstance(value, BaseException):
        return error_of(value, "E_MIDDLEWARE", "the middleware ended it")
    return error_payload("E_MIDDLEWARE", cut_message(str(value), MAX_MESSAGE))


def json_copy(value: Any) -> Any:
    """A copy of a JSON value that shares no changeable part with it.

    `copy.deepcopy` looks for cycles and for repeated objects, which no JSON value has. It takes ten times as long.
    """
    kind = type(value)
    if kind is dict:
        return {key: json_copy(part) for key, part in value.items()}
    if kind is list:
        return [json_copy(part) for part in value]
    return value if kind in _UNCHANGEABLE else copy.deepcopy(value)


def output_of(value: Any) -> Raw:
    """A handler's value as output. Raises ValueError with the reason when it is no JSON value."""
    try:
        data = encode_value(value)
        check_depth(data)
        check_json(from_raw(data, object), "the output")
    except GoondanError as error:
        raise ValueError(error.info.message) from None
    except RecursionError:
        raise ValueError("the output is nested too deep, or contains itself") from None
    except UnicodeEncodeError:
        raise ValueError("the output has half of a surrogate pair") from None
    except (TypeError, OverflowError, *DECODE_ERRORS) as error:
        raise ValueError(f"the output is no JSON value: {str(error)[:200]}") from None
    return Raw(data)


def bad_output(message: str) -> ToolResult:
    """The result of a handler or middleware whose value cannot be sent."""
    return error_result(tool_error("E_TOOL_BAD_OUTPUT", message, name="ToolOutputError"))


def wire_result(result: ToolCallResult, limit: int) -> ToolResult:
    """The result of the outermost middleware in the form that is stored. An error's message is within `limit`
    characters.
    """
    wire = result.untouched or _encoded(result)
    if wire.error is not None and len(wire.error.message) > limit:
        wire.error.message = cut_message(wire.error.message, limit)
    return wire


def _encoded(result: ToolCallResult) -> ToolResult:
    error: Any = result.error
    if result.status == "error" or error is not None:
        if not isinstance(error, ToolError):
            raised = error if isinstance(error, BaseException) else MiddlewareError(str(error or "it failed"))
            error = tool_error_of(raised, "E_MIDDLEWARE")
        return error_result(error)
    status: Any = result.status
    if status == "pending":
        handle: Any = result.handle
        if not isinstance(handle, str) or not handle:
            return bad_output("a pending result needs a handle")
        return ToolResult(status="pending", handle=handle)
    if status != "ok":
        return bad_output(f"a result has no status {str(status)[:40]!r}")
    try:
        return ToolResult(status="ok", output=output_of(result.output))
    except ValueError as error:
        return bad_output(str(error))


def _own_code(error: BaseException) -> str | None:
    code = getattr(error, "code", None)
    if isinstance(code, str) and (_CODE.fullmatch(code) or is_os_error_code(code)):
        return code
    return None


def _text(error: BaseException, name: str) -> str | None:
    value = getattr(error, name, None)
    return value[:MAX_MESSAGE] if isinstance(value, str) and value else None
