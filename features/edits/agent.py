"""What an operator changes of a conversation between two turns: the last turn is taken back, or everything is removed.

Such an event waits in the instance's mailbox like a message, so no turn runs meanwhile. It is a turn without steps: one
transaction appends its message events, folds them and stores its answer. After a crash before the commit nothing has
changed, and the event comes again; after the commit it is answered from the store.

Source: docs/design/turns.md section 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.agentproc.machine.answers import TurnUsage, answer_payload, done_frame, failed, turn_id
from goondan.agentproc.machine.messages import Message, MessageEvent, Remove, Truncate, UserData
from goondan.agentproc.machine.turn import End
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, AnswerEvent
from goondan.features.edits.wire import UNDO_REFUSED
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


class Edits(AgentFeature):
    """The changes in the process of an agent instance. No turn has a part of them."""

    name = "edits"

    @cached_property
    def events(self) -> Mapping[str, AnswerEvent]:
        """Events of operators that it answers."""
        return {frames.OPERATOR_UNDO: self._edit, frames.OPERATOR_RESET: self._edit}

    def _edit(self, frame: frames.Frame, event: frames.AgentEvent) -> frames.Frame:
        return perform(self.instance, frame, read_edit(event.type, event.input))


FEATURE: Final = Edits


def read_edit(kind: str, asked: Any) -> Edit:
    """The change that an event of this type asks for, with its input. Raises GoondanError E_FRAME_INVALID."""
    if kind == frames.OPERATOR_RESET:
        return Edit("reset")
    wanted = asked.get("turnId") if isinstance(asked, dict) else None
    if asked is not None and not isinstance(wanted, str):
        raise fail("E_FRAME_INVALID", f"the input of {kind} is {{turnId}}, or nothing")
    return Edit("undo", wanted)


def perform(instance: Instance, frame: frames.Frame, edit: Edit) -> frames.Frame:
    """Change the conversation, and return the frame that ends the event. Raises GoondanError when it cannot be stored;
    then nothing has changed.
    """
    event_id, store, at = frame.event_id or "", instance.store, instance.clock()
    name = turn_id(instance.spec.name, instance.instance_key, event_id)
    if edit.kind == "reset":
        store.forget_earlier()
    with store.write(final=True, reserve=True):
        leftover = store.running_turns()
        for row in leftover:  # its event was taken from this instance for good
            used = TurnUsage()
            used.count_notes(store.model_notes(row.turn_id))
            store.finish_turn(row.event_key, row.turn_id, "abandoned", at, steps=0, answer=None, used=used.parts)
        store.begin_turn(event_id, name, 1, at, trace_id=frame.trace_id, parent_span_id=frame.parent_span_id)
        store.note(name, "turn.started", at)
        try:
            # What the operator saw did not have a turn that was given up.
            events, done = changes(store.load_messages(), edit if not leftover else Edit(edit.kind))
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
