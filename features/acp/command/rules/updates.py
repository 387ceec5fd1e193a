"""A turn as updates of a session (`session/update`): from its live events, its stored messages, its answer. Pure.

Live events are best effort, and stored messages are the truth. A piece of text is passed on only where it continues
what the client has; the rest of a step comes from its stored message, and the rest of the answer from the answer. So
nothing is missing, and nothing comes twice. Nothing can be taken back either: when a step is asked again, or a stored
text is another one than was heard, a line says so and the text begins anew.

The k-th message of the model in a turn is that of its step k.

Source: PROTOCOL.md "Live events"; https://agentclientprotocol.com/protocol/prompt-turn and /tool-calls.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from goondan.schemas.text.visible import argument_line, visible_line
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.runtime_events import RuntimeEvent
from goondan.schemas.wire.usage import Usage

Update = dict[str, Any]

#: The longest result of a tool that a client is shown (characters): a screenful or two.
MAX_RESULT: Final = 4000
#: The longest text of a file in a difference (characters), and the largest arguments that are shown whole (bytes).
MAX_DIFF: Final = 64 << 10
MAX_ARGUMENTS: Final = 8 << 10
#: The longest title of a call (characters).
MAX_TITLE: Final = 160
#: What stands between a text that is void and the one that takes its place.
AGAIN: Final = "\n\n[what follows takes the place of this]\n\n"
#: Live events before which a message was stored.
_STORED_BEFORE: Final = ("tool.called", "tool.completed", "tool.failed")
#: The field of a message's metadata that has the model's reasoning (agentproc/machine/messages.py).
_REASONING: Final = "reasoning"

#: The kinds of calls, by a word of the tool's name. The first row with such a word counts.
KINDS: Final[Mapping[str, frozenset[str]]] = {
    "execute": frozenset({"bash", "shell", "exec", "execute", "run", "command", "script", "terminal"}),
    "fetch": frozenset({"http", "https", "fetch", "web", "url", "browse", "download"}),
    "edit": frozenset({"write", "edit", "patch", "create", "append", "insert", "replace", "mkdir", "update"}),
    "delete": frozenset({"delete", "remove", "rm", "unlink"}),
    "move": frozenset({"move", "rename", "mv"}),
    "search": frozenset({"search", "find", "grep", "glob"}),
    "read": frozenset({"read", "cat", "list", "view", "open", "show"}),
    "think": frozenset({"think", "plan"}),
}
_WITH_FILES: Final = ("read", "edit", "delete", "move", "search")
#: The names of arguments that are a file or a folder; and the texts before and after an edit.
_PATHS: Final = ("path", "file_path", "filePath", "file", "filename", "source", "destination", "from", "to")
_BEFORE: Final = ("old_string", "oldText", "old_text", "old_str", "oldString")
_AFTER: Final = ("new_string", "newText", "new_text", "new_str", "newString", "content", "contents")


# --- calls of tools -------------------------------------------------------------------------------------------------


def kind_of(tool: str) -> str:
    """The protocol's kind of a call, by the tool's name: that of the export counts before that of the tool."""
    for part in reversed(tool.split("__")):
        words = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", part).lower()))
        for kind, those in KINDS.items():
            if words & those:
                return kind
    return "other"


def call_of(call_id: str, tool: str, args: Any, workdir: str) -> Update:
    """What a client is told of a call, without its status. `workdir`: the folder that relative paths are of."""
    kind = kind_of(tool)
    told: Update = {"toolCallId": call_id, "title": _title(tool, argument_line(args)), "kind": kind}
    if not isinstance(args, dict):
        return told
    places = [posixpath.normpath(posixpath.join(workdir, path)) for path in _paths(args)] if kind in _WITH_FILES else []
    if places:
        line = args.get("line")
        at = {"line": line} if isinstance(line, int) and not isinstance(line, bool) and 0 <= line < 1 << 31 else {}
        told["locations"] = [{"path": place, **at} for place in places]
    if kind == "edit" and places and (change := _change(args)) is not None:
        told["content"] = [{"type": "diff", "path": places[0], **change}]
    if len(msgspec.json.encode(args)) <= MAX_ARGUMENTS:
        told["rawInput"] = args
    return told


def _title(tool: str, arguments: str) -> str:
    return visible_line(f"{tool} {arguments}".strip())[:MAX_TITLE]


def _paths(args: dict[str, Any]) -> list[str]:
    found = [args[name] for name in _PATHS if isinstance(args.get(name), str)]
    return [path for path in dict.fromkeys(found) if path and "\0" not in path and "://" not in path]


def _change(args: dict[str, Any]) -> dict[str, str] | None:
    """The texts before and after, as far as the arguments say. None: they do not, or are long."""
    before = next((args[name] for name in _BEFORE if isinstance(args.get(name), str)), None)
    after = next((args[name] for name in _AFTER if isinstance(args.get(name), str)), None)
    if after is None or args.get("append") is True or len(after) + len(before or "") > MAX_DIFF:
        return None
    return {"newText": after} if before is None else {"oldText": before, "newText": after}


def text_of(value: Any) -> str:
    """A value as a client is shown it: a text as it is, anything else as JSON, all of it short."""
    if isinstance(value, str):
        text = value
    else:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}\n[… {len(text) - MAX_RESULT} characters more]"


def result_of(call_id: str, part: Mapping[str, Any], *, status_only: bool = False) -> Update:
    """The end of a call: its status and its result, from the part of the message that has it. `status_only`: the client
    goes on to show what it has, unless the call failed.
    """
    result = part.get("result")
    result = result if isinstance(result, dict) else {}
    error = result.get("error")
    failed = result.get("status") == "error" or error is not None
    if failed and isinstance(error, dict):
        said = f"{error.get('message')} [{error.get('code')}]" if error.get("code") else str(error.get("message"))
    else:
        said = text_of(result.get("output"))
    told: Update = {"toolCallId": call_id, "status": "failed" if failed else "completed"}
    if status_only and not failed:
        return told
    files = part.get("files")
    if isinstance(files, list) and files:
        said += f"\n[{len(files)} files, which the conversation has]"
    return {**told, "content": [_block(said)]} if said.strip() not in ("", "null") else told


def _block(text: str) -> Update:
    return {"type": "content", "content": {"type": "text", "text": text}}


def said(text: str) -> Update:
    """A piece of what the agent says."""
    return {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}


def thought(text: str) -> Update:
    """A piece of the model's reasoning."""
    return {"sessionUpdate": "agent_thought_chunk", "content": {"type": "text", "text": text}}


