"""Turns that make no progress: the clock by itself, and a runner whose model is at work and says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.model_waits import StallClock, stalled
from goondan.agentproc.model.calls import ModelCalls
from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest
from goondan.agentproc.turn import parts
from goondan.agentproc.turn.run import CANCELLED
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.frames import AgentEvent
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, the_answer, until

# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_model_that_says_nothing_stalls_the_turn_and_content_begins_anew() -> None:
    clock = StallClock(600)
    assert (clock.due, clock.silent_since(1e9)) == (None, None)
    clock.begin(100)
    clock.asking(100)
    assert (clock.due, clock.silent_since(699), clock.silent_since(700)) == (700, None, 100)
    clock.content(699)
    assert (clock.due, clock.silent_since(1298), clock.silent_since(1299)) == (1299, None, 699)
    clock.end()
    assert clock.silent_since(1e9) is None


def test_waiting_for_the_next_try_does_not_count_and_a_try_does_not_begin_anew() -> None:
    clock = StallClock(600)
    clock.begin(0)
    clock.waiting(300)
    assert (clock.due, clock.silent_since(10_000)) == (None, None)
    clock.asking(10_000)
    assert (clock.due, clock.silent_since(10_299), clock.silent_since(10_300)) == (10_300, None, 0)


def test_news_of_a_model_call_that_is_over_changes_nothing() -> None:
    clock = StallClock(600)
    clock.begin(0)
    clock.end()
    clock.content(1)
    clock.asking(2)
    assert clock.due is None


def test_a_person_is_told_after_two_seconds_of_silence_and_again_every_ten() -> None:
    clock = StallClock(600)
    assert (clock.look_at, clock.notice(1e9)) == (None, None)
    clock.begin(100)
    clock.asking(100)
    assert (clock.look_at, clock.notice(101.9), clock.notice(102)) == (102, None, 2)
    assert (clock.look_at, clock.notice(111.9), clock.notice(112)) == (112, None, 12)
    clock.content(113)
    assert (clock.look_at, clock.notice(114), clock.notice(115)) == (115, None, 2)
    clock.waiting(116)  # a try has failed
    assert (clock.look_at, clock.notice(200)) == (None, None)
    clock.asking(200)
    assert (clock.look_at, clock.notice(201), clock.notice(202)) == (202, None, 89)
    assert StallClock(1).look_at is None
    short = StallClock(1)
    short.begin(0)
    assert short.look_at == 1  # the turn stalls before


@given(st.lists(st.tuples(st.sampled_from(["asking", "waiting", "content"]), st.integers(0, 50)), max_size=40))
def test_only_time_at_the_model_without_content_counts(news: list[tuple[str, int]]) -> None:
    """Against a second by second count."""
    clock = StallClock(60)
    clock.begin(0)
    now, quiet, asked = 0, 0, True
    for kind, passes in news:
        for _ in range(passes):
            now += 1
            quiet += asked
            assert (clock.silent_since(now) is not None) == (asked and quiet >= 60)
        getattr(clock, kind)(now)
        asked = kind != "waiting"
        quiet = 0 if kind == "content" else quiet


def test_the_error_says_what_was_waited_for_and_since_when() -> None:
    info = stalled("openai/m", 3, 600.4, 600, "2026-01-01T00:10:01.000Z")
    assert info.code == "E_TURN_STALLED"
    assert "step 3 waited for the model openai/m" in info.message
    assert "since 2026-01-01T00:00:00Z" in info.message
    assert "stallTimeoutS" in (info.suggestion or "")


class Clock:
    """A loop whose time a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        self._planned.append(asyncio.TimerHandle(when, call, (), asyncio.get_running_loop()))
        return self._planned[-1]

    def go_to(self, now: float) -> None:
        """Make the calls that are due until then."""
        while due := [one for one in self._planned if not one.cancelled() and one.when() <= now]:
            first = min(due, key=asyncio.TimerHandle.when)
            self._planned.remove(first)
            self.now = first.when()
            first._run()
        self.now = now


