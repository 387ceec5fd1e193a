"""What a turn tells its asker: in order, in batches, without secrets, and never at the turn's cost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from goondan.agentproc.http.provider import Listener
from goondan.agentproc.machine.turn import AskModel, End
from goondan.agentproc.model.calls import VoidBefore
from goondan.agentproc.providers.base import ModelAnswer, TextDelta
from goondan.agentproc.providers.openai import Reader
from goondan.agentproc.turn import live as live_module
from goondan.agentproc.turn.live import BATCH_S, MAX_BATCH, MAX_PIECE, MAX_RUNS, MAX_WAITING, LiveFeed
from goondan.schemas.wire.codec import MAX_FRAME_BYTES, encode, from_raw, to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR, Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, until


class Timer:
    def __init__(self, at: float, callback: Any) -> None:
        self.at, self.callback, self.cancelled = at, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The part of a loop that a feed uses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any) -> Timer:
        self.timers.append(Timer(self.now + delay, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= end and not timer.cancelled]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = first.at
            first.callback()
        self.now = end


class Heard:
    """A link, and what was said over it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.up = True

    def send(self, frame: Frame) -> bool:
        encode(frame)
        if self.up:
            self.frames.append(frame)
        return self.up

    @property
    def events(self) -> list[RuntimeEvent]:
        return [from_raw(frame.payload, RuntimeEvent) for frame in self.frames]

    @property
    def texts(self) -> list[str | None]:
        return [event.text for event in self.events if event.kind == "text"]


def feed(live: bool = True, *, again: bool = False) -> tuple[LiveFeed, Heard, Clock]:
    heard, clock = Heard(), Clock()
    frame = Frame("event", event_id="e1", epoch=7, live=live)
    return LiveFeed(heard, clock, frame, "t1", again=again), heard, clock  # type: ignore[arg-type]


def started(again: bool = False) -> tuple[LiveFeed, Heard, Clock, Any]:
    made, heard, clock = feed(again=again)
    made.tell([AskModel(1)])
    return made, heard, clock, made


def read(events: list[RuntimeEvent], kind: str = "text") -> str | None:
    """What a careful listener has of the last step; None when something is missing."""
    text: str | None = ""
    for event in events:
        if event.kind == "step.started" or event.again:
            text = ""
        if event.kind == kind:
            text = text + (event.text or "") if text is not None and event.at == len(text) else None
    return text


def test_nobody_listens_nothing_is_said() -> None:
    made, heard, clock = feed(live=False)
    made.tell([AskModel(1)])
    made.progress(Frame("tool.progress", call_id="t/c", payload=to_raw({"done": 1.0})))
    assert made.wanted == 0
    made.close()
    assert (heard.frames, clock.timers) == ([], [])


def test_the_first_piece_leaves_at_once_and_what_follows_soon_leaves_together() -> None:
    _, heard, clock, delta = started()
    for text in ("one ", "two ", "three "):
        delta(TextDelta(text))
    assert heard.texts == ["one "]
    clock.advance(BATCH_S)
    assert heard.texts == ["one ", "two three "]
    clock.advance(1)
    delta(TextDelta("four"))
    assert heard.texts[-1] == "four"
    assert [event.at for event in heard.events if event.kind == "text"] == [0, 4, 14]
    assert all((frame.event_id, frame.epoch, frame.type) == ("e1", 7, "runtime.event") for frame in heard.frames)


def test_fifty_thousand_tokens_are_some_hundred_frames() -> None:
    made, heard, clock, delta = started()
    for _ in range(50_000):
        delta(TextDelta("token "))
        clock.advance(0.0001)
    made.tell([End(status="completed", steps=1)])
    assert len(heard.frames) < 200
    assert read(heard.events) == "token " * 50_000


def test_text_is_out_before_what_follows_it() -> None:
    made, heard, _, delta = started()
    delta(TextDelta("a"))
    delta(TextDelta("b"))
    made.tell([AskModel(2)])
    assert [event.kind for event in heard.events] == ["turn.started", "step.started", "text", "text", "step.started"]


