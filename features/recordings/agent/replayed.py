"""The recording of a run answers an agent instance: its model's requests, its tools' calls, its servers' listings.

A request has to be the recorded one, but for times, ids and folders. The first difference of an instance is written
beside its conversation, where `gdn replay` finds it, and fails the turn with E_REPLAY_DIFFERS. The forms of requests,
answers and results are those that a recording is written in (tape.py).

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import msgpack

from goondan.agentproc.machine.messages import AssistantData, Message, ToolData, ToolResultPart, UserData, files_of
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers import base
from goondan.features.recordings import wire
from goondan.features.recordings.wire import RecordedAnswer, RecordedFault, RecordedModelCall, Request, texts
from goondan.features.recordings.wire.texts import comparable, same, shortened, without_places
from goondan.schemas.text.redaction import in_texts
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, tool_error
from goondan.schemas.wire.frames import FilePart, ToolError, ToolResult
from goondan.schemas.worker.servers import ServerListing

# --- what stands in a recording ---------------------------------------------------------------------------------------


#: Tools whose later answers come in a replay as they did in the run: agents answer, and they run.
ANSWERED_BY_AGENTS: Final = frozenset(("agents__request", "handoff__request"))

#: Folders of this machine, each with the name that stands for it; longest first.
Places = Sequence[tuple[str, str]]


def request_of(request: base.ModelRequest, places: Places, *, shorten: bool = True) -> Request:
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


def recorded_answer(answer: base.ModelAnswer) -> RecordedAnswer:
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


def model_answer(recorded: RecordedAnswer, fill: Callable[[Any], Any]) -> base.ModelAnswer:
    """The answer of a recording. `fill` puts this machine's folders into a JSON value."""
    known = base.Usage.__struct_fields__
    return base.ModelAnswer(
        text=fill(recorded.text),
        calls=[_asked_again(call, fill) for call in recorded.calls],
        reasoning=fill(recorded.reasoning),
        finish_reason=recorded.finish_reason,
        cut_off=recorded.cut_off,
        model=recorded.model,
        usage=None
        if recorded.usage is None
        else base.Usage(**{name: count for name, count in recorded.usage.items() if name in known}),
    )


def recorded_fault(error: GoondanError) -> RecordedFault:
    """Why a model gave no answer, for a recording."""
    said = error.overflow if isinstance(error, base.ContextOverflow) else base.Overflow()
    return RecordedFault(error.info.code, error.info.message, said.tokens, said.window)


def model_error(fault: RecordedFault) -> GoondanError:
    """The error of a recording."""
    if fault.code == "E_CONTEXT_OVERFLOW":
        return base.ContextOverflow(fault.message, base.Overflow(fault.tokens, fault.window))
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
    return base.asked_call(call.id, call.name, fill(call.args))


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


def filled_places(places: Iterable[tuple[str, str]], value: Any) -> Any:
    """A JSON value with the paths of folders in place of their names."""
    known = [(name, path) for path, name in places]
    return in_texts(value, lambda text: without_places(text, known))


#: The id of the one message of a question that is asked outside of the conversation (agentproc/model/calls.py).
ASIDE: Final = "aside"
#: The instance whose turns stand for those of an instance that the recording does not know.
USUAL: Final = "default"

#: A request: the number of the turn, the number of the step, whether it is aside, which of several.
_Asked = tuple[int, int, bool, int]


