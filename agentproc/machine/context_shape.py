"""Which messages of a conversation are shown, and which results are shown shortened. Pure.

A shape is stored. It changes in jumps only, so what is shown begins with what was shown before, for every vendor's
cache. No cut lies between a call and its result. The message of the user that began the turn is always shown.

A model reads a part of a result that it was shown shortened with the tool `tool-result__read`. It is offered from the
first step to every agent that has tools, so that the list of tools does not change when a result is shortened for the
first time. It reads nothing but the agent's own conversation.

Source: docs/design/turns.md section 10; docs/context.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, Final

from msgspec import Struct, structs

from goondan.agentproc.machine.estimate import AROUND, files_size, text_size, tools_size
from goondan.agentproc.machine.messages import Message, MessageSource, ToolData, ToolResultPart, UserData, error_result
from goondan.agentproc.providers.history import result_text
from goondan.schemas.bundle.arguments import compile_arguments, invalid_arguments
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire import codec, errors, frames

#: A result is never shown with less (bytes): its beginning, its end and how the rest is read.
LEAST_RESULT: Final = 240
#: How much of a shortened result is its beginning; the rest is its end.
HEAD: Final = 2 / 3
#: The room for the mark in a shortened result (bytes).
MARK: Final = 160
#: The line before a summary, and in the place of messages that were left out without one.
SUMMARY: Final = "Summary of the conversation so far, which is no longer shown word by word:\n\n"
LEFT_OUT: Final = "(The {} messages before this are left out here, because the whole conversation is too long.)"


class Shape(Struct, frozen=True, omit_defaults=True):
    """What is left out of a conversation."""

    #: The id of the last message that is left out; "": none is.
    through: str = ""
    #: How many messages are left out.
    left_out: int = 0
    #: What stands in their place; "": only that they are left out.
    summary: str = ""
    #: The ids of messages with results that are shown shortened -> the bytes of each result.
    shortened: dict[str, int] = {}


def begin_of(messages: Sequence[Message], shape: Shape) -> int:
    """The index of the first message that is shown. 0 when what was left out is not in the conversation any more."""
    return index_of(messages, shape.through) + 1 if shape.through else 0


def index_of(messages: Sequence[Message], message_id: str | None) -> int:
    """The index of a message, sought from the end, where it mostly is. -1: it is not there, or there is no id."""
    if message_id:
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].id == message_id:
                return index
    return -1


def shown_sizes(messages: Sequence[Message], sizes: Sequence[int], shape: Shape) -> list[int]:
    """The bytes of each message as it is shown."""
    if not shape.shortened:
        return list(sizes)
    most = shape.shortened
    return [
        _shown(message, size, most[message.id]) if message.id in most else size
        for message, size in zip(messages, sizes, strict=True)
    ]


def long_results(messages: Sequence[Message], sizes: Sequence[int], shape: Shape, most: int) -> dict[str, int]:
    """The messages that are shown with a result of more than `most` bytes and were not shortened before -> `most`."""
    begin, known = begin_of(messages, shape), shape.shortened
    return {
        messages[index].id: most
        for index in range(begin, len(messages))
        if sizes[index] > most + AROUND
        and messages[index].id not in known
        and _text(messages[index], sizes[index]) > most
    }


def _shown(message: Message, size: int, most: int) -> int:
    files = files_size(message)
    return min(size - files, (most + AROUND) * _results(message)) + files


def find_cut(messages: Sequence[Message], sizes: Sequence[int], begin: int, room: int, most: int | None = None) -> int:
    """The index of the first message that stays, so that at most `room` bytes and `most` messages stay. The last call
    stays with its results, and else the last message, whatever their size.

    A message of the user is a better beginning than one within a turn, if at least half as much stays with it.
    """
    cut = _last_group(messages)
    size, better, better_size = sum(sizes[cut:]), None, 0
    index = cut
    while index > begin:
        index -= 1
        size += sizes[index]
        if size > room or (most is not None and len(messages) - index > most):
            break
        if not isinstance(messages[index].data, ToolData):
            cut = index
            if isinstance(messages[index].data, UserData):
                better, better_size = index, size
    if better is not None and better_size * 2 >= sum(sizes[cut:]):
        cut = better
    return max(cut, begin)


def _last_group(messages: Sequence[Message]) -> int:
    index = len(messages) - 1
    while index > 0 and isinstance(messages[index].data, ToolData):
        index -= 1
    return max(index, 0)


def squeezed(messages: Sequence[Message], sizes: Sequence[int], over: int) -> dict[str, int]:
    """The bytes of results with which the messages are `over` bytes shorter, the longest ones first. When that is not
    possible, each result is as short as it may be. `sizes` are as shown now.
    """
    results = {m.id: _text(m, size) + AROUND for m, size in zip(messages, sizes, strict=True) if _results(m)}
    room = max(0, sum(results.values()) - over)
    ascending = sorted(results.values())
    cap = 0
    for index, size in enumerate(ascending):
        cap = room // (len(ascending) - index)
        if size > cap:
            break
        room -= size
    cap = max(cap - AROUND, LEAST_RESULT)
    return {name: cap for name, size in results.items() if size > cap + AROUND}


def _text(message: Message, size: int) -> int:
    """The bytes of each result's text in a message of `size` bytes; 0 for a message without results."""
    results = _results(message)
    return (size - files_size(message)) // results - AROUND if results else 0


