"""The agent's side of the gates before model servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.agentproc.http.provider import Tries
from goondan.agentproc.machine.model_waits import ModelAttempts
from goondan.agentproc.providers.base import ModelAnswer, ModelNews, Usage
from goondan.agentproc.providers.faults import Fault, exhausted_wait, is_low, rate_limits
from goondan.features.gates.agent import GatedRequest, ModelGates, TurnGates
from goondan.features.gates.wire import (
    GateChanged,
    HeldPermit,
    KeptState,
    PermitAsk,
    PermitGranted,
    PermitOver,
    PlaceInLine,
    Refused,
)
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.server_answers import RateLimits
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame, Welcome
from tests.unit.agentproc.fakes import FakeLink

SPEC = ModelSpec(provider="openai", model="m", document="main")


class Broker(FakeLink):
    """A link whose asks the test answers."""

    def __init__(self) -> None:
        super().__init__()
        self.replies["model.permit"] = lambda frame: None

    def grant(self, **granted: Any) -> None:
        self.waiting[-1].set_result(Frame("reply", payload=to_raw(PermitGranted(**granted))))

    @property
    def permit(self) -> PermitAsk:
        return from_raw(self.posted[-1].payload, PermitAsk)


class Agent:
    def __init__(self, *, limited: bool) -> None:
        self.broker = Broker()
        self.gates = ModelGates(cast("Any", SimpleNamespace(link=self.broker)), lambda: 100.0)
        self.gates.welcomed(
            Welcome(version=1, principal="p", broker="b", credit=1, max_frame=1, limited=["main"] if limited else [])
        )
        self.places: list[tuple[int, int]] = []
        self.news: list[ModelNews] = []

    def request(self) -> GatedRequest:
        return GatedRequest(TurnGates(self.gates, "e1", 3, lambda *place: self.places.append(place)), SPEC)

    async def enter(self, request: GatedRequest) -> asyncio.Task[None]:
        task = asyncio.ensure_future(request.enter(4000, self.news.append))
        for _ in range(3):
            await asyncio.sleep(0)
        return task


async def test_an_open_gate_costs_no_frame() -> None:
    agent = Agent(limited=False)
    request = agent.request()
    await request.enter(4000, agent.news.append)
    request.over({}, accepted=True, tokens=7)
    assert (agent.broker.sent, agent.broker.posted, agent.news) == ([], [], [])
    assert agent.gates.held() == {"permits": [], "gates": []}


async def test_a_request_waits_for_its_permit_and_gives_it_back() -> None:
    agent = Agent(limited=True)
    request = agent.request()
    task = await agent.enter(request)
    frame = agent.broker.posted[0]
    assert (frame.type, frame.event_id, frame.epoch, agent.news) == ("model.permit", "e1", 3, ["queued"])
    asked = agent.broker.permit
    assert (asked.model, asked.tokens, asked.asked_ms, asked.patience_ms) == ("main", 1000, 100_000, 60_000)
    agent.gates.placed(Frame("model.line", payload=to_raw(PlaceInLine(asked.id, 4, 10))))
    assert agent.places == [(4, 10)]
    agent.broker.grant(state="lesson")
    await task
    states = [KeptState("main", "lesson")]
    assert agent.gates.held() == {"permits": [HeldPermit(asked.id, "main", 0)], "gates": states}
    request.over({"x-ratelimit-remaining-requests": "5"}, accepted=True, tokens=7)
    (over,) = agent.broker.sent
    assert from_raw(over.payload, PermitOver) == PermitOver(asked.id, "main", True, 7, RateLimits(5))
    assert agent.gates.held() == {"permits": [], "gates": states}


@pytest.mark.parametrize(("others", "waited", "paused"), [(True, 3.0, 0.0), (False, 0.0, 3.0)])
async def test_only_a_request_behind_others_has_waited_for_others(others: bool, waited: float, paused: float) -> None:
    agent = Agent(limited=True)
    task = await agent.enter(agent.request())
    agent.broker.grant(state="lesson", others=others)
    await task
    attempts = ModelAttempts()
    told: list[ModelNews] = [*agent.news, "asking"]
    for news in told:
        attempts.hear(news, 10.0 if news == "queued" else 13.0)
    assert (attempts.waited_s, attempts.paused_s) == (waited, paused)


async def test_a_refused_request_asks_again_under_its_id_also_at_an_open_gate() -> None:
    agent = Agent(limited=False)
    request = agent.request()
    await request.enter(40, agent.news.append)
    request.refused(2.5)
    task = await agent.enter(request)
    assert agent.broker.permit.refused == Refused(2500)
    agent.broker.grant(open=True)
    await task
    request.over({}, accepted=True)
    assert agent.broker.sent == []


async def test_a_request_that_is_out_when_its_gate_closes_is_named() -> None:
    agent = Agent(limited=False)
    request = agent.request()
    await request.enter(40, agent.news.append)
    agent.gates.changed(Frame("model.gate", payload=to_raw(GateChanged("main", True))))
    assert [frame.type for frame in agent.broker.sent] == ["model.out"]
    request.over({}, accepted=True)
    assert [frame.type for frame in agent.broker.sent] == ["model.out", "model.over"]
    agent.gates.changed(Frame("model.gate", payload=to_raw(GateChanged("main", False))))
    assert "main" not in agent.gates.limited


async def test_an_ask_that_is_given_up_is_taken_back() -> None:
    agent = Agent(limited=True)
    task = await agent.enter(agent.request())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert agent.broker.forgotten == [agent.broker.posted[0].id]
    assert [frame.type for frame in agent.broker.sent] == ["model.over"]
    assert agent.gates.held() == {"permits": [], "gates": []}


async def test_what_the_broker_refuses_is_a_fault_or_its_own_error() -> None:
    agent = Agent(limited=True)
    task = await agent.enter(agent.request())
    agent.broker.waiting[0].set_exception(fail("E_MODEL_FAILED", "it has refused everybody"))
    with pytest.raises(Fault, match="refused everybody") as caught:
        await task
    assert caught.value.kind == "final"
    task = await agent.enter(agent.request())
    agent.broker.waiting[1].set_exception(fail("E_LEASE_LOST", "gone"))
    with pytest.raises(GoondanError, match="E_LEASE_LOST"):
        await task


async def test_little_that_is_left_is_told_through_an_open_gate() -> None:
    agent = Agent(limited=False)
    for left, told in ((50, 0), (5, 1)):
        request = agent.request()
        await request.enter(40, agent.news.append)
        request.over({"x-ratelimit-limit-requests": "100", "x-ratelimit-remaining-requests": str(left)}, accepted=True)
        assert len(agent.broker.sent) == told


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"x-ratelimit-remaining-requests": "59"}, RateLimits(59)),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1m2.5s",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6ms",
            },
            RateLimits(0, 62_500, 149_984, 6),
        ),
        (
            {
                "anthropic-ratelimit-requests-remaining": "49",
                "anthropic-ratelimit-requests-reset": "1970-01-01T00:16:42Z",
            },
            RateLimits(49, 2000),
        ),
        (
            {"x-ratelimit-remaining-tokens": "7", "x-ratelimit-reset-tokens": "1.5"},
            RateLimits(tokens_left=7, tokens_reset_ms=1500),
        ),
        ({"x-ratelimit-remaining-requests": "-4"}, None),
        ({"x-ratelimit-remaining-requests": "nan"}, None),
        ({"x-ratelimit-remaining-requests": "1e30", "x-ratelimit-reset-requests": "soon"}, RateLimits(10**9)),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "9" * 400}, RateLimits(1, 10**9)),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "99999999d"}, RateLimits(1, 10**9)),
    ],
)  # fmt: skip
def test_what_servers_say_of_their_limits(headers: dict[str, str], expected: RateLimits | None) -> None:
    assert rate_limits(headers, now=1000.0) == expected


def test_when_a_server_that_refuses_accepts_again() -> None:
    none_left = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "3s"}
    assert exhausted_wait(none_left, 0.0) == 3.0
    assert exhausted_wait({**none_left, "x-ratelimit-remaining-requests": "2"}, 0.0) is None
    assert exhausted_wait({}, 0.0) is None
    assert is_low(none_left)
    assert not is_low({})


# --- the tries of one call --------------------------------------------------------------------------------------------


class Way:
    """A gate that is told of everything."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def passes(self) -> bool:
        return False

    async def enter(self, size: int, on_news: Any) -> None:
        self.told.append(("enter", size))

    def refused(self, wait_s: float | None) -> None:
        self.told.append(("refused", wait_s))

    def over(self, headers: dict[str, str] | None, *, accepted: bool, tokens: int | None = None) -> None:
        self.told.append(("over", headers, accepted, tokens))


async def test_a_refusal_waits_at_the_gate_and_any_other_fault_by_itself() -> None:
    way, slept = Way(), []
    request: Any = type("Request", (), {"model": SPEC, "permit": way, "timeout_s": None})
    tries = Tries(request, lambda news: None, lambda: 0.0)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    for fault in (Fault("limited", "429", retry_after_s=2.0), Fault("busy", "500")):
        await tries.enter([bytes(10)])
        wait = tries.next_wait(fault, 0.0)
        assert wait is not None
        await tries.pause(fault, wait, sleep)
    await tries.enter([bytes(10)])
    await tries.enter([bytes(10)])  # sent again at once: it is out already
    tries.answered(ModelAnswer(text="x", usage=Usage(3, 4)), {"a": "b"})
    tries.close()
    assert slept == [1.0]
    assert way.told == [
        *(("enter", 10), ("refused", 2.0), ("enter", 10), ("over", None, False, None)),
        *(("enter", 10), ("over", {"a": "b"}, True, 7)),
    ]
