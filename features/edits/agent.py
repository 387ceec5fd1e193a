"""What an operator changes of a conversation between two turns: the last turn is taken back, everything is removed, or
the messages of another instance come in.

Such an event waits in the instance's mailbox like a message, so no turn runs meanwhile. It is a turn without steps: one
transaction appends its message events, folds them and stores its answer. After a crash before the commit nothing has
changed, and the event comes again; after the commit it is answered from the store.

Source: docs/design/turns.md section 11.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.answers import TurnUsage, answer_payload, done_frame, failed, turn_id
from goondan.agentproc.machine.messages import (
    Append,
    AssistantData,
    Message,
    MessageEvent,
    Remove,
    Truncate,
    UserData,
    files_of,
)
from goondan.agentproc.machine.turn import End
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, AnswerEvent
from goondan.features.edits.wire import UNDO_REFUSED, Forked
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.traces.turn_notes import CONVERSATION_FILE
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import GoondanError, cut_message, fail

#: The longest text of a removed message that the answer repeats (characters).
MAX_SAID: Final = 200


class Edit(Struct, frozen=True):
    """A change of a whole conversation."""

    #: `undo`: take the last turn back. `reset`: remove every message.
    kind: Literal["undo", "reset"]
    #: Of `undo`: the turn that the operator saw as the last one. None: whichever it is.
    turn_id: str | None = None


class Fork(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The input of `operator.fork`."""

    #: The key of the instance, of the same agent, whose messages are copied.
    source: str = msgspec.field(name="from")
    #: Copy what is before this turn, or before a step of it. None: everything.
    turn_id: str | None = None
    #: The step (from 1). 1: before the turn's own message.
    step: Annotated[int, Meta(ge=1)] = 1


#: The message events that make a change, and what the operator is told. It gets the messages, and whether one of their
#: turns was given up, which no operator has seen. Raises GoondanError.
Change = Callable[[list[Message], bool], tuple[list[MessageEvent], Struct]]


class Edits(AgentFeature):
    """The changes in the process of an agent instance. No turn has a part of them."""

    name = "edits"

    @cached_property
    def events(self) -> Mapping[str, AnswerEvent]:
        """Events of operators that it answers."""
        return {
            frames.OPERATOR_UNDO: self._edit,
            frames.OPERATOR_RESET: self._edit,
            frames.OPERATOR_FORK: self._fork,
        }

    def _edit(self, frame: frames.Frame, event: frames.AgentEvent) -> frames.Frame:
        edit = read_edit(event.type, event.input)
        if edit.kind == "reset":
            self.instance.store.forget_earlier()

        def change(messages: list[Message], unseen: bool) -> tuple[list[MessageEvent], Struct]:
            return changes(messages, Edit(edit.kind) if unseen else edit)

        return perform(self.instance, frame, change)

    def _fork(self, frame: frames.Frame, event: frames.AgentEvent) -> frames.Frame:
        fork, spec, store = read_fork(event.input), self.instance.spec, self.instance.store
        if spec.name == frames.OPERATOR_AGENT:
            raise fail("E_USAGE", f"{spec.name} has no conversation that could be forked")
        if store.load_messages() or store.running_turns():
            message = f"{spec.name}/{self.instance.instance_key[:100]} has a conversation already"
            raise fail("E_USAGE", message, suggestion="Choose another key for the fork.")
        directory = instance_dir(spec.state_dir, spec.name, fork.source)
        if not os.path.exists(f"{directory}/{CONVERSATION_FILE}"):
            raise fail("E_INSTANCE_NOT_FOUND", f"there is no instance {spec.name}/{fork.source[:100]}")
        source = ConversationStore(directory, durability="process", generation=store.generation)
        try:
            copied, said = before(source.load_messages(), fork)
        finally:
            source.close()
        for one in copied:
            if files := files_of(one):  # after a crash the next process removes them, as nothing refers to them
                self.instance.files.take(f"{directory}/files", files)
        events: list[MessageEvent] = [Append(one) for one in copied]
        return perform(self.instance, frame, lambda *_: (events, Forked(len(events), said)), small=False)


FEATURE: Final = Edits


def read_edit(kind: str, asked: Any) -> Edit:
    """The change that an event of this type asks for, with its input. Raises GoondanError E_FRAME_INVALID."""
    if kind == frames.OPERATOR_RESET:
        return Edit("reset")
    wanted = asked.get("turnId") if isinstance(asked, dict) else None
    if asked is not None and not isinstance(wanted, str):
        raise fail("E_FRAME_INVALID", f"the input of {kind} is {{turnId}}, or nothing")
    return Edit("undo", wanted)


