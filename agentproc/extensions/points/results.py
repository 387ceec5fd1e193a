"""What extensions get and give back around turns, steps and calls: results, errors, values for the wire, and what they
change of a step's configuration and catalog. Pure.

- A result is a fact of the kernel in the form that handlers see. What they changed of it, and what they raised, is
  converted back here.
- A handler of `step.config` may change `tools`, `extensions` and `prompt` for its step. The rest is read-only
  (schemas/bundle/effective_config.py has the shape).
- Each item of a changed catalog must be an item, and callable.
- The source of a tool of a server is `{"type": "mcp", "name": …, "mcp": {"extensionName": …, "serverName": …}}`. The
  older form is free, such as `{"type": "mcp", "extension": …}`, and is converted to the present one.

Source: docs/design/turns.md section 8; requirements CALL-12 to CALL-14, ERROR-03, HANDLER-07, RESULT-05, PIPELINE-02,
PIPELINE-10, PIPELINE-20, CONFIG-03, EXT-12, RECONCILE-02, CATALOG-05, ITEM-02, ITEM-03, ITEM-05, ITEM-07.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct, structs

from goondan.agentproc.extensions.points.pipeline import MiddlewareError
from goondan.agentproc.machine.catalog import Catalog
from goondan.agentproc.machine.messages import AssistantData, Message, error_result
from goondan.agentproc.machine.turn import AskedCall, End, LeaveStep
from goondan.agentproc.providers.base import ModelAnswer
from goondan.schemas.bundle import address, effective_config
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec, ServerSource, ToolSource
from goondan.schemas.wire import errors
from goondan.schemas.wire.codec import DECODE_ERRORS, check_depth, check_json, encode_value, from_raw
from goondan.schemas.wire.frames import ErrorPayload, ToolError, ToolResult
from goondan.schemas.worker.servers import ALIAS

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
    said = result.response, result.finish_reason, result.error
    if core is not None and said == (core.response, core.finish_reason, core.error):
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


def told_answer(answer: ModelAnswer) -> LlmResult:
    """The model's answer as handlers see it."""
    calls = [ToolCall(call.id, call.name, call.args) for call in answer.calls]
    return LlmResult(answer.text, calls, answer.finish_reason, answer.usage)


def changed_answer(result: LlmResult, known: ModelAnswer | None) -> ModelAnswer:
    """The answer that handlers have made of the model's own (`known`), which it is when nobody changed it. Raises
    MiddlewareError.
    """
    if known is not None and told_answer(known) == result:
        return known
    try:
        changed = ModelAnswer(
            text=msgspec.convert(result.text, str),
            calls=[_asked(call, () if known is None else known.calls) for call in result.tool_calls],
            finish_reason=msgspec.convert(result.finish_reason, str | None),
            usage=result.usage,
        )
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise MiddlewareError(f"llm_result is no answer: {error}") from None
    # Not the reasoning: it may have what a handler takes out of the text.
    return changed if known is None else structs.replace(changed, cut_off=known.cut_off, model=known.model)


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
    if isinstance(error, errors.GoondanError):
        return error.info
    told = str(error) if isinstance(error, MiddlewareError) else f"{type(error).__name__}: {error}"
    own = _own_code(error)
    stock = errors.error_payload(own or code, errors.cut_message(f"{what}: {told}", MAX_MESSAGE))
    suggestion, help_url = _text(error, "suggestion") or stock.suggestion, _text(error, "help_url") or stock.help_url
    return structs.replace(stock, suggestion=suggestion, help_url=help_url, name=type(error).__name__)


def tool_error_of(error: BaseException, code: str) -> ToolError:
    """An exception as the error of a call's result, with the exception's own words."""
    if isinstance(error, errors.GoondanError):
        info = error.info
        return errors.tool_error(
            info.code, info.message, name=info.name or type(error).__name__, suggestion=info.suggestion
        )
    own = _own_code(error) or code
    return ToolError(
        message=str(error) or type(error).__name__,
        name=type(error).__name__,
        code=own,
        suggestion=_text(error, "suggestion") or errors.CODES.get(own),
        help_url=_text(error, "help_url") or errors.help_url(own),
    )


