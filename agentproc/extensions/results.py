"""What extensions get and give back around turns, steps and calls: results, errors, and values for the wire. Pure.

A result is a fact of the kernel in the form that handlers see. What they changed of it, and what they raised, is
converted back here.

Source: docs/design/turns.md section 8; requirements CALL-12 to CALL-14, ERROR-03, HANDLER-07, RESULT-05, PIPELINE-02,
PIPELINE-20.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct, structs

from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.machine.messages import AssistantData, Message, error_result
from goondan.agentproc.machine.turn import AskedCall, End, LeaveStep
from goondan.schemas.wire.codec import DECODE_ERRORS, check_depth, check_json, encode_value, from_raw
from goondan.schemas.wire.errors import (
    CODES,
    GoondanError,
    cut_message,
    error_payload,
    help_url,
    is_os_error_code,
    tool_error,
)
from goondan.schemas.wire.frames import ErrorPayload, ToolError, ToolResult

#: The longest message of a failed turn (characters).
MAX_MESSAGE: Final = 1000
_UNCHANGEABLE: Final = frozenset((str, int, float, bool, type(None)))
_CODE: Final = re.compile(r"E_[A-Z0-9_]{1,60}")


# --- results ---


class TurnResult(Struct, kw_only=True):
    """How a turn ended. Middleware may change `response`, `finish_reason` and `error`, or return another result."""

    #: The id of the turn.
    turn_id: str
    #: The answer. A change of it changes the answer, not the conversation.
    response: str | None = None
    #: The assistant message that the answer came from.
    response_message: Message | None = None
    #: Why the turn ended.
    finish_reason: str | None = None
    #: The error of a failed turn. A result with an error is a failed turn.
    error: ErrorPayload | None = None

    @property
    def status(self) -> Literal["completed", "failed"]:
        """`failed` when there is an error."""
        return "completed" if self.error is None else "failed"


class ToolCall(Struct, frozen=True):
    """A tool call of the model (CALL-08)."""

    #: The model's id of the call.
    id: str
    #: The tool as the model named it.
    name: str
    #: The arguments.
    args: dict[str, Any]


class ToolCallResult:
    """The result of one call. `output`, `error` and `status` may be changed, or another result returned.

    `output` is a JSON value; it is decoded at the first access. `error` has message, name, code, suggestion, help_url.
    """

    __slots__ = ("_output", "_wire", "error", "handle", "status", "tool_call_id", "tool_name")

    def __init__(
        self,
        tool_call_id: str,
        tool_name: str,
        *,
        status: Literal["ok", "error", "pending"] = "ok",
        output: Any = None,
        error: ToolError | None = None,
        handle: str | None = None,
    ) -> None:
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name
        self.status = status
        self.error = error
        self.handle = handle
        self._output = output
        self._wire: ToolResult | None = None

    @classmethod
    def of(cls, tool_call_id: str, tool_name: str, result: ToolResult) -> ToolCallResult:
        """A result as it arrived. Its output is decoded at the first access."""
        made = cls.__new__(cls)  # each call has one, and most are never looked into
        made.tool_call_id, made.tool_name = tool_call_id, tool_name
        made.status, made.error, made.handle = result.status, result.error, result.handle
        made._output, made._wire = None, result
        return made

    @property
    def output(self) -> Any:
        """The handler's value; None unless `status` is `ok`."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            self._output = None if wire.output is None else from_raw(wire.output, object)
        return self._output

    @output.setter
    def output(self, value: Any) -> None:
        self._wire, self._output = None, value

    @property
    def untouched(self) -> ToolResult | None:
        """The result as it arrived; None when somebody has read the output or changed anything."""
        wire = self._wire
        if wire is None or (wire.status, wire.error, wire.handle) != (self.status, self.error, self.handle):
            return None
        return wire

    def __repr__(self) -> str:
        return (
            f"ToolCallResult({self.tool_name!r}, {self.tool_call_id!r}, status={self.status!r}, error={self.error!r})"
        )


