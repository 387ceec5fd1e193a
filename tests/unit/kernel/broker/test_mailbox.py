"""The mailbox itself: what each step counts, queues, keeps and lets go of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import Raw

from goondan.kernel.broker.state import workdirs
from goondan.kernel.broker.state.entities import (
    ANSWER_ROOM,
    TOOLS,
    Connection,
    Content,
    Event,
    Instance,
    Spawned,
    Standing,
    State,
)
from goondan.kernel.broker.state.mailbox import (
    LEASE_S,
    MAX_DEAD,
    MAX_DEAD_BYTES,
    MAX_TURN_ANSWERS,
    Epochs,
    Mailbox,
    Quotas,
)
from goondan.kernel.broker.state.shares import KEPT_PART, Claim, Pool
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, FilePart, ReplyTo, Source
from goondan.schemas.wire.tokens import Claims
from tests.unit.kernel.broker.memory_journal import MemoryJournal

QUOTAS = Quotas(open_events=160, mailbox_bytes=1 << 20, live_agents=4, kept_agents=2)
OPERATOR = Source("client", "operator")
ANSWER = to_raw({"status": "completed", "response": "done"})


def blob(number: int, size: int = 1000) -> Blob:
    return Blob(f"{number:032x}", "0" * 64, size)


class Box:
    """A mailbox, and short words for what is done with it."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(Epochs(10, 5), QUOTAS, MemoryJournal())

    def instance(self, key: str = "k", agent: str = "coder") -> Instance:
        made = Instance(agent, key, workdirs.Workdir(f"/w/{key}"), self.mailbox.epochs.next(), 1.0)
        return self.mailbox.instances.setdefault((agent, key), made)

    def event(
        self,
        event_id: str,
        key: str = "k",
        *,
        agent: str = "coder",
        root: str | None = None,
        session: str = "client/1",
        payload: str = "",
        content: Content | None = None,
        source: Source | None = None,
        deadline: float | None = None,
        large: Blob | None = None,
        asking: Event | None = None,
        asynchronous: bool = False,
        in_reply_to: str | None = None,
    ) -> Event:
        return Event(
            event_id,
            self.instance(key, agent),
            sender="client",
            content_here=content if content is not None else Content(payload=to_raw(payload)),
            root=root or "",
            session=session,
            source=source,
            deadline=deadline,
            blob=large,
            asking=asking,
            asynchronous=asynchronous,
            in_reply_to=in_reply_to,
        )

    def staged(self, event: Event) -> Event:
        self.mailbox.stage(event)
        return event

    def queued(self, event: Event) -> Event:
        self.mailbox.accept(self.staged(event))
        return event

    def leased(self, event: Event, now: float = 100.0) -> Event:
        self.mailbox.lease(self.queued(event), now)
        return event

    def asked(self, asker: Event, event: Event) -> Event:
        """`event`, which the turn of `asker` waits for."""
        asker.work.requests[event] = None
        return event

    def counted(self) -> tuple[int, int]:
        """How many events are unfinished, and their bytes."""
        return self.mailbox.open.held, self.mailbox.held.held


@pytest.fixture
def box() -> Box:
    return Box()


# --- instances


def host() -> Connection:
    return Connection(TOOLS, b"1", "toolhost/main", Claims("toolhost"), 0.0, "i")


@pytest.mark.parametrize(
    "change",
    [
        lambda instance: setattr(instance, "open", 1),
        lambda instance: setattr(instance, "conn", host()),
        lambda instance: setattr(instance, "requested", True),
        lambda instance: setattr(instance, "leaving", True),
        lambda instance: setattr(instance, "deleting", True),
        lambda instance: setattr(instance, "spawned", Spawned("boss", "b", 0.0, None, ("agent/boss/b", "1"))),
        lambda instance: instance.answers.update(a=b"frame"),
    ],
    ids=["open", "conn", "requested", "leaving", "deleting", "spawned", "answers"],
)
def test_an_instance_that_has_anything_here_stays_known(box: Box, change: Callable[[Instance], object]) -> None:
    instance = box.instance()
    box.mailbox.hosts.assign(instance, host())
    change(instance)
    box.mailbox.forget_idle(instance)
    assert box.mailbox.instances == {("coder", "k"): instance}
    assert box.mailbox.hosts.served("toolhost/main") == 1