def test_again_voids_what_was_and_what_waits() -> None:
    made, heard, clock, delta = started()
    delta(TextDelta("half of"))
    delta(TextDelta(" it"))
    delta(TextDelta("whole", again=True))
    delta(TextDelta("!"))
    clock.advance(1)
    assert [(e.text, e.at, e.again) for e in heard.events if e.kind == "text"] == [
        ("half of", 0, False),
        ("whole!", 0, True),
    ]
    made.close()


def test_a_turn_that_was_begun_before_says_so() -> None:
    _, heard, _, _ = started(again=True)
    assert (heard.events[0].kind, heard.events[0].again) == ("turn.started", True)


def test_a_flood_is_paced_and_then_not_told_any_further() -> None:
    made, heard, clock, delta = started()
    delta(TextDelta("x" * (MAX_WAITING - 1)))
    assert len(heard.texts) == MAX_BATCH
    clock.advance(BATCH_S)
    assert len(heard.texts) == 2 * MAX_BATCH
    delta(TextDelta("y" * MAX_WAITING))
    delta(TextDelta("z"))
    clock.advance(1)
    assert len(heard.texts) == 2 * MAX_BATCH
    assert max(len(bytes(frame.payload)) for frame in heard.frames) <= 16 << 10
    made.tell([AskModel(2)])
    delta(TextDelta("fine"))
    assert read(heard.events) == "fine"


def test_a_piece_of_the_widest_characters_fits_what_the_broker_takes() -> None:
    made, heard, _, delta = started()
    delta(TextDelta("\U0001f600" * MAX_PIECE * 2))
    assert max(len(bytes(frame.payload)) for frame in heard.frames) <= 16 << 10
    made.close()


def test_halves_of_surrogates_and_a_link_that_is_down_do_no_harm() -> None:
    made, heard, _, delta = started()
    heard.up = False
    delta(TextDelta("lost"))
    heard.up = True
    delta(TextDelta("\ud83d"))
    made.tell([AskModel(2)])
    assert heard.texts == ["�"]
    assert read(heard.events[:-1]) is None, "a loss is noticed"


def test_who_takes_turns_without_end_is_not_told_any_further() -> None:
    made, heard, clock, delta = started()
    for number in range(10_000):
        delta(TextDelta("x", reasoning=number % 2 == 0))
    clock.advance(1)
    made.tell([AskModel(2)])
    assert len(heard.frames) < MAX_RUNS + 10
    delta(TextDelta("fine"))
    assert read(heard.events) == "fine"


@given(st.lists(st.tuples(st.text(max_size=20), st.booleans(), st.booleans(), st.floats(0, 0.1)), max_size=40))
def test_who_hears_everything_has_the_whole_text(pieces: list[tuple[str, bool, bool, float]]) -> None:
    made, heard, clock, delta = started()
    whole = {"text": "", "reasoning": ""}
    for text, again, reasoning, pause in pieces:
        if not text:
            continue
        if again:
            whole = {"text": "", "reasoning": ""}
        whole["reasoning" if reasoning else "text"] += text
        delta(TextDelta(text, again, reasoning))
        clock.advance(pause)
    made.tell([End(status="completed", steps=1)])
    assert {kind: read(heard.events, kind) for kind in whole} == whole
    assert not [timer for timer in clock.timers if not timer.cancelled]


# --- in a turn


def told(link: FakeLink) -> list[RuntimeEvent]:
    return [from_raw(frame.payload, RuntimeEvent) for frame in link.sent if frame.type == "runtime.event"]


class Streaming(FakeModel):
    """Says each text in pieces first; a piece that begins with `!` comes as a repeated try."""

    async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
        answer = await super().complete(request, on_delta)
        assert on_delta is not None
        for word in answer.text.split("|"):
            on_delta(TextDelta(word.removeprefix("!"), word.startswith("!")))
        return ModelAnswer(text=answer.text.rpartition("!")[2].replace("|", ""), calls=answer.calls)


