"""Streams: whatever is lost, repeated or broken off, a reader has in the end exactly what is stored."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.traces.rules.progress import END, Call, News, Position, Progress, Reader, Stored, position_of
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: A step: texts that were begun and are void, the text that is stored, the calls (id, how each ends).
Plan = tuple[list[str], str, list[tuple[str, str]]]

TEXT = st.text(st.sampled_from("ab한🙂\n "), max_size=12)
CALLS = st.lists(st.sampled_from(["completed", "failed"]), max_size=3)
SEEDS = st.integers(0, 2**32)
STEPS = st.lists(st.tuples(st.lists(TEXT, max_size=2), TEXT, CALLS), min_size=1, max_size=4)


def plan_of(steps: list[tuple[list[str], str, list[str]]]) -> list[Plan]:
    """Steps that call tools, and one at the end that calls none."""
    last = len(steps) - 1
    return [
        (void, text, [] if at == last else [(f"c{at}.{n}", end) for n, end in enumerate(ends or ["completed"])])
        for at, (void, text, ends) in enumerate(steps)
    ]


def event(kind: Any, step: int = 0, **more: Any) -> RuntimeEvent:
    return RuntimeEvent(kind=kind, step=step, **more)


class Kernel:
    """A turn as it happens: each move is a live event, or a change of what is stored."""

    def __init__(self, plan: list[Plan], rng: random.Random) -> None:
        self.steps: dict[int, tuple[str, list[Call]]] = {}
        self.answer: str | None = None
        self.moves = list(self._moves(plan, rng))

    def stored(self) -> Stored | None:
        steps = {
            n: (text, [msgspec.structs.replace(call) for call in calls]) for n, (text, calls) in self.steps.items()
        }
        return Stored(steps, self.answer) if self.steps or self.answer else None

    def _moves(self, plan: list[Plan], rng: random.Random) -> Any:
        yield event("turn.started")
        for number, (void, text, calls) in enumerate(plan, 1):
            yield event("step.started", number)
            yield event("model.waits", number)
            for again, said in enumerate([*void, text]):
                if again and rng.random() < 0.5:  # the process died: the step begins anew
                    yield event("turn.started", again=True)
                    yield event("step.started", number)
                yield from self._said(number, said, rng, again=bool(again))
            made = [Call(name, "tool", None) for name, _ in calls]
            yield lambda n=number, t=text, m=made: self.steps.__setitem__(n, (t, m))
            for name, _ in calls:
                yield event("tool.called", number, tool_call_id=name)
            for call, (name, end) in rng.sample(list(zip(made, calls, strict=True)), len(calls)):
                yield lambda c=call, e=end: setattr(c, "end", e)
                yield event(f"tool.{end}", number, tool_call_id=name)
            yield event("step.completed", number)
        yield lambda: setattr(self, "answer", "the answer")
        yield event("turn.completed")

    def _said(self, number: int, text: str, rng: random.Random, *, again: bool) -> Any:
        at = 0
        while at < len(text):
            size = rng.randint(1, 5)
            yield event("text", number, text=text[at : at + size], at=at, again=again)
            at, again = at + size, False


class Client:
    """What a client makes of its stream."""

    def __init__(self) -> None:
        self.position: str | None = None
        self.texts: dict[int, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.order: list[int] = []
        self.answers = 0

    def take(self, news: News) -> None:
        if news.position is None:
            return
        self.position = news.position
        if news.kind == "answer":
            self.answers += 1
        elif news.kind == "step.started":
            self.order.append(news.data["step"])
        elif news.kind == "text":
            assert len(self.texts.get(news.data["step"], "")) == news.data["at"]
            self.texts[news.data["step"]] = self.texts.get(news.data["step"], "") + news.data["text"]
        elif news.kind == "text.again":
            self.texts[news.data["step"]] = ""
        else:
            assert news.kind.startswith("tool."), news
            self.calls.append((news.data["toolCallId"], news.kind.removeprefix("tool.")))


def play(plan: list[Plan], rng: random.Random, *, lost: float, doubled: float, broken: float, killed: float) -> Client:
    """The turn, told to a client whose connection breaks and whose door is killed."""
    kernel, client = Kernel(plan, rng), Client()
    progress, reader = Progress(), Reader(Position())
    snapshot: Stored | None = None
    reading = False

    def read(limit: int) -> None:
        for news in islice(progress.read(reader), limit):
            client.take(news)

    def serve(*, to_the_end: bool = False) -> None:
        nonlocal progress, reader, reading, snapshot
        if rng.random() < killed:
            progress, reading = Progress(), False
            reader = Reader(position_of(client.position or "0.0.00000000.") or Position())
            if kernel.answer is not None:
                progress.end(kernel.answer, plan[-1][1], len(plan))
        if rng.random() < broken:
            reader = Reader(position_of(client.position or "0.0.00000000.") or Position())
        if client.answers:
            return
        read(1000 if to_the_end else rng.randint(0, 4))
        if reading and (to_the_end or rng.random() < 0.5):
            reading = False
            progress.fill(None if kernel.answer is None and rng.random() < lost / 4 else snapshot)
        if progress.wants_file and not reading:
            reading, snapshot = True, kernel.stored()
            progress.begin_file()

    for move in kernel.moves:
        if not isinstance(move, RuntimeEvent):
            move()
        elif rng.random() >= lost:
            for _ in range(1 + (rng.random() < doubled)):
                progress.hear(move)
        if isinstance(move, RuntimeEvent) and move.kind == "turn.completed":
            progress.end(kernel.answer, plan[-1][1], len(plan))
        serve()
    for _ in range(40):
        serve(to_the_end=True)
    return client


def check(client: Client, plan: list[Plan]) -> None:
    assert client.answers == 1
    assert client.order == list(range(1, len(plan) + 1))
    assert {n: client.texts.get(n, "") for n in client.order} == {n: text for n, (_, text, _) in enumerate(plan, 1)}
    assert sorted(client.calls) == sorted(
        pair for _, _, calls in plan for name, end in calls for pair in ((name, "called"), (name, end))
    )


@given(STEPS, SEEDS)
def test_nothing_is_missing_and_nothing_comes_twice(steps: Any, seed: int) -> None:
    plan = plan_of(steps)
    check(play(plan, random.Random(seed), lost=0.3, doubled=0.2, broken=0.3, killed=0.1), plan)


@given(STEPS, SEEDS)
def test_text_comes_while_it_is_made_when_nothing_is_lost(steps: Any, seed: int) -> None:
    plan = plan_of([([], text, ends) for _, text, ends in steps])
    check(play(plan, random.Random(seed), lost=0, doubled=0, broken=0.5, killed=0), plan)
    progress, reader, heard = Progress(), Reader(Position()), ""
    progress.hear(event("turn.started"))
    progress.hear(event("step.started", 1))
    for piece in plan[0][1]:
        progress.hear(event("text", 1, text=piece, at=len(heard)))
        heard += piece
        assert "".join(news.data["text"] for news in progress.read(reader) if news.kind == "text") == piece
    assert not progress.wants_file


def test_a_turn_of_one_step_that_was_heard_whole_needs_no_file() -> None:
    progress, reader = Progress(), Reader(Position())
    for one in (
        event("turn.started"),
        event("step.started", 1),
        event("text", 1, text="hello"),
        event("step.completed", 1),
    ):
        progress.hear(one)
    progress.wants_file = False  # the answer is there before anybody has looked
    progress.end("answer", "hello", 1)
    assert not progress.wants_file
    assert [news.kind for news in progress.read(reader)] == ["step.started", "text", "answer"]


def test_a_step_that_is_made_again_with_the_same_text_goes_on() -> None:
    progress, reader = Progress(), Reader(Position())
    progress.hear(event("turn.started"))
    progress.hear(event("text", 1, text="hello w"))
    assert [news.kind for news in progress.read(reader)] == ["step.started", "text"]
    progress.hear(event("step.started", 1))
    progress.hear(event("text", 1, text="hello"))
    assert list(progress.read(reader)) == []
    progress.hear(event("text", 1, text=" world", at=5))
    assert [news.data["text"] for news in progress.read(reader)] == ["orld"]


def test_a_step_that_nobody_has_whole_is_told_to_be_lost() -> None:
    progress, reader = Progress(), Reader(Position())
    progress.hear(event("turn.started"))
    progress.hear(event("text", 1, text="lost", at=3))
    progress.hear(event("step.failed", 1))
    progress.end("failed", None, 1)
    progress.begin_file()
    progress.fill(None)
    assert [news.kind for news in progress.read(reader)] == ["step.started", "gap", "answer"]


@given(st.integers(0, 999999), st.integers(0, 999999999), st.integers(0, 2**32 - 1), st.text("-cd", max_size=9))
def test_a_position_is_read_as_it_is_written(step: int, chars: int, checksum: int, calls: str) -> None:
    position = Position(step, chars, checksum, calls)
    assert position_of(str(position)) == position


@pytest.mark.parametrize(
    "text", ["", "1", "1.2", "1.2.3.", "-1.0.00000000.", "1.0.00000000.x", "1.0.0000000g.", "e" * 9000]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no position"):
        position_of(text)


def test_the_end_is_a_position() -> None:
    assert position_of(END) is None
