"""One gate: its limits, what it does with refusals, and that no permit is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.gates.broker.gate import FORGET_S, MAX_BLAME_S, MINUTE_S, PERMIT_S, Ask, Gate
from goondan.schemas.models.model_providers import ModelLimits
from goondan.schemas.models.server_answers import RateLimits


def ask(name: str, since: float = 0.0, tokens: int = 0, whose: str = "agent/a/k") -> Ask:
    return Ask((whose, name), f"tree of {name}", since, tokens)


def taken(gate: Gate, now: float) -> list[str]:
    return [permit.key[1] for permit in gate.take(now)]


def test_nothing_limits_a_gate_that_nobody_has_limited() -> None:
    assert not Gate(ModelLimits()).limited
    assert Gate(ModelLimits(max_concurrent=1)).limited


def test_so_many_at_once() -> None:
    gate = Gate(ModelLimits(max_concurrent=2))
    for at, name in enumerate("abc"):
        gate.ask(ask(name, at))
    assert taken(gate, 3.0) == ["a", "b"]
    assert taken(gate, 3.0) == []
    gate.over(("agent/a/k", "a"), 4.0, accepted=True, tokens=None, news=None)
    assert taken(gate, 4.0) == ["c"]


def test_so_many_requests_and_tokens_in_any_minute() -> None:
    gate = Gate(ModelLimits(requests_per_minute=2))
    for at, name in enumerate("abc"):
        gate.ask(ask(name, at))
    assert taken(gate, 10.0) == ["a", "b"]
    assert taken(gate, 10.0 + MINUTE_S - 0.1) == []
    assert taken(gate, 10.0 + MINUTE_S) == ["c"]
    gate = Gate(ModelLimits(tokens_per_minute=100))
    for at, (name, tokens) in enumerate([("large", 500), ("b", 60), ("c", 60)]):
        gate.ask(ask(name, at, tokens))
    assert taken(gate, 10.0) == ["large"]  # the server decides about it
    assert taken(gate, 10.0 + MINUTE_S) == ["b"]
    gate.over(("agent/a/k", "b"), 80.0, accepted=True, tokens=30, news=None)
    assert taken(gate, 80.0) == ["c"]  # it has used less than was thought


def test_a_refusal_holds_all_back_and_the_refused_one_keeps_its_place() -> None:
    gate = Gate(ModelLimits(max_concurrent=9))
    for at, name in enumerate("abc"):
        gate.ask(ask(name, at))
    assert taken(gate, 3.0) == ["a", "b", "c"]
    gate.ask(ask("d", 4.0))
    refused = gate.refused(("agent/a/k", "a"), 5.0, 4.0)
    assert refused is not None
    gate.ask(ask("a", refused.since))
    assert taken(gate, 8.9) == []
    for name in "bc":
        gate.over(("agent/a/k", name), 8.9, accepted=True, tokens=None, news=None)
    assert taken(gate, 9.0) == ["a", "d"]  # two at once were accepted


def test_a_gate_opens_again_when_nobody_needs_it() -> None:
    gate = Gate(ModelLimits())
    gate.refused(("agent/a/k", "a"), 1.0, 10.0)
    assert gate.limited
    gate.forget_old(10.0 + FORGET_S - 1)
    assert gate.limited
    gate.forget_old(10.0 + FORGET_S)
    assert not gate.limited


def test_an_agent_alone_is_back_to_full_speed_after_an_outage() -> None:
    """One 429, four good turns, 429s for 38 s, then a turn a second: what was taken for a slow server was none."""
    gate, now, waited = Gate(ModelLimits()), 0.0, []
    gate.refused(("agent/a/k", "0"), 1.0, now)
    answers = [True] * 4 + [False] * 6 + [True] * 40
    for number, accepted in enumerate(answers):
        began, name = now, str(number)
        if gate.limited:
            gate.ask(ask(name, now))
            while not taken(gate, now):
                now += 0.1
                gate.forget_old(now)
        waited.append(now - began)
        if accepted:
            gate.over(("agent/a/k", name), now + 0.1, accepted=True, tokens=None, news=None)
            now += 1.0
        else:
            gate.refused(("agent/a/k", name), None, now)
    assert max(waited) > 4 and max(waited[-15:]) < 0.2
    assert not gate.limited


def test_with_written_limits_what_was_learned_is_forgotten_as_well() -> None:
    gate = Gate(ModelLimits(max_concurrent=5))
    gate.refused(("agent/a/k", "a"), 1.0, 0.0)
    gate.learned.rate = 0.01
    gate.forget_old(FORGET_S)
    assert gate.learned.rate is None
    assert gate.limited


def test_only_who_comes_behind_others_waits_for_others() -> None:
    gate = Gate(ModelLimits(max_concurrent=1))
    for name, whose in (("a", "agent/a/k"), ("b", "agent/a/k"), ("c", "agent/b/k")):
        gate.ask(ask(name, 0.0, whose=whose))
    found = {}
    for _ in range(3):
        (permit,) = gate.take(1.0)
        found[permit.key[1]] = permit.others
        gate.over(permit.key, 1.0, accepted=True, tokens=None, news=None)
    assert found == {"a": False, "b": False, "c": True}


def test_what_the_server_says_it_accepts_is_kept() -> None:
    gate = Gate(ModelLimits(max_concurrent=9))
    gate.ask(ask("a"))
    taken(gate, 0.0)
    for at, name in enumerate("bcd", 1):
        gate.ask(ask(name, at))
    gate.over(("agent/a/k", "a"), 5.0, accepted=True, tokens=None, news=RateLimits(2, 30_000, 10**6, 30_000))
    assert taken(gate, 5.0) == ["b", "c"]
    assert taken(gate, 34.9) == []
    assert taken(gate, 35.0) == ["d"]


def test_asks_that_nobody_accepts_are_given_up_after_their_patience() -> None:
    gate = Gate(ModelLimits(max_concurrent=1))
    gate.ask(ask("a"))
    taken(gate, 0.0)
    gate.ask(ask("b", 1.0))
    assert gate.given_up(100.0) == []  # it waits for others, not for the server
    gate.refused(("agent/a/k", "a"), 50.0, 100.0)
    assert gate.given_up(159.9) == []
    assert [given_up.key[1] for given_up in gate.given_up(160.0)] == ["b"]
    assert len(gate.queue) == 0


def test_one_connection_alone_cannot_hold_the_others_up_for_ever() -> None:
    gate, now, held = Gate(ModelLimits(max_concurrent=1)), 0.0, 0.0
    gate.ask(ask("honest", 0.0, whose="agent/b/k"))
    liar = ("agent/a/k", "liar")
    for _ in range(20):
        gate.ask(Ask(liar, "tree of liar", -1.0))
        if any(permit.key == liar for permit in gate.take(now)):
            gate.refused(liar, 60.0, now)
            held = max(held, gate.held_until(now))
        now += 30.0
    assert held <= MAX_BLAME_S + 60.0
    gate.queue.remove(liar)
    assert taken(gate, now) == ["honest"]


def test_a_permit_that_is_never_given_back_ends() -> None:
    gate = Gate(ModelLimits(max_concurrent=1))
    gate.ask(ask("a"))
    taken(gate, 0.0)
    assert list(gate.expired(PERMIT_S - 1)) == []
    assert [permit.key[1] for permit in gate.expired(PERMIT_S)] == ["a"]


LIMITS = st.builds(
    ModelLimits,
    max_concurrent=st.none() | st.integers(1, 3),
    requests_per_minute=st.none() | st.integers(1, 4),
    tokens_per_minute=st.none() | st.integers(50, 200),
)
STEP = st.tuples(st.sampled_from(["ask", "over", "refuse", "withdraw", "wait"]), st.integers(0, 5), st.integers(0, 60))


@settings(max_examples=200)
@given(LIMITS, st.lists(STEP, max_size=60))
def test_never_over_its_limits_and_nothing_is_lost(limits: ModelLimits, steps: list[tuple[str, int, int]]) -> None:
    gate, now = Gate(limits), 100.0
    went: list[tuple[float, int]] = []
    waiting: set[str] = set()
    out: set[str] = set()
    for step, number, amount in steps:
        name, key = str(number), (f"agent/{number % 2}/k", str(number))
        now += 0.1
        if step == "ask" and name not in out:
            gate.ask(Ask(key, f"t{number % 3}", now, amount))
            waiting.add(name)
        elif step == "over":
            gate.over(key, now, accepted=True, tokens=None, news=None)
            waiting.discard(name)
            out.discard(name)
        elif step == "refuse" and name in out:
            gate.refused(key, float(amount % 5), now)
            out.discard(name)
        elif step == "withdraw":
            gate.withdraw(key)
            waiting.discard(name)
            out.discard(name)
        else:
            now += amount
        for permit in gate.take(now):
            assert permit.key[1] in waiting
            waiting.discard(permit.key[1])
            out.add(permit.key[1])
            went.append((now, permit.tokens))
        assert {key[1] for key in gate.permits} == out
        assert len(gate.queue) == len(waiting)
        assert limits.max_concurrent is None or len(out) <= limits.max_concurrent
        minute = [tokens for at, tokens in went if now - at < 60]
        assert limits.requests_per_minute is None or len(minute) <= limits.requests_per_minute
        assert limits.tokens_per_minute is None or sum(minute) <= limits.tokens_per_minute or len(minute) == 1
    for key in [*gate.permits]:
        gate.withdraw(key)
    for _ in range(2000):  # whoever waits gets out at last
        if not len(gate.queue):
            break
        now += 1.0
        for permit in gate.take(now):
            gate.over(permit.key, now, accepted=True, tokens=None, news=None)
    assert not len(gate.queue)