def test_an_idle_instance_is_forgotten_and_its_tool_host_serves_one_less(box: Box) -> None:
    instance = box.instance()
    box.mailbox.hosts.assign(instance, host())
    box.mailbox.forget_idle(instance)
    assert box.mailbox.instances == {}
    assert (instance.host, box.mailbox.hosts.served("toolhost/main")) == (None, 0)
    box.mailbox.forget_idle(instance)  # nothing more to forget


# --- what is counted


def test_an_event_that_the_journal_has_no_room_for_leaves_nothing(box: Box) -> None:
    event = box.staged(box.event("e", large=blob(1)))
    box.mailbox.unstage(event)
    assert (box.mailbox.events, box.counted(), event.instance.open) == ({}, (0, 0), 0)
    assert box.mailbox.blobs.removable == [blob(1).file]


def test_a_roots_session_is_that_of_its_first_event_and_known_as_long_as_anything_of_it_goes_on(box: Box) -> None:
    session_of = box.mailbox.session_of
    assert session_of("r") == "root/r"
    first = box.staged(box.event("r", session="client/7"))
    assert session_of("r") == "client/7"
    below = [box.staged(box.event(f"b{number}", f"b{number}", root="r", session="client/7")) for number in range(2)]
    box.mailbox.finish(first, "done", ANSWER)
    assert session_of("r") == "client/7", "two that it led to are open"
    box.mailbox.finish(below[0], "done", ANSWER)
    assert session_of("r") == "client/7"
    box.mailbox.finish(below[1], "done", ANSWER)
    assert session_of("r") == "root/r"


def test_a_finished_root_that_a_turn_may_ask_for_again_is_not_asked_for_its_session(box: Box) -> None:
    asker = box.leased(box.event("a"))
    root = box.asked(asker, box.staged(box.event("r", "other", session="client/7", asking=asker)))
    box.mailbox.finish(root, "done", ANSWER)
    assert "r" in box.mailbox.events
    assert box.mailbox.session_of("r") == "root/r"


def test_a_root_that_comes_after_what_it_led_to_says_whose_it_is(box: Box) -> None:
    """A root that comes back is accepted anew, while what it led to is here."""
    below = box.staged(box.event("b", "b", root="r", session="root/r"))
    assert box.mailbox.session_of("r") == "root/r"
    root = box.staged(box.event("r", session="client/9"))
    box.mailbox.finish(root, "done", ANSWER)
    assert box.mailbox.session_of("r") == "client/9"
    box.mailbox.finish(below, "done", ANSWER)
    assert box.mailbox.session_of("r") == "root/r"


def test_what_an_instance_has_asked_without_waiting_is_counted_until_it_has_ended(box: Box) -> None:
    source = Source("agent", "boss", "b")
    boss = box.instance("b", "boss")
    events = [box.staged(box.event(f"e{n}", source=source, asynchronous=True)) for n in range(2)]
    assert box.mailbox.late_of(boss) == 2
    answer = box.staged(box.event("a", "b", agent="boss", in_reply_to="corr"))
    assert box.mailbox.late_of(boss) == 3
    assert box.mailbox.late_of(events[0].instance) == 0
    for left, event in ((2, events[0]), (1, answer), (0, events[1])):
        box.mailbox.finish(event, "done", ANSWER)
        assert box.mailbox.late_of(boss) == left


def test_an_answer_that_nobody_wants_any_more_keeps_no_room(box: Box) -> None:
    content = Content(reply_to=ReplyTo("agent/boss/b", "c"))
    event = box.event("e", source=Source("agent", "boss", "b"), asynchronous=True, content=content)
    box.staged(event)
    boss = box.instance("b", "boss")
    assert (box.counted(), box.mailbox.late_of(boss)) == ((1, event.inline + ANSWER_ROOM), 1)
    box.mailbox.unwanted(event)
    assert (event.asynchronous, event.wants_answer) == (False, False)
    assert (box.counted(), box.mailbox.late_of(boss)) == ((1, event.inline), 0)
    assert event.instance.open == 1


# --- queue and lease


def test_events_queue_in_order_and_those_with_a_deadline_are_due_at_it(box: Box) -> None:
    first, second = box.queued(box.event("e1", deadline=9.0)), box.queued(box.event("e2"))
    assert [*first.instance.queue] == [first, second]
    assert (first.state, second.state) == ("accepted", "accepted")
    assert [*box.mailbox.deadlines.take(8.9)] == []
    assert [*box.mailbox.deadlines.take(9.0)] == [first]
    assert len(box.mailbox.deadlines._heap) == 0


