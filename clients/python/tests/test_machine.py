"""The machine beside a broker that is slow, full, forgetful and gone, as hypothesis likes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goondan_client.errors import GoondanError
from goondan_client.frames import AgentEvent, decode, encode, opened
from goondan_client.machine import BUSY_S, GRACE_S, SILENCE_S, Effect, Entry, Machine

HELLO: dict[str, Any] = {"type": "error", "payload": {"code": "E_HELLO_REQUIRED", "message": "hello"}}
WINDOW = 3


class World:
    """A machine, and a broker that knows events by their ids and answers each once more whenever it is asked again."""

    def __init__(self) -> None:
        self.machine = Machine("inc")
        self.machine.connected(0.0)
        self.now = 0.0
        self.known = self.probed = False
        #: What the broker has accepted, in order; what it has not answered for good.
        self.accepted: dict[str, dict[str, Any]] = {}
        self.unacknowledged: dict[str, dict[str, Any]] = {}
        self.answered: set[str] = set()
        self.out: list[dict[str, Any]] = []
        self.full: set[str] = set()
        self.told: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.wanted: set[str] = set()
        self.unanswered = 0

    def ask(self, instance: str, answer: bool = True) -> None:
        name = f"e{len(self.asked)}"
        self.asked.append(name)
        frame: dict[str, Any] = {"type": "event", "to": "a", "instanceKey": instance, "eventId": name, "payload": None}
        if answer:
            self.wanted.add(name)
            frame["replyTo"] = {"target": "client", "correlationId": name}
        self.machine.submit(Entry(frame, name), self.now)

    def hear(self, frame: dict[str, Any]) -> None:
        effect = self.machine.receive(decode(encode(frame)), self.now)
        self.perform([] if effect is None else [effect])

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if effect.what == "greet":
                self.machine.hello("token", self.now)
                awaiting = msgspec.msgpack.decode(self.machine.outgoing[-1])["payload"]["awaiting"]
                assert set(awaiting) == self.wanted - {name for name, _ in self.told}
            elif effect.what == "connect":
                self.lose()
            elif effect.what == "done" and effect.entry is not None:
                self.told.append((effect.entry.waiter, "" if effect.error is None else effect.error.code))

    def lose(self) -> None:
        """The connection is another one, and what was on the way is gone."""
        self.known = self.probed = False
        self.out.clear()
        self.machine.outgoing.clear()

    def deliver(self) -> None:
        """What was sent comes to the broker, which asks each connection for hello first."""
        if not self.probed:
            self.probed = True
            self.hear(HELLO)
        while self.machine.outgoing:
            frame = msgspec.msgpack.decode(self.machine.outgoing.popleft())
            if frame["type"] == "hello":
                self.known = True
                self.unanswered = 0
                welcome = {"version": 1, "principal": "client/1", "credit": WINDOW}
                self.hear({"type": "welcome", "inReplyTo": frame["id"], "payload": welcome})
                for answer in self.unacknowledged.values():
                    self.hear(answer)
            elif not self.known:
                if "id" in frame:
                    self.hear({**HELLO, "inReplyTo": frame["id"]})
                else:
                    self.hear(HELLO)
            elif frame["type"] == "event" and f"{frame['eventId']}:answer" in self.answered:
                pass  # its answer has crossed it
            elif frame["type"] == "event":
                self.unanswered += 1
                assert self.unanswered <= WINDOW, "more new events are out than the credit allows"
                self.take(frame)
            elif frame["type"] == "ping":
                self.hear({"type": "pong"})
            elif frame["type"] == "ack":
                self.unacknowledged.pop(frame["eventId"], None)

    def take(self, frame: dict[str, Any]) -> None:
        if frame["instanceKey"] in self.full and frame["eventId"] not in self.accepted:
            error = {"code": "E_OVERLOADED", "message": "full", "retryAfterMs": 300}
            self.unanswered -= 1
            self.hear({"type": "error", "inReplyTo": frame["id"], "payload": error})
            return
        self.accepted.setdefault(frame["eventId"], frame)
        self.out.append(frame)

    def acknowledge(self) -> None:
        for frame in self.out:
            self.unanswered -= 1
            self.hear({"type": "ack", "stage": "accepted", "inReplyTo": frame["id"], "eventId": frame["eventId"]})
        self.out.clear()

    def answer(self) -> None:
        answered = [frame for frame in self.out if "replyTo" in frame]
        self.unanswered -= len(answered)  # an answer may come before the acknowledgement, and stands for it
        self.out = [frame for frame in self.out if "replyTo" not in frame]
        for name, frame in self.accepted.items():
            if "replyTo" in frame:
                event = {"type": "event", "id": f"b.{name}", "inReplyTo": name, "eventId": f"{name}:answer"}
                self.unacknowledged.setdefault(f"{name}:answer", event)
                self.answered.add(f"{name}:answer")
                self.hear(event)

    def wait(self, ms: int) -> None:
        for _ in range(ms // 100):
            self.now += 0.1
            self.perform(self.machine.tick(self.now))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("xyz"), st.booleans()),
        st.tuples(st.sampled_from(["deliver", "acknowledge", "answer", "lose", "hello"])),
        st.tuples(st.just("wait"), st.integers(1, 60)),
        st.tuples(st.just("full"), st.sets(st.sampled_from("xyz"))),
    ),
    max_size=60,
)


@example([("full", {"x"}), *[("ask", "x", True)] * 5, ("deliver",)])  # refused while later ones wait for credit
@given(STEPS)
def test_everything_is_answered_once_and_in_order(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    for step in steps:
        if step[0] == "ask":
            world.ask(step[1], step[2])
        elif step[0] == "wait":
            world.wait(step[1] * 100)
        elif step[0] == "full":
            world.full = step[1]
        elif step[0] == "hello":  # it has forgotten the connection
            world.known = False
            world.out.clear()
            world.hear(HELLO)
        elif step[0] == "lose":
            world.lose()
        else:
            getattr(world, step[0])()
    # From now on the broker is a good one.
    world.full = set()
    for _ in range(200):
        world.deliver()
        world.acknowledge()
        world.answer()
        world.wait(500)
        if world.machine.rests and not world.machine.outgoing:
            break
    assert sorted(world.told) == sorted((name, "") for name in world.asked), "told once, and without an error"
    for instance in "xyz":
        taken = [name for name, frame in world.accepted.items() if frame["instanceKey"] == instance]
        assert taken == sorted(taken, key=lambda name: int(name[1:])), "accepted in the order in which it was asked"
    assert world.machine.rests


@given(st.floats(0.1, 100), st.lists(st.tuples(st.floats(0.01, 5), st.booleans()), max_size=20))
def test_a_deadline_runs_from_the_first_sending_and_stands_still_while_a_person_is_asked(
    deadline: float, clock: list[tuple[float, bool]]
) -> None:
    machine, now, ran, held = Machine("inc"), 0.0, 0.0, False
    machine.connected(0.0)
    frame = {"type": "event", "to": "a", "instanceKey": "k", "replyTo": {"target": "client", "correlationId": "q"}}
    machine.submit(Entry(frame, None, now + deadline + GRACE_S), now)
    over = False
    for passes, holds in clock:
        now += passes
        ran += 0.0 if held else passes
        over = over or any(effect.what == "done" for effect in machine.tick(now))
        assert over == (ran >= deadline + GRACE_S - 1e-6) or abs(ran - deadline - GRACE_S) < 1e-6
        if over:
            return
        stage = "held" if holds else "runs"
        machine.receive(decode(encode({"type": "clock", "stage": stage, "inReplyTo": "q"})), now)
        held = holds


def test_the_broker_says_what_is_left_when_time_runs_again() -> None:
    machine = Machine("inc")
    machine.connected(0.0)
    frame = {"type": "event", "to": "a", "instanceKey": "k", "replyTo": {"target": "client", "correlationId": "q"}}
    machine.submit(Entry(frame, None, 2.0 + GRACE_S), 0.0)
    for stage, now, more in (("held", 1.0, {}), ("runs", 60.0, {"deadlineMs": 500})):
        machine.receive(decode(encode({"type": "clock", "stage": stage, "inReplyTo": "q", **more})), now)
    ends = [now for now in (60.4, 61.4, 61.6) if any(effect.what == "done" for effect in machine.tick(now))]
    assert ends == [61.6]


def test_a_busy_principal_is_tried_for_ten_seconds_and_a_refused_token_only_if_the_file_has_another() -> None:
    machine, now = Machine("inc"), 0.0
    machine.connected(now)
    hellos = 0

    def hello() -> str:
        nonlocal hellos
        hellos += 1
        machine.hello("old", now)
        return str(msgspec.msgpack.decode(machine.outgoing.pop())["id"])

    machine.receive(decode(encode(HELLO)), now)
    last, over = hello(), False
    while not over:
        error = {"code": "E_PRINCIPAL_BUSY", "message": "busy"}
        effect = machine.receive(decode(encode({"type": "error", "inReplyTo": last, "payload": error})), now)
        over = effect is not None and effect.what == "over"
        now += 0.5
        for due in machine.tick(now):
            assert due.what == "greet"
            last = hello()
    assert BUSY_S <= now <= BUSY_S + 2 and hellos > 15

    machine = Machine("inc")
    machine.receive(decode(encode(HELLO)), now)
    last = hello()
    error = {"code": "E_TOKEN_INVALID", "message": "old"}
    effect = machine.receive(decode(encode({"type": "error", "inReplyTo": last, "payload": error})), now)
    assert effect is not None and effect.what == "greet" and effect.error is not None
    assert effect.error.code == "E_TOKEN_INVALID" and machine.token == "old"


def test_control_waits_for_no_event() -> None:
    machine = Machine("inc")
    machine.hello("token", 0.0)
    welcome = {"version": 1, "principal": "client/1", "credit": 1}
    machine.receive(decode(encode({"type": "welcome", "inReplyTo": "inc.1", "payload": welcome})), 0.0)
    machine.outgoing.clear()
    for number in range(3):
        machine.submit(Entry({"type": "event", "to": "a", "instanceKey": "k", "eventId": str(number)}, number), 0.0)
    machine.submit(Entry({"type": "admin", "payload": {"op": "peers"}}, None), 0.0)
    types = [msgspec.msgpack.decode(data)["type"] for data in machine.outgoing]
    assert types == ["event", "admin"]
    machine.lost()
    machine.hello("token", 0.0)
    hello = msgspec.msgpack.decode(machine.outgoing.pop())["id"]
    machine.receive(decode(encode({"type": "welcome", "inReplyTo": hello, "payload": welcome})), 0.0)
    assert [msgspec.msgpack.decode(data)["type"] for data in machine.outgoing] == ["event", "admin"]


def welcomed(credit: int) -> Machine:
    """A machine that is ready."""
    machine = Machine("inc")
    welcome_again(machine, credit)
    return machine


def welcome_again(machine: Machine, credit: int) -> None:
    machine.hello("token", 0.0)
    hello = msgspec.msgpack.decode(machine.outgoing.pop())["id"]
    welcome = {"version": 1, "principal": "client/1", "credit": credit}
    machine.receive(decode(encode({"type": "welcome", "inReplyTo": hello, "payload": welcome})), 0.0)


def question(name: str, instance: str = "k") -> Entry:
    reply = {"target": "client", "correlationId": name}
    return Entry({"type": "event", "to": "a", "instanceKey": instance, "eventId": name, "replyTo": reply}, name)


def wish(name: str) -> Entry:
    return Entry({"type": "admin", "payload": {"op": "cancel", "eventId": name}}, name)


def refuse(machine: Machine, entry: Entry, now: float = 0.0) -> None:
    error = {"code": "E_OVERLOADED", "message": "full", "retryAfterMs": 1000}
    machine.receive(decode(encode({"type": "error", "inReplyTo": entry.frame["id"], "payload": error})), now)


def sent(machine: Machine) -> list[str]:
    """What went out since the last time: types, events by their ids."""
    frames = [msgspec.msgpack.decode(data) for data in machine.outgoing]
    machine.outgoing.clear()
    return [frame.get("eventId", frame["type"]) for frame in frames]


def test_a_question_that_is_open_is_not_asked_beside_itself() -> None:
    machine = welcomed(9)
    first = question("q")
    machine.submit(first, 0.0)
    with pytest.raises(GoondanError) as caught:
        machine.submit(question("q"), 0.0)
    assert caught.value.code == "E_FRAME_INVALID" and caught.value.suggestion
    effect = machine.receive(decode(encode({"type": "event", "eventId": "q:answer", "inReplyTo": "q"})), 0.0)
    assert effect is not None and effect.entry is first and machine.rests
    machine.submit(question("q"), 0.0)  # it is over, and may be asked again


def test_a_refused_question_that_was_given_up_is_never_sent_again() -> None:
    machine = welcomed(9)
    asked = question("q")
    machine.submit(asked, 0.0)
    refuse(machine, asked)
    assert machine.give_up(asked), "an earlier broker may have it"
    machine.submit(wish("q"), 0.0)
    machine.tick(4.0)
    assert sent(machine) == ["q", "admin"]


def test_a_wish_to_cancel_is_never_before_its_event() -> None:
    machine = welcomed(2)
    first, second = question("1", "x"), question("2", "y")
    for entry in (first, second):
        machine.submit(entry, 0.0)
    machine.lost()
    assert machine.give_up(second)
    machine.submit(wish("2"), 0.0)
    sent(machine)
    welcome_again(machine, 1)
    assert sent(machine) == ["1", "admin"]
    machine.receive(decode(encode({"type": "ack", "stage": "accepted", "inReplyTo": first.frame["id"]})), 0.0)
    assert sent(machine) == [], "without credit it would have come behind the wish, and been worked on"


@pytest.mark.parametrize("credit", [1, 9999], ids=["without credit", "held"])
def test_what_waits_costs_nothing_while_nothing_can_go_out(credit: int) -> None:
    machine, looks = welcomed(credit), 0

    class Counted(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal looks
            looks += key == "type"
            return super().__getitem__(key)

    first = question("first")
    machine.submit(first, 0.0)
    if credit > 1:
        refuse(machine, first)
    for number in range(1000):
        entry = question(str(number))
        entry.frame = Counted(entry.frame)
        machine.submit(entry, 0.0)
    for _ in range(100):
        machine.receive(decode(encode({"type": "pong"})), 0.0)
    assert looks < 5000
    machine.receive(decode(encode({"type": "credit", "payload": {"window": 9999}})), 0.0)
    machine.tick(4.0)
    assert sent(machine)[-1001:] == ["first", *map(str, range(1000))]


def test_what_was_given_up_costs_credit_until_the_broker_has_answered_it() -> None:
    for answer in (
        {"type": "ack", "stage": "accepted"},
        {"type": "error", "payload": {"code": "E_OVERLOADED", "message": "no", "retryAfterMs": 1000}},
    ):
        machine = Machine("inc")
        machine.hello("token", 0.0)
        welcome = {"version": 1, "principal": "client/1", "credit": 1}
        machine.receive(decode(encode({"type": "welcome", "inReplyTo": "inc.1", "payload": welcome})), 0.0)
        machine.outgoing.clear()
        first, second = (
            Entry({"type": "event", "to": "a", "instanceKey": str(number), "eventId": str(number)}, number)
            for number in range(2)
        )
        machine.submit(first, 0.0)
        machine.submit(second, 0.0)
        assert machine.give_up(first)
        machine.flush(0.0)
        assert [msgspec.msgpack.decode(data)["eventId"] for data in machine.outgoing] == ["0"]
        machine.receive(decode(encode({**answer, "inReplyTo": first.frame["id"]})), 0.0)
        assert [msgspec.msgpack.decode(data)["eventId"] for data in machine.outgoing] == ["0", "1"]


def test_the_answer_of_a_question_that_was_given_up_is_acknowledged_and_dropped() -> None:
    world = World()
    world.hear(HELLO)
    world.deliver()
    world.ask("x")
    world.deliver()
    entry = next(iter(world.machine._outbox.values()))
    assert world.machine.give_up(entry)
    world.answer()
    world.deliver()
    assert world.unacknowledged == {} and not world.machine.give_up(entry)
    assert opened(encode({"id": "e", "type": "t", "createdAt": "c"}), AgentEvent).answer is None


def test_a_silent_broker_is_asked_and_then_given_up() -> None:
    world = World()
    world.hear(HELLO)
    world.deliver()
    world.now += 1000  # nothing is unanswered: no fault
    assert world.machine.tick(world.now) == []
    world.ask("x")
    world.machine.outgoing.clear()
    world.wait(int(SILENCE_S * 1000) - 100)
    assert not world.machine.outgoing
    world.wait(200)
    assert msgspec.msgpack.decode(world.machine.outgoing.pop()) == {"type": "ping"}
    connects = [
        effect
        for tick in range(60)
        for effect in world.machine.tick(world.now + 0.1 * (tick + 1))
        if effect.what == "connect"
    ]
    assert len(connects) == 1