# --- stored messages ------------------------------------------------------------------------------------------------


def _data(message: Any) -> dict[str, Any]:
    data = message.get("data") if isinstance(message, dict) else None
    return data if isinstance(data, dict) else {}


def _parts(message: Any) -> list[dict[str, Any]]:
    content = _data(message).get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _text(message: Any) -> str:
    return "".join(str(part.get("text") or "") for part in _parts(message) if part.get("type") == "text")


def _reasoning(message: Any) -> str:
    metadata = message.get("metadata") if isinstance(message, dict) else None
    found = metadata.get(_REASONING) if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else ""


def replayed(messages: Iterable[Any], workdir: str) -> Iterator[Update]:
    """A stored conversation as updates, in order."""
    for turn, of_turn in groupby(messages, lambda message: str(message["id"]).rpartition(".")[0]):
        found = list(of_turn)
        for message in found:
            yield from _asked(_data(message))
        yield from Telling(turn, workdir).stored(found)


def _asked(data: dict[str, Any]) -> Iterator[Update]:
    if data.get("role") != "user":
        return
    files = data.get("files")
    named = [file.get("name") or file.get("mediaType") for file in files or [] if isinstance(file, dict)]
    text = "\n".join([str(data.get("content") or ""), *(f"[{name}]" for name in named)]).strip("\n")
    if text:
        yield {"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": text}}