async def test_an_operator_gets_a_short_line_of_each_calls_arguments(make: Make) -> None:
    link = FakeLink()
    model = Streaming(wants(("a", "bash__exec", {"command": "echo hi"})), says("done"))
    runner = make(link, model)
    frame = event_frame("e1", "go", live=True)
    frame.source = OPERATOR
    await runner.run(frame)
    assert [e.arguments for e in told(link) if e.kind == "tool.called"] == ['command="echo hi"']


async def test_a_turn_tells_steps_tools_and_text_but_no_arguments(make: Make) -> None:
    def handler(tool: str, args: Any) -> Any:
        return fail("E_TOOL_TIMEOUT", "too late") if tool == "notes__add" else FakeLink().handler(tool, args)

    link = FakeLink(handler)
    model = Streaming(
        wants(("a", "bash__exec", {"command": "echo SECRET"}), ("b", "notes__add", {}), ("c", "no__tool", {})),
        says("half|!the |whole"),
    )
    runner = make(link, model)
    await runner.run(event_frame("e1", "go", live=True))
    events = told(link)
    assert [(e.kind, e.step, e.tool_call_id) for e in events if e.kind != "text"] == [
        ("turn.started", 0, None),
        ("step.started", 1, None),
        *(("tool.called", 1, call) for call in "abc"),
        *((e.kind, 1, e.tool_call_id) for e in events if e.kind in ("tool.completed", "tool.failed")),
        ("step.completed", 1, None),
        ("step.started", 2, None),
        ("step.completed", 2, None),
        ("turn.completed", 0, None),
    ]
    ends = {e.tool_call_id: (e.kind, e.code) for e in events if e.kind in ("tool.completed", "tool.failed")}
    assert ends["a"] == ("tool.completed", None)
    assert ends["b"] == ("tool.failed", "E_TOOL_TIMEOUT")
    assert ends["c"] == ("tool.failed", "E_TOOL_NOT_IN_CATALOG")
    assert read(events) == "the whole" == link.answers()[0].response
    assert not any(b"SECRET" in bytes(frame.payload) for frame in link.sent)


async def test_progress_of_a_call_is_passed_on(make: Make) -> None:
    link = FakeLink(lambda tool, args: None)
    runner = make(link, FakeModel(wants(("a", "bash__exec", {"command": "x"})), says("done")))
    turn = asyncio.ensure_future(runner.run(event_frame("e1", "go", live=True)))
    await until(link.open_calls)
    (call_id,) = link.open_calls()
    payload = to_raw({"done": 1.0, "total": 4.0, "message": "m" * 5000})
    runner.progress(Frame("tool.progress", call_id=call_id, payload=payload))
    (progress,) = [event for event in told(link) if event.kind == "tool.progress"]
    assert (progress.tool_call_id, progress.done, progress.total) == ("a", 1.0, 4.0)
    assert progress.message == "m" * live_module.MAX_MESSAGE
    link.finish(call_id, FakeLink().handler("t", {}))  # type: ignore[arg-type]
    await turn
    runner.progress(Frame("tool.progress", call_id=call_id, payload=payload))


@pytest.mark.parametrize("wish", [False, True])
async def test_a_link_that_takes_nothing_costs_the_turn_nothing(make: Make, wish: bool) -> None:
    link = FakeLink()
    link.connected = False
    model = FakeModel(wants(("a", "bash__exec", {"command": "x"})), says("done"))
    runner = make(link, model)
    await runner.run(event_frame("e1", "go", live=wish))
    assert link.answers()[0].response == "done"
    assert max(len(bytes(frame.payload)) for frame in link.posted) < MAX_FRAME_BYTES


# --- who comes in mid-turn