class StepResult(Struct, kw_only=True):
    """How a step ended: one model call and its tool calls.

    Middleware may change `should_continue`. The results are stored already; to change the messages that the model sees,
    emit a message event.
    """

    #: `failed` for a step with an error.
    status: Literal["completed", "failed"] = "completed"
    #: False ends the turn with this step's text. True asks the model again; after a failed model call that is a retry.
    should_continue: bool = False
    #: The tool calls, in call order.
    tool_calls: list[ToolCall] = []
    #: The results, in call order.
    tool_results: list[ToolCallResult] = []
    #: The metadata of the step, shared by its middleware.
    metadata: dict[str, Any] = {}
    #: The error of a failed step.
    error: ErrorPayload | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for fields that report a fact and cannot be changed."""
        if name in ("status", "tool_calls", "tool_results"):
            raise AttributeError(f"StepResult.{name} is read-only; should_continue is yours to change")
        super().__setattr__(name, value)


class LlmResult(Struct):
    """`ctx.llm_result`: the model's answer. A handler may change every field but `usage`."""

    #: The text of the answer.
    text: str
    #: The tool calls of the answer, in order.
    tool_calls: list[ToolCall] = []
    #: Why the model stopped, in the vendor's word.
    finish_reason: str | None = None
    #: The tokens as the vendor counted them; None when it did not.
    usage: Any = None


R = TypeVar("R", TurnResult, StepResult, ToolCallResult)


def accepted(kind: type[R], value: Any) -> R:
    """What middleware returned, if it is a result of its kind. Raises MiddlewareError."""
    if not isinstance(value, kind):
        raise MiddlewareError(f"it returned {type(value).__name__}, not {kind.__name__}")
    status: Any = value.status
    if kind is ToolCallResult and status not in ("ok", "error", "pending"):
        raise MiddlewareError(f"it returned a result with the status {str(status)[:40]!r}")
    return value


# --- between results and the kernel ---


def turn_result(turn_id: str, end: End, own: Sequence[Message]) -> TurnResult:
    """A turn's end as handlers see it; `own` are the messages of the turn."""
    said = (message for message in reversed(own) if isinstance(message.data, AssistantData))
    return TurnResult(
        turn_id=turn_id,
        response=end.response,
        response_message=None if end.response is None else next(said, None),
        finish_reason=end.finish_reason,
        error=end.error,
    )


def changed_end(result: TurnResult, core: End | None) -> End | None:
    """The end that the result asks for; None when it is the same as the end of the core."""
    if core is not None and (result.response, result.finish_reason, result.error) == (
        core.response,
        core.finish_reason,
        core.error,
    ):
        return None
    steps = 0 if core is None else core.steps
    error = given_error(result.error)
    if error is not None:
        return End(status="failed", steps=steps, finish_reason=result.finish_reason or "error", error=error)
    response = None if result.response is None else str(result.response)
    end = End(status="completed", steps=steps, response=response, finish_reason=result.finish_reason or "stop")
    if core is None:
        return end
    # A layer that changes the response may hide a part of it. The reasoning may have that part, too.
    own = response == core.response
    reasoning, value = (core.reasoning, core.value) if own else (None, None)
    return structs.replace(end, output=core.output, cut_off=core.cut_off, reasoning=reasoning, value=value)


def step_result(leave: LeaveStep) -> StepResult:
    """A step's end as handlers see it."""
    return StepResult(
        status="completed" if leave.error is None else "failed",
        should_continue=leave.should_continue,
        tool_calls=[ToolCall(part.tool_call_id, part.tool_name, part.args) for part, _ in leave.calls],
        tool_results=[ToolCallResult.of(part.tool_call_id, part.tool_name, result) for part, result in leave.calls],
        metadata={},
        error=leave.error,
    )


class AnswerParts(NamedTuple):
    """What a turn needs of an answer that handlers may have changed."""

    text: str
    finish_reason: str | None
    calls: list[AskedCall]


def answer_parts(result: LlmResult, known: Sequence[AskedCall] = ()) -> AnswerParts:
    """The parts of an answer. `known` are the calls of the model's own answer. Raises MiddlewareError."""
    try:
        text = msgspec.convert(result.text, str)
        reason = msgspec.convert(result.finish_reason, str | None)
        return AnswerParts(text, reason, [_asked(call, known) for call in result.tool_calls])
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise MiddlewareError(f"llm_result is no answer: {error}") from None


def _asked(call: ToolCall, known: Sequence[AskedCall]) -> AskedCall:
    for asked in known:
        if (asked.id, asked.name) == (call.id, call.name) and asked.args == call.args:
            return asked  # with the reason why its arguments could not be read
    return AskedCall(msgspec.convert(call.id, str), msgspec.convert(call.name, str), msgspec.convert(call.args, dict))


# --- errors and values ---


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
