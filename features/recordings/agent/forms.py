"""Requests, answers and results in the form that a recording has, and back (pure).

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import msgpack

from goondan.agentproc.machine.messages import AssistantData, Message, ToolData, ToolResultPart, UserData, files_of
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ContextOverflow, ModelAnswer, ModelRequest, Overflow, Usage, asked_call
from goondan.features.recordings.wire import RecordedAnswer, RecordedFault, RecordedModelCall, Request
from goondan.features.recordings.wire.texts import comparable, same, shortened, without_places
from goondan.schemas.text.secret_values import in_texts
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import FilePart, ToolError, ToolResult

#: Tools whose later answers come in a replay as they did in the run: agents answer, and they run.
ANSWERED_BY_AGENTS: Final = frozenset(("agents__request", "handoff__request"))

#: Folders of this machine, each with the name that stands for it; longest first.
Places = Sequence[tuple[str, str]]


def request_of(request: ModelRequest, places: Places, *, shorten: bool = True) -> Request:
    """A request as it is compared. `shorten` False: with whole texts, as they are redacted later."""
    entries = [] if request.system is None else [f"system: {request.system}"]
    before: Message | None = None
    for message in request.messages:
        if not _is_late(message, before):
            entries += _of_message(message)
        before = message
    entries += [f"block: {_json(block)}" for block in request.blocks]
    if request.output is not None:
        entries.append(f"output: {_json(msgspec.to_builtins(request.output))}")
    if request.tool_choice is not None:
        entries.append(f"tool choice: {_json(msgspec.to_builtins(request.tool_choice))}")
    texts = [comparable(without_places(entry, places)) for entry in entries]
    tools = sorted({item.name for item in request.tools})
    return Request([shortened(text) for text in texts] if shorten else texts, tools)


def _is_late(message: Message, before: Message | None) -> bool:
    """Whether a message tells within a turn that pending work of a tool has ended: in a replay no tool works."""
    told = isinstance(message.data, UserData) and message.source.type == "tool"
    first = before is None or isinstance(before.data, AssistantData)
    return told and not first and message.source.name not in ANSWERED_BY_AGENTS


def _of_message(message: Message) -> list[str]:
    data = message.data
    if isinstance(data, ToolData):
        return [_of_result(part) for part in data.content]
    if isinstance(data, AssistantData):
        calls = [f" → {shown_call(call.tool_name, call.args)}" for call in data.calls]
        return [f"assistant: {data.text}".rstrip() + "".join(calls)]
    role = "user" if isinstance(data, UserData) else "system"
    content: Any = data.content
    text = content if isinstance(content, str) else _json(msgspec.to_builtins(content))
    return [f"{role}: {text}{_shown_files(files_of(message))}"]


def _of_result(part: ToolResultPart) -> str:
    result = part.result
    if result.status == "error":
        error = result.error
        said = "" if error is None else f" {error.code or error.name}: {error.message}"
    elif result.status == "pending":
        said = ""  # the handle is made anew
    else:
        said = f" {_json(None if result.output is None else msgpack.decode(result.output))}"
    return f"tool {part.tool_name}: {result.status}{said}{_shown_files(part.files)}"


def _shown_files(files: Sequence[FilePart]) -> str:
    """Files in an entry: by what they are and their digests."""
    return "".join(f" [{file.media_type} {file.blob.size} bytes, sha256:{file.blob.digest}]" for file in files)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def same_args(recorded: Any, came: Any, places: Places) -> bool:
    """Whether arguments are the recorded ones, but for what may differ."""
    first, second = (comparable(without_places(_json(args), places)) for args in (recorded, came))
    return same(first, second)


# --- answers --------------------------------------------------------------------------------------------------------


def recorded_answer(answer: ModelAnswer) -> RecordedAnswer:
    """An answer for a recording. What only its vendor understands is left out."""
    return RecordedAnswer(
        text=answer.text,
        calls=[
            RecordedModelCall(
                id=call.id, name=call.name, args=call.args if isinstance(call.args, dict) else {}, broken=call.broken
            )
            for call in answer.calls
        ],
        reasoning=answer.reasoning,
        finish_reason=answer.finish_reason,
        cut_off=answer.cut_off,
        model=answer.model,
        usage=None
        if answer.usage is None
        else {name: count for name, count in msgspec.structs.asdict(answer.usage).items() if count},
    )


def model_answer(recorded: RecordedAnswer, fill: Callable[[Any], Any]) -> ModelAnswer:
    """The answer of a recording. `fill` puts this machine's folders into a JSON value."""
    known = Usage.__struct_fields__
    return ModelAnswer(
        text=fill(recorded.text),
        calls=[_asked_again(call, fill) for call in recorded.calls],
        reasoning=fill(recorded.reasoning),
        finish_reason=recorded.finish_reason,
        cut_off=recorded.cut_off,
        model=recorded.model,
        usage=None
        if recorded.usage is None
        else Usage(**{name: count for name, count in recorded.usage.items() if name in known}),
    )


