"""Twists of budgets: docs/budgets.md. The broker's router with an agent whose limits are a few calls."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from goondan.features.budgets.wire import BudgetLimits, BudgetReserve, BudgetSettle
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame, Lease
from tests.contract.twists.stage import Stage
from tests.unit.kernel.broker.approving import Bench, answer, code_of

ALLOW: dict[str, Any] = {"rules": []}
LS = {"command": "ls"}


class Spending:
    """The agent `coder/k` at work on `e1`, with these limits."""

    def __init__(self, **limits: Any) -> None:
        self.bench = Bench(ALLOW)
        coder = self.bench.plan.agents["coder"]
        spec = structs.replace(coder, parts={**coder.parts, "budgets": to_raw(BudgetLimits(**limits))})
        self.bench.plan = structs.replace(self.bench.plan, agents={**self.bench.plan.agents, "coder": spec})
        self.bench.router = self.bench._router()
        self.client, self.host = self.bench.client(), self.bench.host()
        self.bench.ask(self.client)
        self.agent = self.bench.agent()
        self.agent.take()

    def call(self, number: int | str, event: str = "e1", args: Any = LS) -> str | None:
        """One tool call; the code of its refusal. Sent again while the journal is behind, as a link does it."""
        for _ in range(3):
            code = code_of(self.agent.call(args, f"t1/c{number}", event))
            if code != "E_OVERLOADED":
                return code
        raise AssertionError("the journal never came")

    def say(self, kind: str, payload: Any, event: str = "e1") -> Frame:
        epoch = self.bench.instance("coder").epoch
        frames = self.agent.say(Frame(kind, event_id=event, epoch=epoch, payload=payload))
        (reply,) = [frame for frame in frames if frame.type in ("reply", "error")]
        return reply

    def reserve(self, id: str, tokens_in: int = 1, tokens_out: int = 1, kind: Any = "model") -> str | None:
        """A model call; the code of its refusal."""
        reply = self.say("budget.reserve", to_raw(BudgetReserve(id, kind, tokens_in, tokens_out)))
        return code_of([reply])

    def settle(self, id: str, tokens_in: int = 1, tokens_out: int = 1, **more: Any) -> str | None:
        payload = to_raw(BudgetSettle(id, input_tokens=tokens_in, output_tokens=tokens_out, **more))
        return code_of([self.say("budget.settle", payload)])

    def spent(self, event: str = "e1") -> dict[str, float]:
        (tree,) = self.client.admin(op="budget", eventId=event)["trees"]
        (account,) = tree["budgets"]
        found: dict[str, float] = account["spent"]
        return found

    def end(self, event: str = "e1") -> None:
        epoch = self.bench.instance("coder").epoch
        self.agent.say(Frame("ack", stage="done", event_id=event, epoch=epoch, payload=answer()))

    def dies(self) -> None:
        """kill -9 of the broker; the agent holds its event still."""
        epoch = self.bench.instance("coder").epoch
        self.bench.restart()
        self.client, self.host = self.bench.client(), self.bench.host()
        self.agent = self.bench.agent(leases=[Lease("e1", epoch, "k")])
        self.agent.take()


def test_the_call_after_the_last_and_the_same_call_again() -> None:
    made = Spending(tool_calls=3)
    assert [made.call(number) for number in (1, 1, 2, 2, 3, 3, 1)] == [None] * 7
    assert [made.call(number) for number in (4, 4, 5)] == ["E_BUDGET_SPENT"] * 3
    assert made.call(3) is None, "one that was counted is not refused afterwards"
    assert made.spent()["toolCalls"] == 3


def test_the_next_message_begins_anew_and_the_same_one_does_not() -> None:
    made = Spending(tool_calls=1)
    assert [made.call(1), made.call(2)] == [None, "E_BUDGET_SPENT"]
    made.end()
    made.bench.ask(made.client)  # the same event once more
    made.bench.ask(made.client, "e2")
    made.agent.take()
    assert made.call("x", "e2") is None
    assert made.call("y", "e2") == "E_BUDGET_SPENT"
    assert made.spent("e1")["toolCalls"] == made.spent("e2")["toolCalls"] == 1


def test_calls_of_both_kinds_share_one_limit() -> None:
    made = Spending(calls=3)
    assert made.reserve("m1") is None
    assert made.call(1) is None
    assert made.reserve("m2") is None
    assert made.call(2) == "E_BUDGET_SPENT"
    assert made.reserve("m3") == "E_BUDGET_SPENT"
    assert made.settle("m1") is None
    assert made.reserve("m4") == "E_BUDGET_SPENT", "a settled call was one"


def test_a_model_call_that_was_not_made_gives_back_what_it_held() -> None:
    made = Spending(model_calls=1)
    for number in range(5):
        assert made.reserve(f"m{number}") is None
        assert made.settle(f"m{number}", unused=True) is None
    assert made.reserve("last") is None
    made.settle("last")
    assert made.reserve("more") == "E_BUDGET_SPENT"


def test_reserved_twice_and_settled_twice() -> None:
    made = Spending(model_calls=2, tokens=10_000)
    assert [made.reserve("m", 10, 10), made.reserve("m", 10, 10)] == [None, None]
    made.settle("m", 5, 5)
    made.settle("m", 5000, 4000)
    assert (made.spent()["modelCalls"], made.spent()["tokens"]) == (1, 10)


def test_settled_though_never_reserved() -> None:
    made = Spending(model_calls=2, tokens=1000)
    made.settle("nothing", 500, 500)
    made.settle("nothing", unused=True)
    assert made.reserve("m") is None
    assert made.spent()["tokens"] <= 1000
    assert made.spent()["modelCalls"] <= 1


def test_a_call_that_took_more_than_it_held_leaves_nothing() -> None:
    made = Spending(tokens=1000)
    assert made.reserve("m1", 100, 300) is None
    made.settle("m1", 900, 900)
    assert made.spent()["tokens"] == 1800
    assert made.reserve("m2", 1, 1) == "E_BUDGET_SPENT"


def test_a_death_between_reserve_and_settle() -> None:
    """What is known after it is what was known before; a call that was reserved is one, whatever comes."""
    made = Spending(model_calls=2, tokens=10_000)
    assert made.reserve("m1", 10, 300) is None
    made.dies()
    made.settle("m1", 10, 20)
    assert made.spent()["tokens"] in (30, 310)
    assert made.reserve("m2", 10, 300) is None
    made.settle("m2", 10, 20)
    made.dies()
    assert made.reserve("m3", 1, 1) == "E_BUDGET_SPENT"
    assert made.spent()["modelCalls"] == 2


@pytest.mark.parametrize("deaths", [1, 3])
def test_never_more_than_the_limit_over_deaths(deaths: int) -> None:
    made = Spending(tool_calls=20)
    done = 0
    for number in range(60):
        if number and number % 5 == 0 and number <= 5 * deaths:
            made.dies()
        done += made.call(number) is None
    assert done <= 20
    assert done >= 20 - deaths, "each death costs a fiftieth of the limit, and one at least"


RUBBISH: list[Any] = [
    None,
    5,
    [],
    "m",
    {},
    {"id": "m"},
    {"kind": "model"},
    {"id": "", "kind": "model"},
    {"id": "a/b", "kind": "model"},
    {"id": "x" * 65, "kind": "model"},
    {"id": 5, "kind": "model"},
    {"id": "m", "kind": "Model"},
    {"id": "m", "kind": None},
    {"id": "m", "kind": "model", "inputTokens": -1},
    {"id": "m", "kind": "model", "inputTokens": 1.5},
    {"id": "m", "kind": "model", "inputTokens": "1"},
    {"id": "m", "kind": "model", "inputTokens": True},
    {"id": "m", "kind": "model", "outputTokens": 2**63},
    {"id": "m", "kind": "model", "outputTokens": float("nan")},
    {"id": "m", "kind": "model", "outputTokens": float("inf")},
]


def test_rubbish_is_refused_and_costs_nothing() -> None:
    made = Spending(calls=2)
    for one in RUBBISH:
        code = code_of([made.say("budget.reserve", to_raw(one))])
        assert code is not None, one
        assert code.startswith("E_"), one
    for one in RUBBISH:
        made.say("budget.settle", to_raw(one))
    assert made.spent()["calls"] == 0
    assert [made.reserve("m1"), made.call(1), made.reserve("m2")] == [None, None, "E_BUDGET_SPENT"]


def test_of_another_event_or_with_an_old_epoch() -> None:
    made = Spending(model_calls=5)
    payload = to_raw(BudgetReserve("m", "model", 1, 1))
    for event, epoch in (("e2", made.bench.instance("coder").epoch), ("e1", 0), ("e1", 2**40), (None, None)):
        frames = made.agent.say(Frame("budget.reserve", event_id=event, epoch=epoch, payload=payload))
        (reply,) = [frame for frame in frames if frame.type in ("reply", "error")]
        assert reply.type == "error", (event, epoch)
    assert made.spent()["modelCalls"] == 0


def test_time_is_over() -> None:
    made = Spending(wall_seconds=60)
    made.bench.now += 59  # the peers are silent, and nobody looks
    assert made.call(1) is None
    made.dies()
    made.bench.now += 2
    assert made.call(2) == "E_BUDGET_SPENT"
    assert made.reserve("m") == "E_BUDGET_SPENT"
    made.dies()
    assert made.call(3) == "E_BUDGET_SPENT"


LIMITS: list[tuple[Any, bool]] = [
    ({"calls": 1}, True),
    ({"calls": 200, "money": 2.5, "wallSeconds": 1800}, True),
    ({"money": 0.01}, True),
    ({}, False),
    (None, False),
    ([], False),
    (5, False),
    ({"calls": 0}, False),
    ({"calls": -1}, False),
    ({"calls": 1.5}, False),
    ({"calls": "5"}, False),
    ({"calls": True}, False),
    ({"calls": None}, False),
    ({"Calls": 5}, False),
    ({"call": 5}, False),
    ({"tokens": 2**70}, False),
    ({"money": 0}, False),
    ({"money": -1}, False),
    ({"money": "2.50"}, False),
    ({"money": 1e300}, False),
    ({"wallSeconds": 0}, False),
    ({"wallSeconds": True}, False),
]


def test_limits_that_are_none_are_said_by_the_loader(stage: Stage) -> None:
    """`gdn validate` names them. The embedded console costs nothing, so money needs no prices here."""
    wrong = []
    for number, (limits, good) in enumerate(LIMITS):
        config = {"limits": limits}
        path = stage.write([], refs=[{"ref": "Extension/budget", "config": config}])
        found = inspect_bundle(str(path), state_dir=str(stage.state), handlers=False)
        if bool(found.errors) is good:
            wrong.append((number, limits, [str(one)[:200] for one in found.errors]))
    assert wrong == []


@pytest.mark.parametrize("warn_at", [-0.1, 1.5, "0.1", None, True, []])
def test_a_part_that_is_none(stage: Stage, warn_at: Any) -> None:
    config = {"limits": {"calls": 5}, "warnAt": warn_at}
    path = stage.write([], refs=[{"ref": "Extension/budget", "config": config}])
    assert inspect_bundle(str(path), state_dir=str(stage.state), handlers=False).errors, warn_at