# --- a running turn -------------------------------------------------------------------------------------------------


class _Said(Struct):
    """A text of a step, or its reasoning, as far as the client has it."""

    #: What it has.
    text: str = ""
    #: Something of it was lost: the rest comes from the stored message.
    lost: bool = False
    #: It has something that is void.
    void: bool = False

    def hear(self, piece: str, at: int) -> str:
        """What of a live piece is new to the client. "": nothing, or what comes before it was lost."""
        self.lost = self.lost or at > len(self.text)
        new = "" if self.lost else piece[len(self.text) - at :]
        return self._add(new)

    def complete(self, whole: str) -> str:
        """What the client still has to get of the whole text."""
        if whole.startswith(self.text):
            return self._add(whole[len(self.text) :])
        if self.text.startswith(whole):  # of long reasoning only a part is kept
            return ""
        self.forget()
        return self._add(whole)

    def forget(self) -> None:
        """What was heard is void."""
        self.void = self.void or bool(self.text)
        self.text, self.lost = "", False

    def _add(self, new: str) -> str:
        if not new:
            return ""
        self.text += new
        began, self.void = self.void, False
        return AGAIN + new if began else new


class _Step(Struct):
    """A step, as far as the client knows of it."""

    #: Its text.
    text: _Said = field(default_factory=_Said)
    #: Its reasoning.
    reasoning: _Said = field(default_factory=_Said)
    #: Its message was read.
    known: bool = False