def recorded_fault(error: GoondanError) -> RecordedFault:
    """Why a model gave no answer, for a recording."""
    said = error.overflow if isinstance(error, ContextOverflow) else Overflow()
    return RecordedFault(error.info.code, error.info.message, said.tokens, said.window)


def model_error(fault: RecordedFault) -> GoondanError:
    """The error of a recording."""
    if fault.code == "E_CONTEXT_OVERFLOW":
        return ContextOverflow(fault.message, Overflow(fault.tokens, fault.window))
    return GoondanError(error_payload(fault.code, fault.message))


def shown_answer(answer: RecordedAnswer, only_calls: bool) -> str:
    """An answer as it is compared with that of another model: the calls, and the text unless `only_calls`."""
    calls = "".join(f" → {shown_call(call.name, call.args)}" for call in answer.calls)
    return calls.strip() if only_calls else (" ".join(answer.text.split()) + calls).strip()


def shown_call(tool: str, args: Any) -> str:
    """A call as it is compared."""
    return f"{tool} {_json(args)}"


def _asked_again(call: RecordedModelCall, fill: Callable[[Any], Any]) -> AskedCall:
    if call.broken is not None:
        return AskedCall(call.id, call.name, {}, call.broken)
    return asked_call(call.id, call.name, fill(call.args))


def recorded_result(result: ToolResult) -> dict[str, Any]:
    """A tool's result for a recording, as JSON values."""
    told: dict[str, Any] = {"status": result.status}
    if result.output is not None:
        told["output"] = msgpack.decode(result.output)
    if result.handle is not None:
        told["handle"] = result.handle
    if result.error is not None:
        told["error"] = msgspec.to_builtins(result.error)
    return told


def tool_result(recorded: Mapping[str, Any], fill: Callable[[Any], Any]) -> ToolResult:
    """The result of a recording. Raises msgspec.ValidationError when it is none."""
    told = fill(recorded)
    status = told.get("status")
    if status == "error":
        return ToolResult(status="error", error=msgspec.convert(told.get("error"), ToolError))
    if status == "pending":
        return ToolResult(status="pending", handle=msgspec.convert(told.get("handle"), str))
    if status != "ok":
        raise msgspec.ValidationError("a result is ok, error or pending")
    return ToolResult(status="ok", output=to_raw(told.get("output")))


# --- texts in JSON values -------------------------------------------------------------------------------------------


def named_places(places: Iterable[tuple[str, str]], value: Any) -> Any:
    """A JSON value with the names of folders in place of their paths."""
    known = list(places)
    return in_texts(value, lambda text: without_places(text, known))


def filled_places(places: Iterable[tuple[str, str]], value: Any) -> Any:
    """A JSON value with the paths of folders in place of their names."""
    known = [(name, path) for path, name in places]
    return in_texts(value, lambda text: without_places(text, known))