def test_an_event_whose_clock_stands_still_is_not_due(box: Box) -> None:
    event = box.queued(box.event("e", deadline=9.0))
    event.standing = Standing()
    event.standing.holds = 1
    assert [*box.mailbox.deadlines.take(10.0)] == []


def test_who_is_handed_an_event_has_a_place_and_half_a_minute(box: Box) -> None:
    event = box.queued(box.event("e", source=OPERATOR, deadline=9.0))
    waiting = box.queued(box.event("later"))
    event.work.progressed = True
    box.mailbox.lease(event, 100.0)
    instance = event.instance
    assert (event.state, instance.leased, [*instance.queue]) == ("leased", event, [waiting])
    assert (event.work.progressed, event.work.lease_until) == (False, 100.0 + LEASE_S)
    assert [*box.mailbox.holding] == [instance]
    assert box.mailbox.places.holds(instance)
    assert (box.mailbox.places.pool.of_session("client/1"), box.mailbox.places.pool.of_root("e")) == (1, 1)
    assert [*box.mailbox.deadlines.take(9.0)] == [], "it is handed over: its deadline is its turn's affair"


def test_whoever_listens_is_told_of_an_event_that_loses_its_holder(box: Box) -> None:
    left: list[tuple[str, bool]] = []
    box.mailbox.on_left = [lambda event, *, ended: left.append((event.id, ended))]
    event = box.queued(box.event("e"))
    box.mailbox.give_back(event.instance)
    assert left == [], "nobody held it"
    box.mailbox.lease(event, 0.0)
    box.mailbox.give_back(event.instance)
    box.mailbox.lease(event, 0.0)
    box.mailbox.lose_holder(event.instance, counts=True)
    assert left == [("e", False), ("e", False)]


# --- lost holders


def test_a_holder_that_has_got_on_costs_no_attempt_and_the_journal_hears_of_it(box: Box) -> None:
    event = box.leased(box.event("e"))
    event.work.moved(3)
    assert box.mailbox.lose_holder(event.instance, counts=False) is event
    assert event.work.attempts == 0


def test_a_holder_whose_loss_does_not_count_costs_nothing(box: Box) -> None:
    event = box.leased(box.event("e"))
    assert box.mailbox.lose_holder(event.instance, counts=False) is None
    assert (event.work.attempts, event.state) == (0, "accepted")


def test_an_instance_that_held_nothing_gets_a_new_epoch_all_the_same(box: Box) -> None:
    instance = box.instance()
    assert box.mailbox.lose_holder(instance, counts=True) is None
    assert instance.epoch == 12


def test_a_turn_that_only_waited_for_a_person_has_not_failed(box: Box) -> None:
    event = box.leased(box.event("e"))
    event.standing = Standing()
    event.standing.items = 1
    assert box.mailbox.lose_holder(event.instance, counts=True) is None
    assert event.work.attempts == 0
    event.standing.items = 0
    box.mailbox.lease(event, 0.0)
    assert box.mailbox.lose_holder(event.instance, counts=True) is event
    assert event.work.attempts == 1


# --- ends


def test_a_finished_event_frees_its_place_in_the_queue_and_its_file(box: Box) -> None:
    first, second = box.queued(box.event("e1", large=blob(1))), box.queued(box.event("e2"))
    box.mailbox.finish(first, "expired", ANSWER)
    assert [*first.instance.queue] == [second]
    assert (first.state, first.finished, first.blob) == ("expired", True, None)
    assert first.content.payload == NO_PAYLOAD
    assert (box.mailbox.events, box.counted()) == ({"e2": second}, (1, second.size))
    assert box.mailbox.blobs.removable == [blob(1).file]
    assert first.work.answer == ANSWER


def test_a_finished_lease_frees_the_holder_and_its_place(box: Box) -> None:
    event = box.leased(box.event("e"))
    other = box.queued(box.event("other"))
    event.work.calls["c"] = None
    box.mailbox.finish(event, "done", ANSWER)
    instance = event.instance
    assert (instance.leased, [*instance.queue], instance.open) == (None, [other], 1)
    assert not box.mailbox.places.holds(instance)
    assert event.work.calls == {}


def test_a_turn_that_has_ended_lends_its_place_to_nobody(box: Box) -> None:
    places = box.mailbox.places
    event = box.leased(box.event("e"))
    for number in range(6):
        places.force(box.instance(f"full{number}"), Claim("client/1", f"r{number}"))
    asked = box.instance("asked")
    places.wait(asked, [Claim("client/1", "e", lender="e", depth=1)])
    first = places.first()
    assert first is not None
    assert first.lent
    box.mailbox.finish(event, "done", ANSWER)
    assert places.first() is None