class Telling:
    """One turn that is told. `name` makes the ids of its calls unique in the session."""

    def __init__(self, name: str, workdir: str) -> None:
        self._name = name
        self._workdir = workdir
        self._steps: dict[int, _Step] = {}
        self._step = 0
        #: Id of a call -> how far it is: "" it is announced, "ended" without its result, "told" with it.
        self._calls: dict[str, str] = {}
        #: The calls with a difference. What is sent next would take its place.
        self._changes: set[str] = set()

    def wants_stored(self, event: RuntimeEvent) -> bool:
        """Whether the messages that are stored so far have to be read before this event is heard."""
        return event.kind in _STORED_BEFORE or 0 < self._step < event.step

    def hear(self, event: RuntimeEvent) -> list[Update]:
        """The updates of a live event."""
        self._step = max(self._step, event.step)
        if event.kind in ("text", "reasoning"):
            return self._piece(event)
        if event.again and event.kind == "turn.started" and self._step:
            self._void(self._at(self._step))
        if event.tool_call_id is None:
            return []
        call_id = self._id(event.step, event.tool_call_id)
        told = [] if call_id in self._calls else self._announce(call_id, event)
        if self._calls[call_id] == "told":
            return told
        update: Update = {"sessionUpdate": "tool_call_update", "toolCallId": call_id}
        match event.kind:
            case "tool.called":
                return [*told, {**update, "status": "in_progress"}]
            case "tool.waits":
                return [*told, {**update, "status": "pending"}]
            case "tool.progress":
                return [*told, {**update, "status": "in_progress", "content": [_block(_progress(event))]}]
            case "tool.completed" | "tool.failed":
                self._calls[call_id] = "ended"
                return [*told, {**update, "status": event.kind.removeprefix("tool.")}]
        return told

    def stored(self, messages: Sequence[Any]) -> list[Update]:
        """The updates that the turn's stored messages make."""
        told: list[Update] = []
        number = 0
        for message in messages:
            role = _data(message).get("role")
            if role == "assistant" and message["source"]["type"] == "assistant":
                number += 1
                told += self._whole(number, message)
            elif role == "tool":
                for part in _parts(message):
                    told += self._result(number, part)
        return told

    def end(self, answer: Answer, messages: Sequence[Any] = ()) -> list[Update]:
        """The updates that the end makes: what the client does not have of the stored messages and of the answer."""
        models = [message for message in messages if _data(message).get("role") == "assistant"]
        # An extension may have removed some; then nobody knows which step a message is of.
        told = self.stored(messages) if len(models) == answer.steps else []
        if answer.response is None and answer.reasoning is None:
            return told
        step = self._at(answer.steps)
        return [
            *told,
            *map(thought, filter(None, [step.reasoning.complete(answer.reasoning or "")])),
            *map(said, filter(None, [step.text.complete(answer.response or "")])),
        ]

    # --- inside

    def _at(self, number: int) -> _Step:
        return self._steps.setdefault(number, _Step())

    def _void(self, step: _Step) -> None:
        if not step.known:
            step.text.forget()
            step.reasoning.forget()

    def _piece(self, event: RuntimeEvent) -> list[Update]:
        step = self._at(event.step)
        if step.known:  # an older piece, of a step whose end was read
            return []
        if event.again:
            self._void(step)
        what = step.text if event.kind == "text" else step.reasoning
        new = what.hear(event.text or "", event.at)
        if not new:
            return []
        return [said(new) if event.kind == "text" else thought(new)]

    def _whole(self, number: int, message: Any) -> list[Update]:
        step = self._at(number)
        told: list[Update] = []
        if not step.known:
            step.known = True
            told += map(thought, filter(None, [step.reasoning.complete(_reasoning(message))]))
            told += map(said, filter(None, [step.text.complete(_text(message))]))
        for part in _parts(message):
            call_id = self._id(number, str(part.get("toolCallId")))
            if part.get("type") != "tool-call" or call_id in self._calls:
                continue
            self._calls[call_id] = ""
            call = call_of(call_id, str(part.get("toolName")), part.get("args"), self._workdir)
            if "content" in call:
                self._changes.add(call_id)
            told.append({"sessionUpdate": "tool_call", "status": "pending", **call})
        return told

    def _result(self, number: int, part: dict[str, Any]) -> list[Update]:
        call_id = self._id(number, str(part.get("toolCallId")))
        if self._calls.get(call_id, "told") == "told":
            return []
        self._calls[call_id] = "told"
        ended = result_of(call_id, part, status_only=call_id in self._changes)
        return [{"sessionUpdate": "tool_call_update", **ended}]

    def _announce(self, call_id: str, event: RuntimeEvent) -> list[Update]:
        """A call that no stored message has yet."""
        self._calls[call_id] = ""
        title, kind = _title(event.tool_name or "", event.arguments or ""), kind_of(event.tool_name or "")
        return [
            {"sessionUpdate": "tool_call", "toolCallId": call_id, "title": title, "kind": kind, "status": "pending"}
        ]

    def _id(self, step: int, call: str) -> str:
        return f"{self._name}.{step}.{call}"


def _progress(event: RuntimeEvent) -> str:
    total = "" if event.total is None else f" of {event.total:g}"
    done = "" if event.done is None else f"{event.done:g}{total}"
    return " ".join(filter(None, [done, visible_line(event.message or "")]))[:MAX_RESULT]


# --- the end --------------------------------------------------------------------------------------------------------

#: Why a model stops by itself because it refuses, in the words of the vendors.
_REFUSALS: Final = ("refusal", "content_filter", "content-filter", "safety")


def stop_reason(answer: Answer) -> str | None:
    """The protocol's reason why a turn ended. None: it failed, and the error says why."""
    if answer.status == "failed":
        if answer.error is not None and answer.error.code == "E_CANCELLED":
            return "cancelled"
        return "max_turn_requests" if answer.finish_reason == "max_steps" else None
    if answer.cut_off:
        return "max_tokens"
    return "refusal" if (answer.finish_reason or "").lower() in _REFUSALS else "end_turn"


def usage_of(usage: Usage | None) -> dict[str, int] | None:
    """What the turn has used, in the protocol's words."""
    if usage is None:
        return None
    return {
        "totalTokens": usage.input_tokens + usage.output_tokens,
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "thoughtTokens": usage.reasoning_tokens,
        "cachedReadTokens": usage.cached_tokens,
        "cachedWriteTokens": usage.cache_write_tokens,
    }