def _results(message: Message) -> int:
    return len(message.data.content) if isinstance(message.data, ToolData) else 0


class View(Struct, eq=False):
    """The messages that are shown. A message that is shown in another form is the same object in each request, as long
    as its form stays.
    """

    #: The messages with shortened results, by their ids: each with its length, and as it is shown.
    _shortened: dict[str, tuple[Message, int, Message]] = {}
    #: The first message that was shown with a note, the note, and what was shown.
    _noted: tuple[Message, str, list[Message]] | None = None

    def of(self, messages: list[Message], shape: Shape, opening: str | None) -> list[Message]:
        """What is shown of a conversation. `opening` is the id of the message that began the turn. Neither list may be
        changed afterwards.
        """
        if not shape.through and not shape.shortened:
            return messages
        begin = begin_of(messages, shape)
        shown = messages[begin:] if begin else messages
        if shape.shortened:
            most = shape.shortened
            if len(self._shortened) > 2 * len(most):
                self._shortened = {name: known for name, known in self._shortened.items() if name in most}
            shown = [self._short(message, most[message.id]) if message.id in most else message for message in shown]
        if begin == 0:
            return shown
        began = index_of(messages, opening)
        if 0 <= began < begin:
            shown = [messages[began], *shown]
        return [*self._with_note(shown[0], note_of(shape)), *shown[1:]]

    def _with_note(self, first: Message, note: str) -> list[Message]:
        """The first message with a note before it. It is one message where the first is the user's: some models take no
        two of them in a row.
        """
        known = self._noted
        if known is None or known[0] is not first or known[1] != note:
            told = Message("left-out", UserData(note), first.created_at, MessageSource("system"))
            made = [told, first]
            if isinstance(first.data, UserData):
                made = [
                    structs.replace(first, data=structs.replace(first.data, content=f"{note}\n\n{first.data.content}"))
                ]
            known = self._noted = (first, note, made)
        return known[2]

    def _short(self, message: Message, most: int) -> Message:
        known = self._shortened.get(message.id)
        if known is None or known[0] is not message or known[1] != most:
            known = self._shortened[message.id] = (message, most, shortened(message, most))
        return known[2]


def note_of(shape: Shape) -> str:
    """What stands in the place of the messages that are left out."""
    return SUMMARY + shape.summary if shape.summary else LEFT_OUT.format(shape.left_out)


