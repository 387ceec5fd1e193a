"""How the exporter gets spans to a collector that may refuse, be slow or be gone; the clock is the test's."""

from __future__ import annotations

import itertools
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from goondan.features.telemetry.process.collector import Collector, Sent
from goondan.features.telemetry.process.exporter import MAX_BYTES, MAX_SPANS, Exporter, Left, Shell
from goondan.features.telemetry.status import line
from goondan.features.telemetry.wire import Exporting
from goondan.kernel.traces.follow import MAX_AGE_S, Follower
from goondan.schemas.traces.turn_notes import CallDetail, FailureDetail, ModelDetail, ResultDetail, encode_detail
from goondan.schemas.wire.frames import ErrorPayload
from goondan.schemas.wire.spans import call_span, step_span, turn_span
from tests.features.telemetry.turns import ASKER, BEGAN, Turns, at, ids, simple


class Refuses:
    """A collector that takes spans, or says what comes next."""

    def __init__(self) -> None:
        self.batches: list[list[ReadableSpan]] = []
        self.says: list[Sent] = []
        self.otherwise = Sent("taken")
        self.most = 10**9

    @property
    def spans(self) -> list[str]:
        """The ids of the spans that it has taken."""
        return [id_of(span) for batch in self.batches for span in batch]

    def deliver(self, batch: list[ReadableSpan]) -> Sent:
        if len(batch) > self.most:
            return Sent("smaller", why="it answered 413")
        said = self.says.pop(0) if self.says else self.otherwise
        if said.outcome == "taken":
            self.batches.append(list(batch))
        return said


LATER = Sent("later", why="it answered 503")


