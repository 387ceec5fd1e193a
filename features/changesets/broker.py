"""Changesets of turns: who may ask for one, and which worktrees are not needed any more. Pure.

The supervisor has the git work done.

Rules.
- Only a running turn may ask. The changeset belongs to the event that its instance holds, whatever the frame says.
- The asking instance and the callId identify a question. A repeat is the same question: a second broker asks the
  supervisor again, and the supervisor knows its answer.
- A worktree stays until its event has ended: the turn may be resumed, also after a restart. The supervisor tells every
  broker which worktrees there are. A worktree whose event is unknown is removed.

Source: docs/changesets.md; docs/decisions/067; requirements BUNDLE-02 to BUNDLE-08.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from goondan.features.changesets import wire
from goondan.kernel.broker.state.bus import RETURN_S, Bus, Core, overloaded
from goondan.kernel.broker.state.entities import AGENTS, Connection
from goondan.kernel.broker.state.parts import LISTS_BYTES, Part, Take
from goondan.schemas.bundle.address import is_name
from goondan.schemas.wire import codec, control
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import OPERATOR_AGENT, Frame, Hello

#: Characters of a question's callId: two ids, and a part that tells the questions of one call apart.
MAX_CALL_ID: Final = 1024
#: Questions that may wait for the supervisor: of all agents, and of one instance. Then frames that may wait for one
#: question. More are refused with E_OVERLOADED, and senders send them again.
MAX_WAITING: Final = 256
MAX_WAITING_EACH: Final = 16
MAX_ASKERS: Final = 16


class Question(Struct):
    """A question without an answer yet. `askers`: the connections and frames that wait for it."""

    #: What is wanted.
    wish: wire.ChangesetWish
    #: The connections and frames that wait for the answer.
    askers: list[tuple[Connection, Frame]]


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Changesets(core.bus),)


class Changesets(Part):
    """The changesets of the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[str, Question] = {}
        #: Changeset -> the event whose turn has it.
        self._held: dict[str, str] = {}
        self.takes = (
            Take((AGENTS,), "changeset.open", self.ask, LISTS_BYTES, confined="no"),
            Take((AGENTS,), "changeset.commit", self.ask, LISTS_BYTES, confined="no"),
        )
        self.hears = {wire.FEATURE: self.heard}

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`changeset.open` and `changeset.commit` from an agent."""
        instance, bus = connection.instance, self._bus
        call_id = frame.call_id
        if not call_id or not is_name(call_id, MAX_CALL_ID):
            raise fail("E_FRAME_INVALID", f"{frame.type} needs a callId of 1 to {MAX_CALL_ID} visible characters")
        if instance is None or instance.agent == OPERATOR_AGENT:
            raise fail("E_FORBIDDEN", "only agents of the bundle have changesets")
        if instance.leased is None:
            raise fail("E_LEASE_LOST", "only a turn that runs may ask for a changeset")
        opens = frame.type == "changeset.open"
        wish = wire.ChangesetWish(
            request=f"{frame.type} {instance.address} {call_id}",
            agent=instance.agent,
            instance_key=instance.key,
            event_id=instance.leased.id,
            open=codec.from_raw(frame.payload, wire.OpenChangeset) if opens else None,
            commit=None if opens else codec.from_raw(frame.payload, wire.CommitChangeset),
        )
        if (known := self._waiting.get(wish.request)) is not None:
            _join(known, connection, frame)
            return
        own = (instance.agent, instance.key)
        each = sum((one.wish.agent, one.wish.instance_key) == own for one in self._waiting.values())
        if bus.closing or len(self._waiting) >= MAX_WAITING or each >= MAX_WAITING_EACH:
            raise overloaded("the kernel has no time for it now")
        if bus.control is None:
            if now - bus.started_ms / 1000 < RETURN_S:
                raise overloaded("the broker has just started and waits for its supervisor")
            message = "no supervisor runs here that could change the bundle"
            raise fail("E_CHANGESET_IO", message, suggestion="Start the kernel with `gdn run`.")
        self._waiting[wish.request] = Question(wish, [(connection, frame)])
        self._tell(wire.ChangesetAsked(wish))

    # --- the supervisor's word

    def heard(self, message: control.ForFeature, now: float) -> None:
        """A message of the supervisor's half."""
        try:
            told = wire.decode_to_broker(message.payload)
        except codec.DECODE_ERRORS as error:
            raise fail("E_FRAME_INVALID", f"no message about changesets: {error}") from None
        if isinstance(told, wire.ChangesetsHeld):
            self._held = {one.changeset_id: one.event_id for one in told.held}
        else:
            self._answered(told)

    def _answered(self, message: wire.ChangesetAnswered) -> None:
        """The supervisor has answered a question."""
        done = message.done
        question = self._waiting.pop(done.request, None)
        if question is None:
            if done.opened is not None:  # an earlier broker has asked, whose agent is gone as well
                self._tell(wire.WhichChangesets())
            return
        if done.opened is not None:
            self._held[done.opened.changeset_id] = question.wish.event_id
        elif done.committed is not None and done.committed.status == "ok":
            self._held.pop(done.committed.changeset_id, None)
        body = done.opened or done.committed
        for connection, frame in question.askers:
            if body is not None:
                self._bus.reply(connection, frame.id, body)
            else:
                info = done.error or error_payload("E_CHANGESET_IO", "the kernel gave no answer")
                self._bus.error(connection.cls, connection.ident, info, frame)

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """A supervisor has connected: send it the open questions again, because it may have missed them."""
        if peer is not self._bus.control:
            return
        self._tell(wire.WhichChangesets())
        for question in self._waiting.values():
            self._tell(wire.ChangesetAsked(question.wish))

    # --- when

    def tick(self, now: float) -> None:
        """Have the worktrees of ended events removed."""
        if not self._held or self._bus.closing:
            return
        events = self._bus.mailbox.events
        asked = {question.wish.event_id for question in self._waiting.values()}
        over = [one for one, event_id in self._held.items() if event_id not in events and event_id not in asked]
        if over:
            for changeset_id in over:
                del self._held[changeset_id]
            self._tell(wire.ChangesetsOver(over))

    def _tell(self, message: wire.ToSupervisor) -> None:
        self._bus.tell_supervisor(control.ForFeature(wire.FEATURE, codec.to_raw(message)))


def _join(known: Question, connection: Connection, frame: Frame) -> None:
    """One more frame waits for the answer. A repeated frame replaces itself; it may come over another connection."""
    for at, (_, waiting) in enumerate(known.askers):
        if waiting.id == frame.id:
            known.askers[at] = connection, frame
            return
    if len(known.askers) >= MAX_ASKERS:
        raise overloaded("too many ask for this changeset")
    known.askers.append((connection, frame))