def test_who_begins_to_listen_hears_that_the_turn_and_its_step_run_and_positions_from_their_beginning() -> None:
    made, heard, clock = feed(live=False)
    made.tell([AskModel(1)])
    made(TextDelta("lost"))
    made.listen(True, 3)
    made.listen(True, 3)
    assert [(event.kind, event.step) for event in heard.events] == [("turn.started", 0), ("step.started", 3)]
    made(TextDelta("from the beginning "))
    made.tell([AskModel(4)])
    assert read(heard.events[:3]) == "from the beginning "
    made(TextDelta("x"))
    clock.advance(1)
    made.listen(False, 4)
    before = len(heard.frames)
    made(TextDelta("nobody"))
    made.tell([AskModel(5)])
    clock.advance(1)
    assert (len(heard.frames), clock.timers) == (before, [])
    first = made.wanted
    made.listen(True, 5)
    assert first == 0 and made.wanted == 2
    made(TextDelta("again"))
    assert read(heard.events[before:]) == "again"


def test_a_turn_that_is_over_listens_to_nobody() -> None:
    made, heard, _ = feed(live=False)
    made.close()
    made.listen(True, 1)
    assert (made.wanted, heard.frames) == (0, [])


@given(st.lists(st.one_of(st.text(max_size=4), st.sampled_from(["on", "off", "think"])), max_size=30))
def test_a_provider_tells_all_text_to_whoever_begins_to_listen(steps: list[str]) -> None:
    made, heard, clock = feed(live=False)
    reader, told = Reader("m"), Listener(made, lambda _: None, False)
    said = thought = ""
    begun = 0
    for step in steps:
        if step in ("on", "off"):
            begun = len(heard.frames) if step == "on" and not made.wanted else begun
            made.listen(step == "on", 1)
            continue
        name, word = ("reasoning_content", "hm") if step == "think" else ("content", step)
        said, thought = (said, thought + word) if step == "think" else (said + word, thought)
        event = (b"", json.dumps({"choices": [{"delta": {name: word}}]}).encode())
        told.piece(reader, reader.read([event]))
        clock.advance(1)
        if made.wanted:
            events = heard.events[begun:]
            assert (read(events), read(events, "reasoning")) == (said, thought)


def kinds(link: FakeLink) -> list[str]:
    return [event.kind for event in told(link)]


async def test_a_turn_that_runs_begins_to_tell_and_ends_with_all_its_ends(make: Make) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    class Slow(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
            asked.set()
            await go.wait()
            assert on_delta.wanted
            on_delta(TextDelta("done"))
            return await super().complete(request, on_delta)

    link = FakeLink()
    runner = make(link, Slow(says("done")))
    working = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await asked.wait()
    runner.take(Frame("listen", event_id="e1", epoch=9, live=True))
    assert kinds(link) == []
    runner.take(Frame("listen", event_id="e1", epoch=1, live=True))
    assert kinds(link) == ["turn.started", "step.started"]
    go.set()
    await working
    assert kinds(link) == ["turn.started", "step.started", "text", "step.completed", "turn.completed"]


async def test_what_was_said_of_an_earlier_delivery_does_not_count(make: Make) -> None:
    """An event that was parked comes again in the same epoch. Meanwhile an observer has gone, and another has come."""
    link = FakeLink()
    runner = make(link, FakeModel(says("done")))
    runner.take(Frame("listen", event_id="e1", epoch=1, live=False))
    await runner.run(structs.replace(event_frame("e1", "go"), live=True))
    assert kinds(link)[:2] == ["turn.started", "step.started"]


async def test_a_turn_is_told_before_it_begins_that_somebody_listens(make: Make) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("done")))
    working = runner.run(event_frame("e1", "go"))
    runner.take(Frame("listen", event_id="e1", epoch=1, live=True))
    await working
    assert kinds(link)[:2] == ["turn.started", "step.started"]


def test_a_second_request_of_a_step_makes_what_the_first_has_said_void() -> None:
    class Show:
        wanted = 0

        def __init__(self) -> None:
            self.told: list[TextDelta] = []

        def __call__(self, delta: TextDelta) -> None:
            self.told.append(delta)

    show = Show()
    second = VoidBefore(show)
    assert second.wanted == 0
    Show.wanted = 2
    assert second.wanted == 2
    for text in ("one", "two"):
        second(TextDelta(text))
    assert show.told == [TextDelta("one", again=True), TextDelta("two")]