def shortened(message: Message, most: int) -> Message:
    """The message with results of at most `most` bytes each. A longer one is shown with its beginning, its end and how
    the rest is read (`read`).
    """
    if not isinstance(message.data, ToolData):
        return message
    parts = [_shortened_part(message.id, part, most) for part in message.data.content]
    return structs.replace(message, data=ToolData(parts))


def _shortened_part(message_id: str, part: ToolResultPart, most: int) -> ToolResultPart:
    text = result_text(part.result)
    if part.result.status != "ok" or text_size(text) <= most:
        return part
    room = max(most - MARK, 0)
    head = within(text, int(room * HEAD))
    tail = within(text, room - int(room * HEAD), from_end=True)
    left = len(text) - len(head) - len(tail)
    mark = (
        f"\n[… {left} of {len(text)} characters are left out here. "
        f'tool-result__read {{"id": "{message_id}", "from": {len(head)}}} reads them. …]\n'
    )
    return structs.replace(part, result=structs.replace(part.result, output=codec.to_raw(head + mark + tail)))


def within(text: str, size: int, *, from_end: bool = False) -> str:
    """The beginning of a text, or its end, in at most `size` bytes."""
    if size <= 0:
        return ""
    if from_end:
        return text[-size:].encode("utf-8", "replace")[-size:].decode("utf-8", "ignore")
    return text[:size].encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


# --- the tool that reads a part of a result that was shown shortened --------------------------------------------------


NAME: Final = "tool-result__read"
ITEM: Final = CatalogItem(
    name=NAME,
    description="Read a part of an earlier tool result that is shown shortened. The mark in it says the id.",
    parameters={
        "type": "object",
        "properties": {
            "id": {"type": "string", "minLength": 1, "maxLength": 512, "description": "The id in the mark."},
            "from": {"type": "integer", "minimum": 0, "description": "The first character, from 0 (default 0)."},
            "length": {
                "type": "integer",
                "minimum": 1,
                "description": "How many characters. At most as many are given as fit.",
            },
        },
        "required": ["id"],
        "additionalProperties": False,
    },
    idempotent=True,
)


class Offered(Struct, eq=False):
    """The tools that a request offers: those of its step, and the reader beside them. They are counted again only when
    they have changed.
    """

    #: The tools of the step.
    _given: list[CatalogItem] = []
    #: What was offered with them.
    _offered: list[CatalogItem] = []
    #: The bytes of their definitions.
    size: int = 0

    def of(self, items: list[CatalogItem]) -> list[CatalogItem]:
        """What is offered beside these; the list itself if it needs no reader. The list must not be changed
        afterwards.
        """
        known = self._given
        if items is not known and (len(items) != len(known) or not all(map(is_, items, known))):
            needs = bool(items) and all(item.name != NAME for item in items)
            self._given, self._offered = items, [ITEM, *items] if needs else items
            self.size = tools_size(self._offered)
        return self._offered


#: Where the context is not known: the most of one answer (bytes).
USUAL_BYTES: Final = 16_000
#: The room for the line above the characters (bytes).
HEAD_LINE: Final = 80


def read(messages: Iterable[Message], args: Any, most: int) -> frames.ToolResult:
    """The characters that `args` name, of a result in `messages`: as many as fit into `most` bytes."""
    checked, issues = compile_arguments(ITEM.parameters, {}).apply(args)
    if issues:
        return error_result(invalid_arguments(NAME, issues, ITEM.parameters))
    found = next((m for m in messages if m.id == checked["id"] and isinstance(m.data, ToolData)), None)
    if found is None or not isinstance(found.data, ToolData):
        error = errors.tool_error("E_TOOL_INVALID_ARGS", "no result of this conversation has this id", name="NotFound")
        return error_result(error)
    text = "\n".join([result_text(part.result) for part in found.data.content])
    begin = min(checked.get("from", 0), len(text))
    piece = within(text[begin : begin + checked.get("length", len(text))], max(1, most - HEAD_LINE))
    line = f"[characters {begin} to {begin + len(piece)} of {len(text)}]\n"
    return frames.ToolResult(status="ok", output=codec.to_raw(line + piece))
