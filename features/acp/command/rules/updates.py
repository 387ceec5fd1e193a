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
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec

from goondan.schemas.text.visible import argument_line, visible_line
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.runtime_events import RuntimeEvent

Update = dict[str, Any]

#: The longest result of a tool that a client is shown, and the longest title of a call (characters).
MAX_RESULT: Final = 4000
MAX_TITLE: Final = 160
#: The longest difference (characters), and the largest arguments that are shown whole (bytes).
MAX_DIFF: Final = 64 << 10
MAX_ARGUMENTS: Final = 8 << 10
#: What stands between a text that is void and the one that takes its place.
AGAIN: Final = "\n\n[what follows takes the place of this]\n\n"
#: The kinds of live events that are pieces of text, and their updates.
CHUNKS: Final = {"text": "agent_message_chunk", "reasoning": "agent_thought_chunk"}
_STATUS: Final = {"tool.waits": "pending", "tool.completed": "completed", "tool.failed": "failed"}

#: The kinds of calls, by a word of the tool's name. The first row with such a word counts.
KINDS: Final = {
    "execute": "bash shell exec execute run command script terminal",
    "fetch": "http https fetch web url browse download",
    "edit": "write edit patch create append insert replace mkdir update",
    "delete": "delete remove rm unlink",
    "move": "move rename mv",
    "search": "search find grep glob",
    "read": "read cat list view open show",
}
#: The names of arguments that say which file a call is about, and what it is before and after an edit.
_PATH: Final = ("path", "file_path", "filePath", "file", "filename", "source")
_BEFORE: Final = ("old_string", "oldText", "old_text", "old_str", "oldString")
_AFTER: Final = ("new_string", "newText", "new_text", "new_str", "newString", "content")


def kind_of(tool: str) -> str:
    """The protocol's kind of a call, by the tool's name: that of the export counts before that of the tool."""
    for part in reversed(tool.split("__")):
        words = set(re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", part).lower()))
        for kind, those in KINDS.items():
            if words & {*those.split()}:
                return kind
    return "other"


def call_of(call_id: str, tool: str, args: Any, workdir: str) -> Update:
    """The update that tells of a new call. `workdir`: the folder that relative paths are of."""
    title, kind = visible_line(f"{tool} {argument_line(args)}".strip())[:MAX_TITLE], kind_of(tool)
    told: Update = {"sessionUpdate": "tool_call", "toolCallId": call_id, "title": title, "kind": kind}
    told["status"] = "pending"
    args = args if isinstance(args, dict) else {}
    if len(msgspec.json.encode(args)) <= MAX_ARGUMENTS:
        told["rawInput"] = args
    path, before, after = (_named(args, names) for names in (_PATH, _BEFORE, _AFTER))
    if kind not in ("execute", "fetch", "other") and path and "\0" not in path and "://" not in path:
        place = posixpath.normpath(posixpath.join(workdir, path))
        told["locations"] = [{"path": place}]
        if kind == "edit" and after is not None and not args.get("append") and len(f"{before}{after}") <= MAX_DIFF:
            told["content"] = [{"type": "diff", "path": place, "oldText": before, "newText": after}]
    return told


def _named(args: dict[str, Any], names: Iterable[str]) -> str | None:
    return next((args[name] for name in names if isinstance(args.get(name), str)), None)


def result_of(call_id: str, part: dict[str, Any]) -> Update:
    """The update that tells of the end of a call, from the part of a message that has its result. Of an edit that was
    made, the client goes on to show the difference.
    """
    result = part["result"]
    failed = result["status"] == "error"
    told = {"sessionUpdate": "tool_call_update", "toolCallId": call_id, "status": "failed" if failed else "completed"}
    if not failed and kind_of(part["toolName"]) == "edit":
        return told
    shown = result["error"]["message"] if failed else result.get("output")
    if not isinstance(shown, str):
        shown = msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
    return {**told, "content": [block(shown if len(shown) <= MAX_RESULT else f"{shown[:MAX_RESULT]}\n[…]")]}


def block(text: str) -> Update:
    """A text as content of a call."""
    return {"type": "content", "content": {"type": "text", "text": text}}


def chunk(kind: str, text: str) -> Update:
    """A piece of text."""
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}


def replayed(messages: Iterable[Any], workdir: str) -> Iterator[Update]:
    """A stored conversation as updates, in order."""
    for turn, of_turn in groupby(messages, lambda message: message["id"].rpartition(".")[0]):
        yield from Telling(turn, workdir, asked=True).stored([*of_turn])