def test_what_a_finished_event_said_stays_where_the_journal_has_it(box: Box) -> None:
    event = box.queued(box.event("e"))
    box.mailbox.contents.rests(event)
    assert box.mailbox.contents.kept_bytes > 0
    event.content_here = None
    box.mailbox.finish(event, "done", ANSWER)
    assert event.content_here is None
    assert box.mailbox.contents.kept_bytes == 0


def test_an_answer_that_a_turn_may_ask_for_again_is_kept_with_its_bytes(box: Box) -> None:
    asker = box.leased(box.event("a"))
    event = box.asked(asker, box.queued(box.event("e", "other", root="a", asking=asker)))
    box.mailbox.finish(event, "done", ANSWER, blob(2, 500))
    assert box.mailbox.events["e"] is event
    assert (asker.work.requests, [*asker.work.answered]) == ({}, [event])
    here = len(memoryview(ANSWER))
    assert (event.work.kept_here, event.work.kept_in_file) == (here, 500)
    answers = box.mailbox.answers
    assert (answers.held, answers.of_session("client/1"), answers.of_root("a")) == (here + 500, here + 500, here + 500)
    assert box.mailbox.blobs.removable == []
    box.mailbox.answer_read(event.answer_id)
    assert (event.work.answer, event.work.kept_here, answers.held) == (None, 0, 500)
    box.mailbox.answer_read(event.answer_id)
    assert answers.held == 500, "what was read is given back once"
    box.mailbox.finish(asker, "done", ANSWER)
    assert (box.mailbox.events, answers.held, asker.work.answered) == ({}, 0, {})
    assert (event.work.kept_here, event.work.kept_in_file) == (0, 0)
    assert box.mailbox.blobs.removable == [blob(2, 500).file]


def test_only_the_answer_of_a_finished_event_is_read(box: Box) -> None:
    event = box.staged(box.event("e"))
    event.work.answer = ANSWER
    box.mailbox.answer_read(event.answer_id)
    assert event.work.answer == ANSWER
    box.mailbox.answer_read("unknown:answer")


def test_what_a_turn_has_asked_goes_on_without_it(box: Box) -> None:
    asker = box.leased(box.event("a"))
    event = box.asked(asker, box.queued(box.event("e", "other", root="a", asking=asker)))
    box.mailbox.finish(asker, "failed", ANSWER)
    assert (event.asking, asker.work.requests) == (None, {})
    assert box.mailbox.events == {"e": event}
    box.mailbox.finish(event, "done", ANSWER)
    assert (box.mailbox.events, box.mailbox.answers.held) == ({}, 0)


@pytest.mark.parametrize(("source", "goes"), [(Source("client", "operator"), False), (Source("agent", "x", "k"), True)])
def test_the_file_of_an_answer_goes_unless_the_journal_keeps_the_answer(box: Box, source: Source, goes: bool) -> None:
    event = box.queued(box.event("e", source=source))
    box.mailbox.finish(event, "done", ANSWER, blob(3))
    assert box.mailbox.blobs.removable == ([blob(3).file] if goes else [])
    assert box.mailbox.blobs.referenced() == frozenset()


def test_an_answers_file_that_was_sent_is_kept_until_its_receiver_has_it(box: Box) -> None:
    event = box.queued(box.event("e", source=OPERATOR))
    box.mailbox.blobs.sent(event.answer_id, blob(3), to="client")
    box.mailbox.finish(event, "done", ANSWER, blob(3))
    assert box.mailbox.blobs.referenced() == {blob(3).file}
    assert not box.mailbox.blobs.arrived(event.answer_id, at="toolhost")
    assert box.mailbox.blobs.arrived(event.answer_id, at="client")
    assert box.mailbox.blobs.removable == [blob(3).file]