def trace_of(error: BaseException) -> str:
    """The traceback of an exception, as it is logged."""
    return "".join(traceback.format_exception(error)).rstrip()


def given_error(value: Any) -> ErrorPayload | None:
    """The error that middleware put into a result: an ErrorPayload, an exception, a text or None."""
    if value is None or isinstance(value, ErrorPayload):
        return value
    if isinstance(value, BaseException):
        return error_of(value, "E_MIDDLEWARE", "the middleware ended it")
    return errors.error_payload("E_MIDDLEWARE", errors.cut_message(str(value), MAX_MESSAGE))


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
    except errors.GoondanError as error:
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
    return error_result(errors.tool_error("E_TOOL_BAD_OUTPUT", message, name="ToolOutputError"))


def wire_result(result: ToolCallResult, limit: int) -> ToolResult:
    """The result of the outermost middleware in the form that is stored. An error's message is within `limit`
    characters.
    """
    wire = result.untouched or _encoded(result)
    if wire.error is not None and len(wire.error.message) > limit:
        wire.error.message = errors.cut_message(wire.error.message, limit)
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
    if isinstance(code, str) and (_CODE.fullmatch(code) or errors.is_os_error_code(code)):
        return code
    return None


def _text(error: BaseException, name: str) -> str | None:
    value = getattr(error, name, None)
    return value[:MAX_MESSAGE] if isinstance(value, str) and value else None


# --- the configuration of a step ---


def wanted_extensions(config: Mapping[str, Any], known: Mapping[str, ExtensionSpec]) -> list[ExtensionSpec]:
    """The extensions that a configuration lists, in its order. `known` are those that the agent may have.

    Raises MiddlewareError.
    """
    wanted: dict[str, ExtensionSpec] = {}
    for given in _list(config, "extensions"):
        name = _name(given, "Extension")
        spec = known.get(name)
        if spec is None:
            raise MiddlewareError(f"effective_config.extensions names Extension/{name}, which the agent does not have")
        if name in wanted:
            raise MiddlewareError(f"effective_config.extensions names Extension/{name} twice")
        own = given.get("config") if isinstance(given, Mapping) else None
        if own is not None and not isinstance(own, dict):
            raise MiddlewareError(f"effective_config.extensions: the config of Extension/{name} is no object")
        wanted[name] = spec if own is None or own == spec.config else with_config(spec, own)
    return list(wanted.values())


def wanted_tools(config: Mapping[str, Any], catalog: Catalog) -> list[CatalogItem]:
    """The tools that a configuration lists, in its order: all exports of a Tool, or one that an extension has
    registered (`skills.list`, `skills__list`). Raises MiddlewareError.
    """
    by_tool: dict[str, list[CatalogItem]] = {}
    for item in catalog.registry.values():
        if item.source.type == "config":
            by_tool.setdefault(effective_config.tool_of(item), []).append(item)
    wanted: dict[str, CatalogItem] = {}
    for given in _list(config, "tools"):
        name = _name(given, "Tool")
        shown = address.shown_tool_name(name)
        registered = catalog.registered(shown)
        if name in by_tool:
            wanted.update({item.name: item for item in by_tool[name]})
        elif registered is not None:
            wanted[shown] = registered
        elif not catalog.may_come(shown):
            raise MiddlewareError(f"effective_config.tools names Tool/{name}, which there is not")
    return list(wanted.values())


def wanted_system(config: Mapping[str, Any]) -> str | None:
    """The system prompt of a configuration. Raises MiddlewareError."""
    prompt = config.get("prompt")
    system = prompt.get("system") if isinstance(prompt, Mapping) else None
    if not isinstance(prompt, Mapping) or not isinstance(system, str | None):
        raise MiddlewareError("effective_config.prompt is {system}, and system a text or nothing")
    return system


