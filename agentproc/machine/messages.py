"""The conversation of one instance: messages, the events that change them, and the form that a model accepts.

NextMessages = BaseMessages + SUM(Events). A turn only appends message events; when it ends they are folded into the
base. store.py stores it. No message is ever changed in place.

Every vendor enforces this invariant: an assistant message with N tool calls is followed at once by N results, one for
each call, in call order. No result stands anywhere else. Turns keep the invariant by construction. `presentable`
restores it after events that removed or replaced messages.

Source: docs/design/turns.md section 3; requirements CONTEXT-10, CALL-15.
"""

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, Final, Literal

from msgspec import Struct, msgpack

from goondan.schemas.bundle.address import is_given_id
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import FilePart, ToolError, ToolResult

# No `from __future__ import annotations`: msgspec would compile each annotation again, in every program that starts.


# --- messages -------------------------------------------------------------------------------------------------------

#: The key in an assistant message's metadata for the model's reasoning, a text.
REASONING: Final = "reasoning"
#: The key for whether the message ends where the model reached its limit of tokens: true, or missing.
CUT_OFF: Final = "cutOff"
#: The most of a model's reasoning that is kept with a message (characters). It goes into the answer of the turn, too.
MAX_REASONING: Final = 1 << 16


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """Plain text of an assistant message."""

    #: The text.
    text: str


class ToolCallPart(Struct, frozen=True, tag_field="type", tag="tool-call", rename="camel"):
    """One tool call."""

    #: The model's id of the call.
    tool_call_id: str
    #: The tool as the model named it.
    tool_name: str
    #: The JSON object that the model wrote; {} when it wrote something else.
    args: dict[str, Any]


class ToolResultPart(Struct, frozen=True, tag_field="type", tag="tool-result", rename="camel", omit_defaults=True):
    """The one result of a tool call."""

    #: The model's id of the call.
    tool_call_id: str
    #: The tool as the model named it.
    tool_name: str
    #: The result.
    result: ToolResult
    #: The pictures and PDFs that the result has. The output names each by its number here, from 1.
    files: list[FilePart] = []


class SystemData(Struct, frozen=True, tag_field="role", tag="system"):
    """Instructions inside the conversation (the agent's own system prompt is not stored)."""

    #: The text.
    content: str


class UserData(Struct, frozen=True, tag_field="role", tag="user", omit_defaults=True):
    """A message from outside."""

    #: The text.
    content: str
    #: The pictures and PDFs that came with it.
    files: list[FilePart] = []


class AssistantData(Struct, frozen=True, tag_field="role", tag="assistant"):
    """The model's answer: text, then tool calls."""

    #: Text and calls, in their order.
    content: list[TextPart | ToolCallPart]

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join([part.text for part in self.content if isinstance(part, TextPart)])

    @property
    def calls(self) -> list[ToolCallPart]:
        """The tool calls, in call order."""
        return [part for part in self.content if isinstance(part, ToolCallPart)]


class ToolData(Struct, frozen=True, tag_field="role", tag="tool"):
    """Results of tool calls. The kernel writes one result in each message."""

    #: The results.
    content: list[ToolResultPart]


MessageData = SystemData | UserData | AssistantData | ToolData


class MessageSource(Struct, frozen=True, omit_defaults=True):
    """The author of a message. `name` is the name of a tool or an extension."""

    #: What the author is.
    type: Literal["user", "assistant", "tool", "system", "extension"]
    #: The name of the tool or the extension; None: it has none.
    name: str | None = None


