"""Restarts of the kernel that agents wish, with the tool `self-restart`, and conversations that begin again. Pure.

Wishes for a restart.
- The asking instance and the callId of its tool call identify a wish. A repeat is the same wish, for as long as the ids
  of events are kept.
- First the supervisor checks the bundle. If the bundle may not run, the asker gets an error and nothing changes.
- Then the wish is journaled, and after that it is answered. It is carried out when no process holds the asking event
  any more: then the tool's result is stored, and the turn's step has ended.
- Every start of a kernel fulfils all earlier wishes, because it reads the bundle as a restart does. So no wish is
  carried out twice, and no wish keeps a kernel from starting.
- At most MAX_WISHES wishes are granted in WINDOW_S. Wishes that come together cause one restart. In the same time the
  bundle is checked at most MAX_LOOKS times, whatever the result.

Fresh starts (`gdn restart --fresh`). An agent's generation is a number that grows with each fresh start of its
conversations. `welcome` has it. An instance whose file has an earlier generation puts its conversation aside when the
file is opened next (agentproc/conversation/file.py). So the broker need not find and change instances without a
process, however many there are. The number is the wall clock's milliseconds, or one more than the last. So it grows
also after a journal was lost.

Source: docs/decisions/056; requirements RESTART-01 to RESTART-04.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.kernel.broker.state.bus import MAX_ID, RETURN_S, Bus, Core, join, overloaded
from goondan.kernel.broker.state.entities import AGENTS, Connection, Event
from goondan.kernel.broker.state.parts import LISTS_BYTES, OfEvents, Op, Part, Record, Take
from goondan.kernel.broker.state.records import Item, Put, Retire, encode
from goondan.schemas.bundle.address import is_name
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.control import BeginAnew, BegunAnew, BundleChecked, CheckBundle, RestartDue, RestartUndone
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import ErrorPayload, Frame, Hello, RestartAnswer, RestartRequest

#: The subjects of records: of wishes, and of generations.
_RESTART: Final = "restart:"
_FRESH: Final = "fresh:"
#: Stands for all agents.
EVERY: Final = ""
#: So many wishes are granted in so many seconds: a model that wishes restarts in a loop must leave time for work.
MAX_WISHES: Final = 3
WINDOW_S: Final = 60.0
#: The bundle is read for so many wishes in the same time: a refused wish is not counted above, and reading a bundle
#: takes a processor for up to a second. A model that corrects the bundle step by step needs fewer.
MAX_LOOKS: Final = 10
#: Characters of a reason that are kept, for the log.
MAX_REASON: Final = 500
#: The tool that makes wishes. An agent that may not call it may not wish.
TOOL: Final = "self-restart__request"
#: How long a sender waits when the kernel is already restarting (milliseconds).
_LATER_MS: Final = 1000


class RestartWished(Struct, frozen=True, array_like=True, tag="restart/wished"):
    """An agent wishes a restart of the kernel as soon as no process holds this event."""

    #: The event whose turn wishes it.
    event_id: str
    #: Why, in the agent's words.
    reason: str
    #: When (milliseconds since 1970).
    at_ms: int


class FreshStart(Struct, frozen=True, array_like=True, tag="restart/fresh", kw_only=True):
    """The conversations of this agent, or of all agents (with the name ""), have this generation."""

    #: Nothing: it concerns agents.
    concerns: str = ""
    #: The agent; "": all of them.
    agent: str
    #: The generation.
    generation: int


#: `checking`: the supervisor looks at the bundle. `staged`: on its way into the journal. `wished`: to be carried out.
#: `due`: the supervisor has been told. `done`: a kernel has started since, or the restart came to nothing.
WishState = Literal["checking", "staged", "wished", "due", "done"]


class Wish(Struct):
    """One wish for a restart."""

    #: The subject of its records in the journal.
    subject: str
    #: Why the agent wishes it, in the agent's words.
    reason: str
    #: The event whose turn wishes it.
    event_id: str
    #: When (milliseconds since 1970).
    at_ms: int
    #: How far it has come.
    state: WishState
    #: Connection and frame id of everybody who waits for the answer.
    askers: list[tuple[Connection, str]] = []


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Restarts(core.bus), FreshStarts(core.bus))


class Restarts(Part, OfEvents):
    """All wishes for a restart."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: Wishes that are open or ended lately, by their subjects in the journal.
        self._wishes: dict[str, Wish] = {}
        self.takes = (Take((AGENTS,), "restart", self.ask, LISTS_BYTES, confined="no"),)
        self.records = (Record(RestartWished, self._restore),)
        self.hears = {BundleChecked: self.checked, RestartUndone: self.undone}
        #: When the bundle was checked for a wish (milliseconds since 1970), the oldest first.
        self._looks: deque[int] = deque(maxlen=MAX_LOOKS)

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`restart` from an agent, in the name of a tool call of its turn."""
        instance, bus = connection.instance, self._bus
        call_id = frame.call_id
        if not call_id or not is_name(call_id, 2 * MAX_ID):
            raise fail("E_FRAME_INVALID", f"a restart needs a callId of 1 to {2 * MAX_ID} visible characters")
        if instance is None or TOOL not in connection.allowed:
            raise fail("E_FORBIDDEN", f"this agent may not call {TOOL}")
        if instance.leased is None:
            raise fail("E_LEASE_LOST", "only a turn that runs may ask for a restart")
        request = from_raw(frame.payload, RestartRequest)
        subject = f"{_RESTART}{instance.agent}/{instance.key}/{call_id}"
        known = self._wishes.get(subject)
        if known is not None and known.state in ("checking", "staged"):
            join(known.askers, connection, frame, "restart")
            return
        if known is not None or bus.archive.find_ended(subject) is not None:
            self._granted(connection, frame.id, comes=known is not None and known.state != "done")
            return
        if bus.closing:
            raise overloaded("the kernel is stopping", _LATER_MS)
        if bus.control is None:
            if now - bus.started_ms / 1000 < RETURN_S:
                raise overloaded("the broker has just started and waits for its supervisor")
            message = "no supervisor runs here that could restart the kernel"
            raise fail("E_RESTART_REFUSED", message, suggestion="Start the kernel with `gdn run`.")
        self._check_limit(now)
        wish = Wish(subject, request.reason[:MAX_REASON], instance.leased.id, self._wall_ms(now), "checking")
        wish.askers = [(connection, frame.id)]
        self._wishes[subject] = wish
        self._looks.append(wish.at_ms)
        bus.tell_supervisor(CheckBundle(subject))

    # --- the supervisor's word

    def checked(self, message: BundleChecked, now: float) -> None:
        """The supervisor has checked the bundle: it may run, or it may not."""
        wish = self._wishes.get(message.name)
        if wish is None or wish.state != "checking":
            return
        if message.error is not None:
            self._refuse(wish, message.error)
            return
        wish.state = "staged"
        record = encode(RestartWished(wish.event_id, wish.reason, wish.at_ms))
        self._bus.stage(Item((Put(wish.subject, record),), refusable=True), partial(self._journaled, wish))

    def undone(self, message: RestartUndone, now: float) -> None:
        """The supervisor will not restart the kernel: the kernel goes on as it is."""
        self._bus.closing = self._bus.draining is not None
        for wish in self._wishes.values():
            if wish.state == "due":
                wish.state = "done"

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """A supervisor has connected: tell it of wishes again, because it may have missed them."""
        if peer is not self._bus.control:
            return
        for wish in self._wishes.values():
            if wish.state == "checking":
                self._bus.tell_supervisor(CheckBundle(wish.subject))
            elif wish.state == "due":
                self._bus.tell_supervisor(RestartDue(wish.reason))

    # --- the journal's

    def _restore(self, subject: str, record: RestartWished) -> None:
        state: WishState = "done" if self._bus.new_kernel else "wished"  # a new kernel has read the bundle
        self._wishes[subject] = Wish(subject, record.reason, record.event_id, record.at_ms, state)

    def _journaled(self, wish: Wish, kept: bool) -> None:
        """The journal has the wish: tell the askers. It is carried out when their step has ended. Without room on the
        disk, it is refused.
        """
        if not kept:
            self._refuse(wish, error_payload("E_DISK_FULL", "the disk of the state directory is full"))
            return
        wish.state = "wished"
        for connection, frame_id in wish.askers:
            self._granted(connection, frame_id, comes=True)
        wish.askers = []
        event = self._bus.mailbox.events.get(wish.event_id)
        if event is None or event.state != "leased":
            self._carry_out(wish)

    # --- when

    def left(self, event: Event, *, ended: bool) -> None:
        """No process holds this event any more."""
        for wish in self._wishes.values():
            if wish.state == "wished" and wish.event_id == event.id:
                self._carry_out(wish)

    def tick(self, now: float) -> None:
        """Carry out wishes that an earlier broker had granted, and forget wishes that ended long enough ago."""
        if not self._wishes:
            return
        settled_in = now - self._bus.started_ms / 1000 >= RETURN_S  # by then every holder has said what it holds
        for wish in list(self._wishes.values()):
            event = self._bus.mailbox.events.get(wish.event_id)
            if wish.state == "wished" and settled_in and (event is None or event.state != "leased"):
                self._carry_out(wish)
            elif wish.state == "done" and not self._is_recent(wish.at_ms, now):
                del self._wishes[wish.subject]
                # Its id is kept, so that a repeat is not taken for a new wish.
                self._bus.stage(Item((Retire(wish.subject, b"", "restarted"),)))

    # --- inside

    def _carry_out(self, wish: Wish) -> None:
        """Carry the wish out. No event is handed over from now on, so the turn does not go on before the restart."""
        wish.state = "due"
        self._bus.closing = True
        self._bus.tell_supervisor(RestartDue(wish.reason))

    def _check_limit(self, now: float) -> None:
        recent = [wish.at_ms for wish in self._wishes.values() if self._is_recent(wish.at_ms, now)]
        looks = [at_ms for at_ms in self._looks if self._is_recent(at_ms, now)]
        if len(recent) < MAX_WISHES and len(looks) < MAX_LOOKS:
            return
        counted = recent if len(recent) >= MAX_WISHES else looks
        wait_s = max(1, round(WINDOW_S - (self._wall_ms(now) - min(counted)) / 1000))
        message = f"{len(counted)} restarts were asked for within {WINDOW_S:g} s, and no more may be"
        raise fail("E_RESTART_REFUSED", message, suggestion=f"Ask again in {wait_s} s.")

    def _is_recent(self, at_ms: int, now: float) -> bool:
        return 0 <= self._wall_ms(now) - at_ms < WINDOW_S * 1000  # a clock that was set back forgets it

    def _granted(self, connection: Connection, frame_id: str, *, comes: bool) -> None:
        self._bus.reply(connection, frame_id, RestartAnswer(comes))

    def _refuse(self, wish: Wish, error: ErrorPayload) -> None:
        del self._wishes[wish.subject]
        for connection, frame_id in wish.askers:
            self._bus.error(connection.cls, connection.ident, error, Frame("restart", id=frame_id))

    def _wall_ms(self, now: float) -> int:
        return int((self._bus.booted_at + now) * 1000)


class FreshStarts(Part):
    """The generations of all agents."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: Agent -> generation of its conversations; "" stands for all agents.
        self._generations: dict[str, int] = {}
        self.ops = (Op("generation", self.tell),)
        self.records = (Record(FreshStart, self._restore),)
        self.hears = {BeginAnew: self.begin}

    def begin(self, message: BeginAnew, now: float) -> None:
        """The supervisor's request: conversations of an agent, or of all, begin again with their next process."""
        bus = self._bus
        number = max(int((bus.booted_at + now) * 1000), self.of(message.agent) + 1)
        self._generations[message.agent] = number
        subject, record = _FRESH + message.agent, FreshStart(agent=message.agent, generation=number)
        item = Item((Retire(subject), Put(subject, encode(record))))
        bus.stage(item, partial(self._journaled, message.agent))

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "generation", agent}`: the generation of the agent's conversations, 0 before the first fresh start."""
        agent = asked.get("agent")
        if not isinstance(agent, str):
            raise fail("E_FRAME_INVALID", "admin generation needs an agent")
        body = {"generation": self.of(agent)}
        self._bus.reply(connection, frame.id, body)

    def _restore(self, subject: str, record: FreshStart) -> None:
        self._generations[record.agent] = record.generation

    def welcome(self, peer: Connection) -> dict[str, Any]:
        """The generation of the agent's conversations."""
        return {"generation": self.of(peer.claims.agent or "")} if peer.cls == AGENTS else {}

    def _journaled(self, agent: str, kept: bool) -> None:
        """The journal has the new generation."""
        self._bus.tell_supervisor(BegunAnew(agent))

    def of(self, agent: str) -> int:
        """The generation of an agent's conversations."""
        known = self._generations
        return max(known.get(agent, 0), known.get(EVERY, 0))