class Rig:
    """A workspace, an exporter of it, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = BEGAN.timestamp() + 1
        self.until = 0.0
        self.planned: list[tuple[float, Callable[[], object]]] = []
        self.collector = Refuses()
        self.turns = Turns(folder)
        self.said = Exporting("")
        self.again()

    def again(self) -> None:
        """Another exporter, after this one was killed."""
        self.follower = Follower(str(self.folder), f"{self.folder}/telemetry/position.json", at(0))
        shell = Shell(self._rest, self._tell, clock=lambda: self.now)
        self.exporter = Exporter(self.follower, cast(Collector, self.collector), Resource({}), shell)

    def _tell(self, said: Exporting) -> None:
        self.said = said

    def _rest(self, seconds: float) -> None:
        until = self.now + seconds
        while self.planned and self.planned[0][0] <= min(until, self.until):
            self.now, does = self.planned.pop(0)
            does()
        self.now = max(self.now, min(until, self.until))
        if until > self.until:
            raise Left

    def run(self, seconds: float = 0.5, *planned: tuple[float, Callable[[], object]]) -> None:
        """Let it work for so long. What is planned happens meanwhile, each at its time from now (seconds)."""
        self.until = self.now + seconds
        self.planned = [(self.now + when, does) for when, does in planned]
        try:
            while True:
                self._rest(0.0 if self.exporter.round() else 1.0)
        except Left:
            assert self.planned == []


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.turns.close()


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def test_a_turn_is_sent_when_it_is_over_and_once(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1", parent=ASKER)
    rig.turns.note(turn_id, simple(turn_id))
    rig.run(30, (20, lambda: rig.turns.end("e1", 100)))
    rig.again()
    rig.run(100)
    assert rig.collector.spans == ids(turn_id)
    assert rig.follower.position.turns == []


def test_what_was_sent_and_not_written_down_is_sent_again_as_the_same_span(rig: Rig) -> None:
    rig.turns.simple("e1")
    rig.follower.settle = lambda done: None  # type: ignore[method-assign]
    rig.run()
    rig.again()
    rig.run()
    once, again = rig.collector.batches
    assert [span.to_json() for span in once] == [span.to_json() for span in again]


def test_a_new_position_begins_with_the_kernel_and_goes_on_behind_an_index_that_was_made_anew(rig: Rig) -> None:
    rig.turns.simple("early", -5000)
    rig.turns.simple("e1")
    rig.run()
    assert turn_span("t-early") not in rig.collector.spans
    rig.turns.index.close()
    shutil.rmtree(rig.folder / "traces")
    rig.run(5, (4, lambda: rig.turns.simple("e2", 500)))
    assert rig.collector.spans == [*ids("t-e1"), *ids("t-e2")]
    rig.turns.index.close()
    for name in ("telemetry", "traces", "instances"):
        shutil.rmtree(rig.folder / name)
    rig.run(100)
    assert len(rig.collector.spans) == 8
    assert rig.said.text == "exporting"


def test_while_the_collector_is_gone_nothing_is_read_and_old_spans_are_given_up(rig: Rig) -> None:
    rig.turns.simple("e1")
    rig.collector.otherwise = LATER
    reads: list[float] = []
    read = rig.follower.read
    rig.follower.read = lambda row, now: (reads.append(now), read(row, now))[1]  # type: ignore[method-assign, func-returns-value]

    def looks() -> None:
        assert rig.said.text == f"waiting for the collector since {at(1000)[:19]}Z: it answered 503"
        assert len(reads) == 1

    def comes_back() -> None:
        rig.collector.otherwise = Sent("taken")
        rig.turns.simple("new", round((rig.now - BEGAN.timestamp()) * 1000))

    def meanwhile() -> None:
        for number in range(50):
            rig.turns.simple(f"f{number}", 1000 + number)

    rig.run(MAX_AGE_S + 200, (10, meanwhile), (3600, looks), (MAX_AGE_S + 100, comes_back))
    assert rig.collector.spans == ids("t-new")
    assert (rig.said.text, rig.said.dropped, rig.said.dropped_turns, rig.said.sent) == ("exporting", 4, 50, 4)
    rig.again()
    rig.run()
    assert rig.said.dropped_turns == 50
    row = {"text": "exporting", "sent": 0, "dropped": 0, "droppedTurns": 50}
    assert line(row) == "telemetry: exporting, 0 spans sent, 0 spans and 50 turns dropped"


def test_pauses_grow_and_retry_after_is_kept(rig: Rig) -> None:
    asked: list[float] = []
    deliver = rig.collector.deliver
    rig.collector.deliver = lambda batch: (asked.append(rig.now), deliver(batch))[1]  # type: ignore[method-assign, func-returns-value]
    rig.turns.simple("e1")
    rig.collector.says = [LATER] * 20 + [Sent("later", 300.0)]
    rig.run(2000)
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert 0.8 <= pauses[0] <= 1.2
    assert min(pauses[7:]) >= 48
    assert max(pauses[:-1]) <= 72
    assert pauses[-1] == 300
    assert len(rig.collector.spans) == 4


def test_what_is_refused_for_good_is_counted_and_what_is_too_large_is_halved(rig: Rig) -> None:
    rig.turns.simple("bad")
    rig.collector.says = [Sent("bad", why="it answered 400")]
    rig.run()
    assert (rig.said.dropped, rig.said.sent) == (4, 0)
    for number in range(3):
        rig.turns.simple(f"e{number}", number)
    rig.collector.most = 5
    rig.run(2)
    assert len(rig.collector.spans) == 12
    assert max(map(len, rig.collector.batches)) <= 5
    rig.collector.most = 0
    rig.turns.simple("large", 900)
    rig.run(2)
    assert rig.said.dropped == 8


def send_large_trace(rig: Rig, spans: int) -> None:
    """Send a trace of so many spans, in ten turns: in bounded batches, with flat memory."""
    sizes: list[int] = []
    seen = 0
    peaks: list[int] = []

    def deliver(batch: list[ReadableSpan]) -> Sent:
        nonlocal seen
        sizes.append(len(batch))
        texts = [value for span in batch for value in (span.attributes or {}).values() if isinstance(value, str)]
        assert sum(map(len, texts)) <= MAX_BYTES
        seen += len(batch)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return Sent("taken")

    rig.collector.deliver = deliver  # type: ignore[method-assign]
    for turn in range(10):
        turn_id = rig.turns.begin(f"e{turn}")
        notes: list[tuple[str, int, str | None, str | None]] = [("step.started", 1, "1", turn_span(turn_id))]
        for number in range(spans // 10 - 3):
            called = encode_detail(CallDetail(f"c{number}", "x" * 300, args="y" * 400))
            notes.append(("tool.called", 2, called, step_span(turn_id, 1)))
            notes.append(("tool.completed", 3, encode_detail(ResultDetail(f"c{number}", "ok")), None))
        rig.turns.note(turn_id, notes)
        rig.turns.end(f"e{turn}", 100)
        rig.run(1)
    assert seen == spans
    assert max(sizes) <= MAX_SPANS
    assert peaks[-1] - peaks[len(peaks) // 5] < 4 << 10  # KiB, since the second turn


def test_a_turn_that_cannot_be_read_is_given_up_and_the_others_are_sent(rig: Rig) -> None:
    rig.turns.begin("never", stored=False)
    other = Turns(rig.folder, "other")
    other.simple("o1")
    other.close()
    for path in (rig.folder / "instances").glob("other*/*/conversation.db"):
        path.write_bytes(b"no database" * 1000)
    rig.turns.simple("e1")
    third = Turns(rig.folder, "third")
    broken = third.begin("b1")
    with third.store.write():
        bad = "INSERT INTO runtime_events (turn_id, type, at) VALUES (?, CAST(x'ff00' AS TEXT), 'x')"
        third.store.execute(bad, (broken,))
    third.end("b1", 200)
    third.close()
    rig.run(20)
    assert rig.collector.spans == ids("t-e1")
    assert len(rig.follower.position.turns) == 3
    rig.run(700)
    assert rig.said.dropped_turns == 2
    assert rig.follower.position.turns == []


def test_what_files_say_is_not_believed(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1", parent="no span")
    step = step_span(turn_id, 1)
    rig.turns.note(
        turn_id,
        [
            ("turn.started", 0, '{"traceId": 7}', "x"),
            ("step.started", 50, "none", "x"),
            (
                "model.answered",
                40,
                '{"step": 1, "model": "", "inputTokens": 99999999999999999999, "money": 1' + "0" * 400 + "}",
                step,
            ),
            ("tool.called", 60, encode_detail(CallDetail("c\x1b[2J", "t\u202e\x1b]0;x\x07" + "n" * 9000)), step),
            ("tool.completed", 61, "not JSON", step),
            ("later.kind", 61, "\x00", step),
            ("step.completed", 240_000_000_000_000, "1", step),
        ],
    )
    rig.turns.end("e1", 20, "abandoned")
    rig.run()
    spans = [span for batch in rig.collector.batches for span in batch]
    turn = spans[-1]
    assert (turn.parent, list(turn.links), turn.status.description) == (None, [], "abandoned")
    assert len(spans) == 4
    for span in spans:
        assert cast(int, span.start_time) <= cast(int, span.end_time)
        for value in (span.name, *(span.attributes or {}).values()):
            assert not isinstance(value, str) or (value.isprintable() and len(value) < 2100)
            assert not isinstance(value, int) or abs(value) < 1 << 63
        encode_spans([span])


def test_a_turn_that_failed_has_its_error(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1")
    failure = encode_detail(FailureDetail(ErrorPayload("E_MODEL_REFUSED", "it said no")))
    ended = encode_detail(ModelDetail(step=1, model="p/n", code="E_MODEL_REFUSED"))
    step = step_span(turn_id, 1)
    rig.turns.note(turn_id, [("step.started", 1, "1", turn_span(turn_id)), ("model.failed", 9, ended, step)])
    rig.turns.note(turn_id, [("step.failed", 20, failure, None), ("turn.failed", 30, failure, None)])
    rig.turns.end("e1", 30, "failed")
    rig.run()
    found: dict[str, Any] = {span.name: span for span in rig.collector.batches[0]}
    assert found["step 1"].status.description == "it said no"
    assert found["chat n"].attributes["error.type"] == "E_MODEL_REFUSED"
    assert "gen_ai.response.model" not in found["chat n"].attributes
    assert found["invoke_agent main"].attributes["goondan.turn.status"] == "failed"
    assert call_span("t-e1/c1") not in rig.collector.spans