def read_fork(asked: Any) -> Fork:
    """The fork that an event asks for. Raises GoondanError E_FRAME_INVALID."""
    try:
        return msgspec.convert(asked, Fork)
    except msgspec.ValidationError as error:
        message = f"the input of {frames.OPERATOR_FORK} is {{from, turnId?, step?}}: {error}"
        raise fail("E_FRAME_INVALID", message) from None


def perform(instance: Instance, frame: frames.Frame, change: Change, *, small: bool = True) -> frames.Frame:
    """Change the conversation, and return the frame that ends the event. A `small` change may use the room that is
    kept for ends of turns. Raises GoondanError when it cannot be stored; then nothing has changed.
    """
    event_id, store, at = frame.event_id or "", instance.store, instance.clock()
    name = turn_id(instance.spec.name, instance.instance_key, event_id)
    with store.write(final=True, reserve=small):
        leftover = store.running_turns()
        for row in leftover:  # its event was taken from this instance for good
            used = TurnUsage()
            used.count_notes(store.model_notes(row.turn_id))
            store.finish_turn(row.event_key, row.turn_id, "abandoned", at, steps=0, answer=None, used=used.parts)
        store.begin_turn(event_id, name, 1, at, trace_id=frame.trace_id, parent_span_id=frame.parent_span_id)
        store.note(name, "turn.started", at)
        try:
            events, done = change(store.load_messages(), bool(leftover))
        except GoondanError as error:
            if error.info.code != UNDO_REFUSED:
                raise
            events, end = [], failed(error.info)
        else:
            end = End(
                status="completed",
                steps=0,
                finish_reason="stop",
                output=frames.ToolResult(status="ok", output=codec.to_raw(done)),
            )
        for position, event in enumerate(events):
            store.append(name, position, event)
        payload = answer_payload(end, name, event_id, at, frame.trace_id)
        store.note(name, "turn.completed" if end.error is None else "turn.failed", at)
        store.finish_turn(event_id, name, end.status, at, steps=0, answer=payload)
    return done_frame(event_id, frame.epoch or 0, end.status, payload)


def changes(messages: list[Message], edit: Edit) -> tuple[list[MessageEvent], frames.ConversationEdited]:
    """The message events that make this change, and what the operator is told. Raises GoondanError E_UNDO_REFUSED."""
    if edit.kind == "reset":
        return [Truncate()], frames.ConversationEdited(len(messages), 0)
    # A turn's own messages are named TURN.POSITION. No beginning is left when extensions have removed them all.
    first = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].id.endswith(".0")), None)
    if first is None:
        raise fail(UNDO_REFUSED, "there is no turn in this conversation that could be taken back")
    last = messages[first].id.removesuffix(".0")
    if edit.turn_id is not None and edit.turn_id != last:
        message = f"the conversation has gone on: its last turn is {last}, not {edit.turn_id[:64]}"
        raise fail(UNDO_REFUSED, message)
    data = messages[first].data
    said = cut_message(data.content, MAX_SAID) if isinstance(data, UserData) else ""
    removed: list[MessageEvent] = [Remove(message.id) for message in messages[first:]]
    return removed, frames.ConversationEdited(len(removed), first, last, said)


def before(messages: list[Message], fork: Fork) -> tuple[list[Message], str | None]:
    """The messages that a fork begins with; and the text of the turn's own message if they end before it. A step begins
    with the model's message. Raises GoondanError E_TURN_NOT_FOUND.
    """
    if fork.turn_id is None:
        return messages, None
    name = f"{fork.turn_id}."
    own = [at for at, one in enumerate(messages) if one.id.startswith(name)]
    if not own:
        raise fail("E_TURN_NOT_FOUND", f"{fork.source[:100]} has no turn {fork.turn_id[:64]} that is over")
    said = [
        (at, data)
        for at in own
        if isinstance(data := messages[at].data, AssistantData) and messages[at].id.removeprefix(name).isdigit()
    ]  # what the model said; ids of extensions are no numbers
    ends = [own[0], *(at for at, _ in said[1:])]
    if said and said[-1][1].calls:
        ends.append(own[-1] + 1)  # before a step whose model has not answered
    if fork.step > len(ends):
        raise fail("E_TURN_NOT_FOUND", f"the turn {fork.turn_id[:64]} has no messages of step {fork.step}")
    first = messages[own[0]].data
    return messages[: ends[fork.step - 1]], first.content if fork.step == 1 and isinstance(first, UserData) else None