def check_rest(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check that everything else is unchanged; `known` is the configuration in force. Raises MiddlewareError."""
    for key in {*config, *known} - {"tools", "extensions", "prompt"}:
        if config.get(key) != known.get(key):
            message = f"effective_config.{str(key)[:80]} is not for step.config; it may change tools, extensions and"
            raise MiddlewareError(f"{message} prompt.system")
    prompt, own = config["prompt"], known["prompt"]
    if any(prompt.get(key) != own.get(key) for key in {*prompt, *own} - {"system"}):
        raise MiddlewareError("effective_config.prompt is {system}; step.config may change nothing else of it")


def with_config(spec: ExtensionSpec, config: dict[str, Any]) -> ExtensionSpec:
    """The extension with another `config`, which is also set in its document."""
    resource = {**spec.resource, "spec": {**(spec.resource.get("spec") or {}), "config": config}}
    return structs.replace(spec, config=config, resource=resource)


def _list(config: Mapping[str, Any], field: str) -> Sequence[Any]:
    given = config.get(field)
    if not isinstance(given, list | tuple):
        raise MiddlewareError(f"effective_config.{field} is {type(given).__name__}, not a list")
    return given


def _name(given: Any, kind: str) -> str:
    try:
        return effective_config.reference_name(given, kind)
    except ValueError as error:
        raise MiddlewareError(f"effective_config: {error}") from None


# --- the catalog of a step ---


class Unreachable(MiddlewareError):
    """A tool was added that this agent cannot call. `suggestion` names the field to change."""

    def __init__(self, message: str, suggestion: str) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def read_items(items: Any, catalog: Catalog) -> list[CatalogItem]:
    """The items of a catalog. Raises MiddlewareError for an invalid item, Unreachable for a tool that
    cannot be called.
    """
    if not isinstance(items, list | tuple):
        raise MiddlewareError(f"tool_catalog is {type(items).__name__}, not a list")
    read: list[CatalogItem] = []
    for item in items:
        if not isinstance(item, CatalogItem):
            try:
                item = msgspec.convert(with_known_source(item), CatalogItem)
            except msgspec.ValidationError as error:
                raise MiddlewareError(f"tool_catalog has a bad item: {error}") from None
        shown = address.shown_tool_name(item.name)
        if not catalog.reaches(shown):
            raise Unreachable(*_refusal(shown, catalog))
        name = catalog.canonical(shown)
        read.append(item if name == shown else item.replace(name=name))
    return read


def _refusal(name: str, catalog: Catalog) -> tuple[str, str]:
    """The message and the suggestion for a tool that cannot be called."""
    item = catalog.registry.get(name)
    if item is None:
        message = f"tool_catalog names {name[:80]!r}, which no Tool of the bundle has and no extension has registered"
        return message, "Register it with api.tools.register before it is added, or correct the name."
    message = f"tool_catalog names {name!r}, which extensions of agent {catalog.agent} may not add"
    where = f"spec.tools of Agent/{catalog.agent}"
    tool = f"Tool/{item.source.name or name.partition(address.SEPARATOR)[0]}"
    if not catalog.widened:
        return message, f"Name {tool} in {where}. Bundled extensions add no tools to those of their agent."
    pattern = f"policy.toolCalls.extensionsMayAdd of Agent/{catalog.agent}"
    return message, f"Add {name!r} or a pattern for it to {pattern}, or name {tool} in {where}."


def source_of(given: Any, extension: str) -> ToolSource:
    """The source of a tool that `extension` registers: always the extension's own name, and the MCP server
    behind it.
    """
    if not isinstance(given, Mapping) or given.get("type") != ALIAS:
        return ToolSource("extension", extension)
    named = given.get(ALIAS)
    server = named.get("serverName") if isinstance(named, Mapping) else given.get("server")
    return ToolSource(ALIAS, extension, ServerSource(extension, server if isinstance(server, str) else None))


def with_known_source(item: Any) -> Any:
    """A catalog item as middleware writes it, with its source in the present form. An item without the older form is
    unchanged.
    """
    source = item.get("source") if isinstance(item, dict) else None
    if not isinstance(source, dict) or "name" in source or not isinstance(source.get("extension"), str):
        return item
    made = source_of(source, source["extension"])
    return {**item, "source": made}