async def test_a_notice_in_one_step_makes_none_late_in_the_next(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told, model = Clock(), list[float](), FakeModel()
    monkeypatch.setattr(ModelCalls, "_tell_wait", lambda *_: told.append(clock.now))
    runner = make(FakeLink(), Droning(None))
    turn = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await until(lambda: runner._run is not None)
    calls = ModelCalls(runner._run, None, parts.TurnParts([], runner._run))  # type: ignore[arg-type]
    calls._loop = clock  # type: ignore[assignment]
    for began, ended in ((0.0, 3.0), (3.0, 10.0)):
        clock.go_to(began)
        request = ModelRequest(agent="a", model=runner.instance.spec.model, messages=[], tools=[], step=1)
        model.script.append(says("done"))
        asked = asyncio.create_task(calls._request(model, request))
        await asyncio.sleep(0)
        clock.go_to(ended)
        await asked
    assert told == [2.0, 5.0]
    runner._run.push(CANCELLED)  # type: ignore[union-attr]
    await turn


# --- a runner ---------------------------------------------------------------------------------------------------------

#: A turn of these tests stalls after this long (seconds).
LIMIT = 0.2


class Droning(FakeModel):
    """Tells `news` again and again and never answers, unless its script has something to say."""

    def __init__(self, news: ModelNews | None, *script: ModelAnswer | Exception) -> None:
        super().__init__(*script)
        self.news = news
        self.cancelled = 0

    async def complete(
        self, request: Any, on_delta: Any = None, on_news: Callable[[ModelNews], None] | None = None
    ) -> ModelAnswer:
        if self.script:
            return await super().complete(request, on_delta, on_news)
        self.requests.append(request)
        try:
            while True:
                if self.news is not None and on_news is not None:
                    on_news(self.news)
                await asyncio.sleep(LIMIT / 20)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_a_turn_that_stalls_fails_and_the_next_message_works(make: Make) -> None:
    link, model = FakeLink(), Droning("asking")
    runner = make(link, model, stall_timeout_s=LIMIT)
    async with asyncio.timeout(5):
        await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.status, answer.error and answer.error.code) == ("failed", "E_TURN_STALLED")
    await until(lambda: model.cancelled == 1)
    model.script.append(says("here"))
    await runner.run(event_frame("e2", "again", epoch=2))
    assert link.answers()[-1].response == "here"
    assert from_raw(link.posted[0].payload, AgentEvent).answer is not None


async def test_calls_before_the_stall_keep_their_results(make: Make) -> None:
    link, model = FakeLink(), Droning(None, wants(("a", "notes__add", {"n": 1})))
    async with asyncio.timeout(5):
        await make(link, model, stall_timeout_s=LIMIT).run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None
    assert (error.code, "step 2" in error.message) == ("E_TURN_STALLED", True)
    assert len(link.acked()) == 1


async def test_content_a_wait_between_tries_and_tools_at_work_are_no_stall(make: Make) -> None:
    """The turn lasts several times its limit each time; it ends when it is told to."""
    for news in ("content", "waiting"):
        link = FakeLink()
        runner = make(link, Droning(news), name=news, stall_timeout_s=LIMIT)
        task = asyncio.create_task(runner.run(event_frame("e1", "go")))
        await asyncio.wait([task], timeout=4 * LIMIT)
        assert not task.done(), news
        runner._run.push(CANCELLED)  # type: ignore[union-attr]
        await task
        assert the_answer(link).finish_reason == "cancelled"
    link = FakeLink(lambda *_: None)
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")), stall_timeout_s=LIMIT)
    task = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await asyncio.wait([task], timeout=4 * LIMIT)
    link.finish(link.open_calls()[0], ok(1))
    await task
    assert the_answer(link).response == "done"
