"""Wishes of agents for a restart of the kernel: the bundled tool `self-restart`. Pure; the supervisor acts.

Rules.
- The asking instance and the callId of its tool call identify a wish. A repeat is the same wish, for as long as the ids
  of events are kept.
- First the supervisor checks the bundle. If the bundle may not run, the asker gets an error and nothing changes.
- Then the wish is journaled, and after that it is answered. It is carried out when no process holds the asking event
  any more: then the tool's result is stored, and the turn's step has ended.
- Every start of a kernel fulfils all earlier wishes, because it reads the bundle as a restart does. So no wish is
  carried out twice, and no wish keeps a kernel from starting.
- At most MAX_WISHES wishes are granted in WINDOW_S. Wishes that come together cause one restart. In the same time the
  bundle is checked at most MAX_LOOKS times, whatever the result.

Source: docs/decisions/056; requirements RESTART-01 to RESTART-04.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final

from goondan.kernel.broker.bus import MAX_ID, RETRY_AFTER_MS, RETURN_S, Bus
from goondan.kernel.broker.entities import AGENTS, Connection, Event
from goondan.kernel.broker.parts import LISTS_BYTES, OfEvents, Part, Record, Take
from goondan.kernel.broker.restart_wishes import RestartWished, Wish, restart_subject, wish_over, wish_written
from goondan.schemas.address import is_name
from goondan.schemas.codec import from_raw, to_raw
from goondan.schemas.control import RestartAsked, RestartChecked, RestartDue, RestartUndone
from goondan.schemas.errors import GoondanError, error_payload, fail
from goondan.schemas.frames import ErrorPayload, Frame, Hello, RestartAnswer, RestartRequest

#: So many wishes are granted in so many seconds: a model that wishes restarts in a loop must leave time for work.
MAX_WISHES: Final = 3
WINDOW_S: Final = 60.0
#: The bundle is read for so many wishes in the same time: a refused wish is not counted above, and reading a bundle
#: takes a processor for up to a second. A model that corrects the bundle step by step needs fewer.
MAX_LOOKS: Final = 10
#: Frames that may wait for the result of one wish. More are refused with E_OVERLOADED.
MAX_ASKERS: Final = 64
#: Characters of a reason that are kept, for the log.
MAX_REASON: Final = 500
#: The tool that makes wishes. An agent that may not call it may not wish.
TOOL: Final = "self-restart__request"
#: How long a sender waits when the kernel is already restarting (milliseconds).
_LATER_MS: Final = 1000


class Restarts(Part, OfEvents):
    """All wishes for a restart."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._wishes = bus.wishes
        self.takes = (Take((AGENTS,), "restart", self.ask, LISTS_BYTES, confined="no"),)
        self.records = (Record(RestartWished, self._restore),)
        self.hears = {RestartChecked: self.checked, RestartUndone: self.undone}
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
        subject = restart_subject(instance.agent, instance.key, call_id)
        known = self._wishes.get(subject)
        if known is not None and known.state in ("checking", "staged"):
            _join(known, connection, frame.id)
            return
        if known is not None or bus.archive.find_ended(subject) is not None:
            self._granted(connection, frame.id, comes=known is not None and known.state != "done")
            return
        if bus.closing:
            raise GoondanError(error_payload("E_OVERLOADED", "the kernel is stopping", retry_after_ms=_LATER_MS))
        if bus.control is None:
            if now - bus.started_ms / 1000 < RETURN_S:
                message = "the broker has just started and waits for its supervisor"
                raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=RETRY_AFTER_MS))
            message = "no supervisor runs here that could restart the kernel"
            raise fail("E_RESTART_REFUSED", message, suggestion="Start the kernel with `gdn run`.")
        self._check_limit(now)
        wish = Wish(subject, request.reason[:MAX_REASON], instance.leased.id, self._wall_ms(now), "checking")
        wish.askers = [(connection, frame.id)]
        self._wishes[subject] = wish
        self._looks.append(wish.at_ms)
        bus.tell_supervisor(RestartAsked(subject))

    # --- the supervisor's word

    def checked(self, message: RestartChecked, now: float) -> None:
        """The supervisor has checked the bundle: it may run, or it may not."""
        wish = self._wishes.get(message.wish)
        if wish is None or wish.state != "checking":
            return
        if message.error is not None:
            self._refuse(wish, message.error)
            return
        wish.state = "staged"
        item = wish_written(wish.subject, RestartWished(wish.event_id, wish.reason, wish.at_ms))
        self._bus.stage(item, partial(self._journaled, wish))

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
                self._bus.tell_supervisor(RestartAsked(wish.subject))
            elif wish.state == "due":
                self._bus.tell_supervisor(RestartDue(wish.reason))

    # --- the journal's

    def _restore(self, subject: str, record: RestartWished) -> None:
        self._wishes[subject] = Wish(subject, record.reason, record.event_id, record.at_ms, "wished")

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
                self._bus.stage(wish_over(wish.subject))

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
        self._bus.send(connection, Frame("reply", in_reply_to=frame_id, payload=to_raw(RestartAnswer(comes))))

    def _refuse(self, wish: Wish, error: ErrorPayload) -> None:
        del self._wishes[wish.subject]
        for connection, frame_id in wish.askers:
            self._bus.error(connection.cls, connection.ident, error, Frame("restart", id=frame_id))

    def _wall_ms(self, now: float) -> int:
        return int((self._bus.booted_at + now) * 1000)


def _join(wish: Wish, connection: Connection, frame_id: str) -> None:
    """One more frame waits for the result of a wish. A repeated frame may come over another connection."""
    for at, (_, known) in enumerate(wish.askers):
        if known == frame_id:
            wish.askers[at] = connection, frame_id
            return
    if len(wish.askers) >= MAX_ASKERS:
        message = "too many ask for this restart"
        raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=RETRY_AFTER_MS))
    wish.askers.append((connection, frame_id))