class Message(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The specification's Message (CONTEXT-10)."""

    #: The id, unique in the conversation.
    id: str
    #: The role and the content.
    data: MessageData
    #: RFC 3339 in UTC.
    created_at: str
    #: The author.
    source: MessageSource
    #: The only field that may be changed.
    metadata: dict[str, Any] = {}


encode_message = msgpack.Encoder().encode
decode_message = msgpack.Decoder(Message).decode

# --- events ---------------------------------------------------------------------------------------------------------


class Append(Struct, frozen=True, tag_field="type", tag="append"):
    """Add a message at the end. A message with an id that is already there replaces the old one in its place, so a
    repeat changes nothing.
    """

    #: The message.
    message: Message


class Replace(Struct, frozen=True, tag_field="type", tag="replace", rename="camel"):
    """Put another message in the place of `target_id`. Nothing happens when there is no such message."""

    #: The id of the message.
    target_id: str
    #: The new message.
    message: Message


class Remove(Struct, frozen=True, tag_field="type", tag="remove", rename="camel"):
    """Remove a message. Nothing happens when there is no such message."""

    #: The id of the message.
    target_id: str


class Truncate(Struct, frozen=True, tag_field="type", tag="truncate"):
    """Remove every message."""


MessageEvent = Append | Replace | Remove | Truncate


def fold(base: Iterable[Message], events: Iterable[MessageEvent]) -> list[Message]:
    """The messages after `events`, in order."""
    messages = {message.id: message for message in base}
    for event in events:
        if isinstance(event, Append):
            messages[event.message.id] = event.message
        elif isinstance(event, Replace):
            if event.target_id in messages:
                new = event.message
                rest = [old for old in messages.values() if old.id == event.target_id or old.id != new.id]
                messages = {now.id: now for now in [new if old.id == event.target_id else old for old in rest]}
        elif isinstance(event, Remove):
            messages.pop(event.target_id, None)
        else:
            messages.clear()
    return list(messages.values())


# --- the invariant --------------------------------------------------------------------------------------------------


def is_presentable(messages: Sequence[Message]) -> bool:
    """Whether each tool call is followed at once by its result, in call order, and each result belongs to a call."""
    owed: list[str] = []
    for message in messages:
        data = message.data
        if isinstance(data, ToolData):
            for part in data.content:
                if not owed or owed.pop() != part.tool_call_id:
                    return False
        elif owed:
            return False
        elif isinstance(data, AssistantData):
            owed = [part.tool_call_id for part in data.content if isinstance(part, ToolCallPart)]
            owed.reverse()
    return not owed


def presentable(messages: Sequence[Message]) -> list[Message]:
    """Restore the invariant: results are moved behind their calls, made up where they are missing, and dropped where no
    call is. A valid list is returned as it is.
    """
    if is_presentable(messages):
        return list(messages)
    # Walk from the end, so that each call finds the nearest result behind it: ids are unique only within a turn.
    nearest: dict[str, ToolResultPart] = {}
    shown: list[Message] = []
    for message in reversed(messages):
        data = message.data
        if isinstance(data, ToolData):
            nearest.update({part.tool_call_id: part for part in data.content})
            continue
        if isinstance(data, AssistantData):
            for call in reversed(data.calls):
                lost = cancelled("its result is no longer in the conversation")
                made_up = ToolResultPart(call.tool_call_id, call.tool_name, lost)
                part = nearest.pop(call.tool_call_id, made_up)
                shown.append(result_message(f"{message.id}/{call.tool_call_id}", part, message.created_at))
        shown.append(message)
    shown.reverse()
    return shown


class Grown(list[Message]):
    """A conversation that is not changed any more."""

    __slots__ = ("behind",)
    #: A shorter one, with whose messages it begins; None: nobody knows any.
    behind: "Grown | None"


def begins_with(messages: list[Message], known: list[Message]) -> bool:
    """Whether the same message objects begin a conversation."""
    if isinstance(messages, Grown) and messages.behind is known:
        return True
    return len(messages) >= len(known) and all(map(is_, known, messages))


class Presented:
    """`presentable` for a conversation that grows: it walks only the messages that are new since the last time. The
    earlier work is used as long as the same message objects begin the conversation.
    """

    def __init__(self) -> None:
        self._known: list[Message] = []  # it is presentable

    def of(self, messages: list[Message]) -> list[Message]:
        """See `presentable`. The list must not be changed afterwards."""
        known = self._known
        if not begins_with(messages, known):
            known = self._known = []
        # No result is missing at the end of a presentable beginning, so the rest is judged by itself.
        if not is_presentable(messages[len(known) :] if known else messages):
            return presentable(messages)
        self._known = messages
        return messages


#: A longer conversation is not kept in memory from turn to turn: so many messages, and bytes of text.
MAX_KEPT_MESSAGES: Final = 16_384
MAX_KEPT_BYTES: Final = 8 << 20


def is_kept(messages: int, size: int) -> bool:
    """Whether so many messages of `size` bytes are kept in memory from turn to turn."""
    return messages <= MAX_KEPT_MESSAGES and size <= MAX_KEPT_BYTES


def files_of(message: Message) -> list[FilePart]:
    """The pictures and PDFs of a message, in order."""
    data = message.data
    if isinstance(data, UserData):
        return data.files
    return [file for part in data.content for file in part.files] if isinstance(data, ToolData) else []


def result_message(message_id: str, part: ToolResultPart, at: str) -> Message:
    """The tool message that carries one result."""
    return Message(message_id, ToolData([part]), at, MessageSource("tool", part.tool_name))


def cancelled(reason: str) -> ToolResult:
    """The result of a call that was given up."""
    return error_result(tool_error("E_CANCELLED", f"The call was cancelled: {reason}.", name="CancelledError"))


def error_result(error: ToolError) -> ToolResult:
    """A result with status `error`."""
    return ToolResult(status="error", error=error)


#: Longer ids from a model are replaced: an id becomes part of a callId, of a header and of a database key.
MAX_TOOL_CALL_ID: Final = 128


def unique_id(given: str, instead: str, used: set[str]) -> str:
    """The id of a call, which is then `used`: what the model has given, `instead` of it when it is not usable, and with
    a number behind it when another call of the turn has it.
    """
    wanted = given if is_given_id(given, MAX_TOOL_CALL_ID) else instead
    call_id, copy = wanted, 1
    while call_id in used:
        copy += 1
        call_id = f"{wanted}_{copy}"
    used.add(call_id)
    return call_id