class Telling:
    """One turn that is told. `name` makes the ids of its calls unique in the session. `asked`: with what was asked."""

    def __init__(self, name: str, workdir: str, *, asked: bool = False) -> None:
        self._name = name
        self._workdir = workdir
        self._asked = asked
        self._step = 0
        #: The last step whose message was read.
        self._known = 0
        #: What the client has of a step's texts, by step and kind; and those of which something was lost.
        self._sent: dict[tuple[int, str], str] = {}
        self._lost: set[tuple[int, str]] = set()
        #: The calls that the client knows, and whether it was told their results.
        self._calls: dict[str, bool] = {}

    def wants_stored(self, event: RuntimeEvent) -> bool:
        """Whether the messages that are stored so far have to be read before this event is heard."""
        return event.kind in ("tool.called", "tool.completed", "tool.failed") or 0 < self._step < event.step

    def hear(self, event: RuntimeEvent) -> list[Update]:
        """The updates of a live event."""
        self._step = max(self._step, event.step)
        told = self._void(event.step or self._step) if event.again else []
        if event.kind in CHUNKS:
            return told + self._piece((event.step, event.kind), event.text or "", event.at)
        if event.tool_call_id is None:
            return told
        call_id = self._id(event.step, event.tool_call_id)
        if call_id not in self._calls:  # no stored message has it yet
            self._calls[call_id] = False
            told.append(call_of(call_id, event.tool_name or "", None, self._workdir))
        if self._calls[call_id]:
            return told
        status = _STATUS.get(event.kind, "in_progress")
        update: Update = {"sessionUpdate": "tool_call_update", "toolCallId": call_id, "status": status}
        if event.kind == "tool.progress":
            update["content"] = [block(visible_line(event.message or f"{event.done} of {event.total}"))]
        return [*told, update]

    def stored(self, messages: Sequence[Any]) -> list[Update]:
        """The updates that the turn's stored messages make."""
        told: list[Update] = []
        number = 0
        for message in messages:
            data = message["data"]
            if data["role"] == "user" and self._asked:
                files = [f"[{file.get('name') or file['mediaType']}]" for file in data.get("files", ())]
                told.append(chunk("user_message_chunk", "\n".join([data["content"], *files])))
            elif data["role"] == "assistant" and message["source"]["type"] == "assistant":
                number += 1
                told += self._whole(number, message)
            elif data["role"] == "tool":
                for part in data["content"]:
                    call_id = self._id(number, part["toolCallId"])
                    if self._calls.get(call_id) is False:
                        self._calls[call_id] = True
                        told.append(result_of(call_id, part))
        return told

    def end(self, answer: Answer, messages: Sequence[Any]) -> list[Update]:
        """The updates that the end makes: what the client does not have of the stored messages and of the answer."""
        # An extension may have removed some; then nobody knows which step a message is of.
        models = [message for message in messages if message["data"]["role"] == "assistant"]
        told = self.stored(messages) if len(models) == answer.steps else []
        told += self._rest((answer.steps, "reasoning"), answer.reasoning or "")
        return told + self._rest((answer.steps, "text"), answer.response or "")

    # --- inside

    def _id(self, step: int, call: str) -> str:
        return f"{self._name}.{step}.{call}"

    def _void(self, step: int) -> list[Update]:
        """What was heard of a step is void."""
        if step <= self._known:
            return []
        self._lost -= {(step, kind) for kind in CHUNKS}
        return [chunk(told, AGAIN) for kind, told in CHUNKS.items() if self._sent.pop((step, kind), "")]

    def _piece(self, which: tuple[int, str], text: str, at: int) -> list[Update]:
        """What of a live piece is new to the client, unless something before it was lost."""
        has = self._sent.get(which, "")
        if at > len(has):
            self._lost.add(which)
        if which in self._lost or which[0] <= self._known:
            return []
        return self._rest(which, has + text[len(has) - at :])

    def _rest(self, which: tuple[int, str], whole: str) -> list[Update]:
        """What the client does not have of a text."""
        has = self._sent.get(which, "")
        if has.startswith(whole):  # of long reasoning only a part is kept
            return []
        self._sent[which] = whole
        return [chunk(CHUNKS[which[1]], whole[len(has) :] if whole.startswith(has) else AGAIN + whole)]

    def _whole(self, number: int, message: Any) -> list[Update]:
        """What the client does not know of the model's message of a step."""
        told: list[Update] = []
        parts = message["data"]["content"]
        if number > self._known:
            self._known = number
            told += self._rest((number, "reasoning"), message.get("metadata", {}).get("reasoning", ""))
            told += self._rest((number, "text"), "".join(part["text"] for part in parts if part["type"] == "text"))
        for part in parts:
            if part["type"] == "tool-call" and (call_id := self._id(number, part["toolCallId"])) not in self._calls:
                self._calls[call_id] = False
                told.append(call_of(call_id, part["toolName"], part["args"], self._workdir))
        return told


def outcome(answer: Answer) -> Update:
    """The result of a prompt: why the turn ended, and what it has used. Raises GoondanError: why it failed."""
    refused = answer.finish_reason in ("refusal", "content_filter", "content-filter", "safety")  # as vendors say it
    reason = "max_tokens" if answer.cut_off else "refusal" if refused else "end_turn"
    if answer.error is not None and answer.error.code == "E_CANCELLED":
        reason = "cancelled"
    elif answer.finish_reason == "max_steps":
        reason = "max_turn_requests"
    elif answer.error is not None:
        raise GoondanError(answer.error)
    if (of := answer.usage) is None:
        return {"stopReason": reason}
    tokens = {"inputTokens": of.input_tokens, "outputTokens": of.output_tokens, "thoughtTokens": of.reasoning_tokens}
    return {"stopReason": reason, "usage": {**tokens, "totalTokens": of.input_tokens + of.output_tokens}}