def test_whether_there_is_room_for_an_answer(box: Box) -> None:
    event = box.event("e")
    assert box.mailbox.keeps(event, ANSWER, blob(1, MAX_TURN_ANSWERS // 2))
    assert not box.mailbox.keeps(event, ANSWER, blob(1, MAX_TURN_ANSWERS))
    box.mailbox.answers.take("client/1", "e", MAX_TURN_ANSWERS)
    assert not box.mailbox.keeps(event, ANSWER, blob(1, ANSWER_ROOM)), "its own bytes count as well"
    fits = Raw(b"\xc6" + (ANSWER_ROOM - 5).to_bytes(4, "big") + bytes(ANSWER_ROOM - 5))
    assert box.mailbox.keeps(event, fits, None), "so much is always kept"
    assert not box.mailbox.keeps(event, fits, blob(1, 1))


def test_the_kept_part_is_for_nobodys_answers(box: Box) -> None:
    """An operator's turn, too, gets no answers kept in what is left for operators: the rule is the same for all."""
    free = MAX_TURN_ANSWERS - MAX_TURN_ANSWERS // KEPT_PART
    box.mailbox.answers.take("another", "another", free - 2 * ANSWER_ROOM)
    event = box.event("e", source=OPERATOR)
    assert box.mailbox.keeps(event, ANSWER, blob(1, 2 * ANSWER_ROOM - len(memoryview(ANSWER))))
    assert not box.mailbox.keeps(event, ANSWER, blob(1, 2 * ANSWER_ROOM))


# --- dead letters


def buried(box: Box, event: Event) -> Event:
    box.mailbox.finish(box.queued(event), "dead", ANSWER)
    return event


def test_a_dead_letter_keeps_its_file_and_counts_until_a_person_has_dealt_with_it(box: Box) -> None:
    event = box.event("e", large=blob(1))
    size = event.size
    buried(box, event)
    made = box.mailbox
    assert (made.events, made.dead, box.counted()) == ({}, {"e": event}, (0, 0))
    assert (made.dead_events.held, made.dead_bytes.held, event.work.dead_bytes) == (1, size, size)
    assert (made.dead_events.of_session("client/1"), made.dead_bytes.of_root("e")) == (1, size)
    assert (event.blob, made.blobs.removable) == (blob(1), [])
    made.drop_dead(event)
    assert (made.dead, made.dead_events.held, made.dead_bytes.held) == ({}, 0, 0)
    assert (event.blob, made.blobs.removable) == (None, [blob(1).file])


def test_only_an_agent_that_has_dead_letters_may_be_refused_more(box: Box) -> None:
    made = box.mailbox
    made.dead_events.take("client/1", "x", MAX_DEAD)
    event = box.event("e")
    assert made.may_die(event), "none of this agent's was given up"
    first, second = buried(box, box.event("e1")), buried(box, box.event("e2"))
    assert not made.may_die(event)
    assert made.may_die(box.event("other", agent="reviewer"))
    made.drop_dead(first)
    assert not made.may_die(event), "one is left"
    made.drop_dead(second)
    assert made.may_die(event)


@pytest.mark.parametrize(("pool", "all_of_it"), [("dead_events", MAX_DEAD), ("dead_bytes", MAX_DEAD_BYTES)])
@pytest.mark.parametrize("source", [OPERATOR, Source("agent", "boss", "b"), None])
def test_of_dead_letters_a_part_is_kept_for_operators(
    box: Box, pool: str, all_of_it: int, source: Source | None
) -> None:
    buried(box, box.event("first"))
    left = all_of_it // KEPT_PART
    getattr(box.mailbox, pool).take("another", "another", all_of_it - left - getattr(box.mailbox, pool).held)
    assert box.mailbox.may_die(box.event("e", source=source, session="own")) is (source is OPERATOR)


@pytest.mark.parametrize("pool", ["dead_events", "dead_bytes"])
@pytest.mark.parametrize("name", ["session", "root"])
def test_a_session_and_a_root_with_many_dead_letters_get_no_more(box: Box, pool: str, name: str) -> None:
    buried(box, box.event("first", session="another"))
    counted: Pool = getattr(box.mailbox, pool)
    counted.take("own" if name == "session" else "another", "r" if name == "root" else "x", 3 * counted.capacity // 4)
    assert not box.mailbox.may_die(box.event("e", root="r", session="own"))
    assert box.mailbox.may_die(box.event("e", root="other", session="third"))


@pytest.mark.parametrize("state", ["done", "dead"])
def test_the_files_of_a_message_are_held_until_its_event_has_ended(box: Box, state: State) -> None:
    event = box.event("e")
    event.files = [FilePart(blob(1), "image/png"), FilePart(blob(2), "image/png")]
    assert event.size >= 2000
    box.queued(event)
    assert box.mailbox.blobs.referenced() == {blob(1).file, blob(2).file}
    box.mailbox.finish(event, state, NO_PAYLOAD)
    if state == "dead":
        assert box.mailbox.blobs.removable == []
        box.mailbox.drop_dead(event)
    assert box.mailbox.blobs.removable == [blob(1).file, blob(2).file]