class Replayed:
    """The recorded part of one agent instance. `folder` is the instance's. The file is read at the first use."""

    def __init__(self, spec: wire.ReplaySpec, agent: str, instance: str, folder: str) -> None:
        self._spec = spec
        self._agent = agent
        self._instance = instance
        self._folder = folder
        self._turn = 0
        self._places: Places = ()
        self._loaded = False
        self._turns: dict[int, wire.RecordedTurn] = {}
        self._steps: dict[_Asked, tuple[wire.RecordedStep, wire.Request]] = {}
        self._calls: dict[tuple[int, int], list[wire.RecordedCall]] = {}
        self._listings: dict[tuple[str, int], Any] = {}
        self._asked: Counter[tuple[int, int, bool]] = Counter()
        self._listed: Counter[str] = Counter()
        #: Whether recorded requests had the messages of their turns only.
        self.own = False
        #: How many tokens the context of the recorded model held; None: nobody knew it.
        self.window: int | None = None
        self._told = False

    def begin(self, turn: int, asked: str, places: Places) -> None:
        """A turn begins; `asked` is what it was asked. Raises GoondanError E_REPLAY_DIFFERS,
        E_CONFIG_INVALID_VALUE.
        """
        self._load()
        self._turn, self._places = turn, places
        recorded = self._turns.get(turn)
        if recorded is None:
            raise self._differs(0, "the number of turns", f"{len(self._turns)} turns", f"turn {turn}")
        came = self._comparable(asked)
        if not texts.same(texts.comparable(recorded.input), came):
            raise self._differs(0, "what the turn was asked", recorded.input, came)

    def answer(self, request: base.ModelRequest, *, aside: bool) -> base.ModelAnswer:
        """The recorded answer to a request. Raises GoondanError E_REPLAY_DIFFERS, and the recorded error."""
        recorded, expected = self._recorded(request, aside)
        while recorded.fault is not None and self._has_another(request, aside):
            recorded, expected = self._recorded(request, aside)
        found = texts.first_difference(expected, request_of(request, self._places))
        if found is not None:
            raise self._differs(request.step, *found)
        if recorded.answer is not None:
            return model_answer(recorded.answer, self._fill)
        fault = recorded.fault
        if fault is None:
            raise self._differs(request.step, "the answer", "", "a request that was not answered when it was recorded")
        raise model_error(fault)

    def compare(self, request: base.ModelRequest, answer: base.ModelAnswer) -> None:
        """Compare the answer of another model, or to another prompt, with the recorded one. Raises GoondanError
        E_REPLAY_DIFFERS.
        """
        recorded, _ = self._recorded(request, False)
        if recorded.answer is None:
            return
        only_calls = self._spec.only_calls
        expected = texts.comparable(shown_answer(recorded.answer, only_calls))
        came = self._comparable(shown_answer(recorded_answer(answer), only_calls))
        if not texts.same(expected, came):
            raise self._differs(request.step, "the model's answer", expected, came)

    def result(self, step: int, tool: str, args: Any) -> ToolResult | None:
        """The recorded result of a call. None: the recording has no such call, or it has no result."""
        waiting = self._calls.get((self._turn, step), [])
        for at, call in enumerate(waiting):
            if call.tool == tool and same_args(call.args, args, self._places):
                del waiting[at]
                with suppress(msgspec.ValidationError, GoondanError, TypeError, ValueError, OverflowError):
                    return tool_result(call.result, self._fill)
                return None
        return None

    def no_such_call(self, step: int, tool: str, args: Any) -> ToolResult:
        """The result of a call that the recording does not have."""
        recorded = self._calls.get((self._turn, step), [])
        expected = " or ".join(shown_call(call.tool, call.args) for call in recorded)
        error = self._differs(step, "a tool call", expected, self._comparable(shown_call(tool, args)))
        return ToolResult(status="error", error=tool_error(error.info.code, error.info.message, name="ReplayError"))

    def listing(self, server: str) -> ServerListing:
        """What an MCP server offered when it was asked for the first, second, … time. When it was asked less often:
        what it offered last. Raises GoondanError E_REPLAY_DIFFERS.
        """
        self._load()
        self._listed[server] += 1
        for n in range(self._listed[server], 0, -1):
            if (server, n) in self._listings:
                with suppress(msgspec.ValidationError):
                    return msgspec.convert(self._fill(self._listings[server, n]), ServerListing)
        raise self._differs(0, f"what MCP server {server} offers", "", "a question for it")

    # --- inside

    def _recorded(self, request: base.ModelRequest, aside: bool) -> tuple[wire.RecordedStep, wire.Request]:
        """The next recorded request of a step."""
        self._asked[self._turn, request.step, aside] += 1
        n = self._asked[self._turn, request.step, aside]
        found = self._steps.get((self._turn, request.step, aside, n))
        if found is None:
            came = request_of(request, self._places).entries
            raise self._differs(request.step, "the number of requests", "", came[-1] if came else "a request")
        return found

    def _has_another(self, request: base.ModelRequest, aside: bool) -> bool:
        """Whether another model was asked in place of the one whose request came last."""
        n = self._asked[self._turn, request.step, aside]
        found = self._steps.get((self._turn, request.step, aside, n + 1))
        return found is not None and found[0].in_place

    def _differs(self, step: int, what: str, expected: str, came: str) -> GoondanError:
        """The error of a difference. The instance's first one is written down."""
        difference = texts.Difference(self._agent, self._instance, self._turn, step, what, expected, came)
        if not self._told:
            self._told = True
            path = os.path.join(self._folder, texts.DIFFERENCE_FILE)
            with suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(texts.FoundDifference(time.time_ns(), difference)))
        return texts.differs(difference)

    def _comparable(self, text: str) -> str:
        return texts.comparable(texts.without_places(text, self._places))

    def _fill(self, value: Any) -> Any:
        return filled_places(self._places, value)

    def _load(self) -> None:
        """Read the file. Raises GoondanError E_CONFIG_INVALID_VALUE."""
        if self._loaded:
            return
        _, parts = wire.read_recording(self._spec.recording, lambda part: part.agent == self._agent)
        known = {part.instance for part in parts}
        instance = self._instance if self._instance in known else USUAL
        own = [part for part in parts if part.instance == instance]
        self._turns = {part.turn: part for part in own if isinstance(part, wire.RecordedTurn)}
        for step, whole in wire.whole_requests(part for part in own if isinstance(part, wire.RecordedStep)):
            self._steps[step.turn, step.step, step.aside, step.n] = step, whole
            self.own = self.own or step.own
            self.window = self.window or step.window
        for part in own:
            if isinstance(part, wire.RecordedCall):
                self._calls.setdefault((part.turn, part.step), []).append(part)
            elif isinstance(part, wire.RecordedListing):
                self._listings[part.server, part.n] = part.listing
        self._loaded = True


class ReplayProvider:
    """Answers each request at once with the recorded answer, without a model and without a network."""

    def __init__(self, replayed: Replayed) -> None:
        self._replayed = replayed

    @property
    def needs_history(self) -> bool:
        """As the recorded provider did."""
        return not self._replayed.own

    async def complete(
        self,
        request: base.ModelRequest,
        on_delta: Callable[[base.TextDelta], None] | None = None,
        on_news: Callable[[base.ModelNews], None] | None = None,
    ) -> base.ModelAnswer:
        """The recorded answer. Raises GoondanError E_REPLAY_DIFFERS, and the recorded error."""
        answer = self._replayed.answer(request, aside=is_aside(request))
        if on_delta is not None and answer.text:
            on_delta(base.TextDelta(answer.text))
        return answer

    async def window(self, request: base.ModelRequest) -> int | None:
        """That of the recorded model (tokens)."""
        return self._replayed.window

    def forget(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to close."""


def is_aside(request: base.ModelRequest) -> bool:
    """Whether a question is asked outside of the conversation."""
    return len(request.messages) == 1 and request.messages[0].id == ASIDE
