"""The conversation of one instance: messages, the events that change them, and what a model may be shown.

NextMessages = BaseMessages + SUM(Events). A turn only appends message events; when it ends they are folded into the
base. Nothing is stored here (store.py does) and no message is ever changed in place.

The invariant that every vendor enforces: an assistant message with N tool calls is followed at once by N results, one
for each call, in call order, before anything else; and no result stands anywhere else. Turns keep it by construction;
`presentable` restores it after events that removed or replaced messages.

Source: docs/design/turns.md section 3; requirements CONTEXT-10, CALL-15.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, Literal

from msgspec import Struct, msgpack

from schemas.errors import tool_error
from schemas.frames import ToolError, ToolResult

# --- messages -------------------------------------------------------------------------------------------------------


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """Plain text of an assistant message."""

    text: str


class ToolCallPart(Struct, frozen=True, tag_field="type", tag="tool-call", rename="camel"):
    """One tool call. `args` is the JSON object that the model wrote ({} when it wrote something else)."""

    tool_call_id: str
    tool_name: str
    args: dict[str, Any]


class ToolResultPart(Struct, frozen=True, tag_field="type", tag="tool-result", rename="camel"):
    """The one result of a tool call."""

    tool_call_id: str
    tool_name: str
    result: ToolResult


class SystemData(Struct, frozen=True, tag_field="role", tag="system"):
    """Instructions inside the conversation (the agent's own system prompt is not stored)."""

    content: str


class UserData(Struct, frozen=True, tag_field="role", tag="user"):
    """What came from outside."""

    content: str


class AssistantData(Struct, frozen=True, tag_field="role", tag="assistant"):
    """What the model answered: text, then tool calls."""

    content: list[TextPart | ToolCallPart]

    @property
    def text(self) -> str:
        """Its text parts, joined."""
        return "".join([part.text for part in self.content if isinstance(part, TextPart)])

    @property
    def calls(self) -> list[ToolCallPart]:
        """Its tool calls, in call order."""
        return [part for part in self.content if isinstance(part, ToolCallPart)]


class ToolData(Struct, frozen=True, tag_field="role", tag="tool"):
    """Results of tool calls; the kernel writes one result a message."""

    content: list[ToolResultPart]


MessageData = SystemData | UserData | AssistantData | ToolData


class MessageSource(Struct, frozen=True, omit_defaults=True):
    """Who made a message; `name` is a tool's or an extension's name."""

    type: Literal["user", "assistant", "tool", "system", "extension"]
    name: str | None = None


class Message(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The specification's Message (CONTEXT-10). `created_at` is RFC 3339 in UTC; only `metadata` is mutable."""

    id: str
    data: MessageData
    created_at: str
    source: MessageSource
    metadata: dict[str, Any] = {}


encode_message = msgpack.Encoder().encode
decode_message = msgpack.Decoder(Message).decode

# --- events ---------------------------------------------------------------------------------------------------------


class Append(Struct, frozen=True, tag_field="type", tag="append"):
    """Add a message at the end. An id that is there already is replaced in its place: a repeat changes nothing."""

    message: Message


class Replace(Struct, frozen=True, tag_field="type", tag="replace", rename="camel"):
    """Put another message in the place of `target_id`; nothing happens when there is none."""

    target_id: str
    message: Message


class Remove(Struct, frozen=True, tag_field="type", tag="remove", rename="camel"):
    """Take a message out; nothing happens when there is none."""

    target_id: str


class Truncate(Struct, frozen=True, tag_field="type", tag="truncate"):
    """Take every message out."""


MessageEvent = Append | Replace | Remove | Truncate


def fold(base: Iterable[Message], events: Iterable[MessageEvent]) -> list[Message]:
    """The messages after `events`, in order."""
    messages = {message.id: message for message in base}
    for event in events:
        if isinstance(event, Append):
            messages[event.message.id] = event.message
        elif isinstance(event, Replace):
            if event.target_id in messages:
                messages = {
                    (event.message.id if key == event.target_id else key): (
                        event.message if key == event.target_id else old
                    )
                    for key, old in messages.items()
                    if key == event.target_id or key != event.message.id
                }
        elif isinstance(event, Remove):
            messages.pop(event.target_id, None)
        else:
            messages.clear()
    return list(messages.values())


# --- the invariant --------------------------------------------------------------------------------------------------


def is_presentable(messages: Sequence[Message]) -> bool:
    """Whether every tool call has its result right behind it, in call order, and every result its call."""
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
    """`messages` with the invariant restored: results moved behind their calls, made up where they are missing,
    and dropped where no call is. A valid list comes back as it is.
    """
    if is_presentable(messages):
        return list(messages)
    # From the end, so that each call finds the nearest result behind it: ids are unique only within a turn.
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


class Presented:
    """`presentable` for a conversation that grows: only what is new since the last time is walked.

    A turn of N steps asks for it N times; walking all of it each time was a third of such a turn's processor time.
    What was walked counts as long as the very same messages begin the conversation.
    """

    def __init__(self) -> None:
        self._known: list[Message] = []  # it is presentable

    def of(self, messages: list[Message]) -> list[Message]:
        """See `presentable`. The list must not be changed afterwards."""
        known = self._known
        if len(messages) < len(known) or not all(map(is_, known, messages)):
            known = self._known = []
        # Behind a presentable beginning no result is owed, so the rest is judged by itself.
        if not is_presentable(messages[len(known) :] if known else messages):
            return presentable(messages)
        self._known = messages
        return list(messages)


def result_message(message_id: str, part: ToolResultPart, at: str) -> Message:
    """The tool message that carries one result."""
    return Message(message_id, ToolData([part]), at, MessageSource("tool", part.tool_name))


def cancelled(reason: str) -> ToolResult:
    """The result of a call that was given up."""
    return error_result(tool_error("E_CANCELLED", f"The call was cancelled: {reason}.", name="CancelledError"))


def error_result(error: ToolError) -> ToolResult:
    """A result with status `error`."""
    return ToolResult(status="error", error=error)
