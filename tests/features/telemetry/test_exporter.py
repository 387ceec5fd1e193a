"""Spans of turns, and how the exporter gets them to a collector that may refuse, be slow or be gone."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from goondan.features.telemetry.process import conventions, exporter, position
from goondan.features.telemetry.process.exporter import MAX_AGE_S, MAX_BYTES, MAX_SPANS, Exporter
from goondan.features.telemetry.process.rules import Span
from goondan.schemas.text.times import rfc3339
from goondan.schemas.traces.turn_notes import CallDetail, FailureDetail, ModelDetail, ResultDetail, encode_detail
from goondan.schemas.wire.frames import ErrorPayload
from goondan.schemas.wire.spans import call_span, model_span, step_span, turn_span
from tests.features.telemetry.turns import ASKER, BEGAN, TRACE, Turns, at, ids, simple


class Collector:
    """Takes spans, or says what comes next."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, Span]]] = []
        self.says: list[tuple[str, int, float]] = []
        self.most = 10**9

    @property
    def spans(self) -> list[Span]:
        return [span for batch in self.batches for _, span in batch]

    def send(self, batch: list[tuple[str, Span]]) -> tuple[str, int, float, str]:
        if len(batch) > self.most:
            return "smaller", 0, 0.0, "it answered 413"
        said = self.says.pop(0) if self.says else ("taken", 0, 0.0)
        if said[0] == "taken":
            self.batches.append(list(batch))
        return (*said, "it answered 503")


class Rig:
    """A workspace, an exporter of it, and a clock."""

    def __init__(self, folder: Path, *, contents: bool = False) -> None:
        self.folder, self.contents = folder, contents
        self.now = BEGAN.timestamp() + 1
        self.collector = Collector()
        self.turns = Turns(folder)
        self.again()

    def again(self) -> None:
        """The exporter was killed; another one begins."""
        self.exporter = Exporter(
            str(self.folder), self.collector, lambda: self.now, since=at(0), contents=self.contents
        )

    def run(self, seconds: float = 0.0) -> None:
        """Let it work, and this time pass."""
        until = self.now + seconds
        for _ in range(20_000):
            wait = self.exporter.step()
            if wait and self.now + wait > until:
                self.now = until
                return
            self.now += wait
        raise AssertionError("it never rests")


@pytest.fixture
def rig(tmp_path: Path) -> Any:
    made = Rig(tmp_path)
    yield made
    made.turns.close()


def by_id(spans: list[Span]) -> dict[str, Span]:
    return {span.span_id: span for span in spans}


def test_a_turn_is_its_step_its_model_call_and_its_tool_call(rig: Rig) -> None:
    rig.turns.simple("e1")
    rig.run()
    ((batch),) = rig.collector.batches
    assert {trace for trace, _ in batch} == {TRACE}
    assert [span.span_id for _, span in batch] == ids("t-e1")
    chat, tool, step, turn = (span for _, span in batch)
    began = round(BEGAN.timestamp() * 1000)
    assert (chat.name, chat.kind, chat.parent_id) == ("chat m", "client", step.span_id)
    assert (chat.start_ms - began, chat.end_ms - began) == (1, 40)
    assert chat.attributes["gen_ai.provider.name"] == "openai"
    assert chat.attributes["gen_ai.response.model"] == "m-2"
    assert chat.attributes["goondan.wait.model_gate_ms"] == 20
    assert chat.attributes["goondan.cost.amount"] == 0.005
    assert (tool.name, tool.parent_id, tool.error) == ("execute_tool shell__run", step.span_id, None)
    assert tool.attributes["goondan.wait.person_ms"] == 35  # of the 39 ms, four were the jail's
    assert tool.attributes["goondan.wait.jail_ms"] == 0
    assert tool.attributes["goondan.receipt.denied"] == ["b:80"]
    assert tool.attributes["goondan.refused.by"] == "grant"
    assert step.parent_id == turn.span_id
    assert (turn.name, turn.parent_id, turn.link) == ("invoke_agent main", ASKER, ASKER)
    assert turn.attributes["gen_ai.usage.input_tokens"] == 10
    assert (turn.attributes["goondan.wait.queue_ms"], turn.attributes["goondan.wait.place_ms"]) == (5, 2)
    assert turn.attributes["goondan.cost"] == ["0.005000000 USD"]
    contents = {value for name, value in vars(conventions).items() if name in ("ARGUMENTS", "RESULT")}
    assert not any(contents & set(span.attributes) for span in rig.collector.spans)


def test_contents_are_sent_only_if_they_are_wanted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, contents=True)
    rig.turns.simple("e1")
    rig.run()
    tool = by_id(rig.collector.spans)[call_span("t-e1/c1")]
    assert tool.attributes["gen_ai.tool.call.arguments"] == '{"a":1}'
    assert tool.attributes["gen_ai.tool.call.result"] == '"done"'
    rig.turns.close()


def test_a_turn_that_runs_is_sent_as_far_as_it_has_come_and_each_span_once(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1")
    notes = simple(turn_id)
    rig.turns.note(turn_id, notes[:6])
    rig.run()
    assert [span.span_id for span in rig.collector.spans] == ids(turn_id)[:1]  # who refused the call may follow
    for killed in (False, True):
        if killed:
            rig.again()
            rig.turns.note(turn_id, notes[6:])
            rig.turns.end("e1", 100)
        rig.run(60)
    assert [span.span_id for span in rig.collector.spans] == ids(turn_id)
    tool = rig.collector.spans[1]
    assert tool.attributes["goondan.refused.by"] == "grant"


def test_what_was_sent_and_not_written_down_is_sent_again_as_the_same_span(rig: Rig) -> None:
    rig.turns.simple("e1")
    first = Exporter(str(rig.folder), rig.collector, lambda: rig.now, since=at(0), contents=False)
    first._settle = lambda: None  # type: ignore[method-assign]
    first.step()  # it is killed before it writes down what it has sent
    rig.again()
    rig.run()
    once, again = rig.collector.batches
    assert once == again


def test_a_new_position_begins_with_the_kernel_and_goes_on_behind_an_index_that_was_made_anew(rig: Rig) -> None:
    rig.turns.simple("early", -5000)
    rig.turns.simple("e1")
    rig.run()
    assert turn_span("t-early") not in by_id(rig.collector.spans)
    rig.turns.index.close()
    shutil.rmtree(rig.folder / "traces")
    rig.run(5)
    rig.turns.simple("e2", 500)
    rig.run(5)
    assert [span.span_id for span in rig.collector.spans] == [*ids("t-e1"), *ids("t-e2")]
    rig.turns.index.close()
    shutil.rmtree(rig.folder / "telemetry")
    shutil.rmtree(rig.folder / "traces")
    shutil.rmtree(rig.folder / "instances")
    rig.run(100)
    assert len(rig.collector.spans) == 8
    assert rig.exporter.says().condition == "exporting"


def test_while_the_collector_is_gone_nothing_is_read_and_old_spans_are_given_up(rig: Rig) -> None:
    rig.turns.simple("e1")
    rig.collector.says = [("later", 0, 0.0)] * 10_000
    rig.run(60)
    assert rig.exporter.says().condition == "waiting"
    assert rig.exporter.says().why == "it answered 503"
    assert rig.exporter.says().since_ms == round((BEGAN.timestamp() + 1) * 1000)
    for number in range(50):
        rig.turns.simple(f"f{number}", 1000 + number)
    asked = len(rig.collector.says)
    rig.run(3600)
    assert asked - len(rig.collector.says) < 80  # a pause is a minute by now
    assert len(rig.exporter._batch) == 4
    rig.run(MAX_AGE_S)
    rig.turns.simple("new", round((rig.now - BEGAN.timestamp()) * 1000))
    rig.collector.says = []
    rig.run(120)
    said = rig.exporter.says()
    assert [span.span_id for span in rig.collector.spans] == ids("t-new")
    assert (said.condition, said.dropped, said.dropped_turns, said.sent) == ("exporting", 4, 50, 4)
    rig.again()
    assert rig.exporter.says().dropped_turns == 50


def test_retry_after_is_kept_and_what_a_batch_is_for_is_lost_at_last(rig: Rig) -> None:
    rig.turns.simple("e1")
    rig.collector.says = [("later", 0, 300.0)]
    rig.run(299)
    assert rig.collector.batches == []
    rig.run(2)
    assert len(rig.collector.spans) == 4
    rig.turns.simple("e2", 1000)
    rig.collector.says = [("broken", 0, 0.0)] * 8
    rig.run(600)
    assert rig.exporter.says().dropped == 4
    rig.turns.simple("e3", 2000)
    rig.collector.says = [("bad", 0, 0.0)]
    rig.run(5)
    assert rig.exporter.says().dropped == 8
    rig.turns.simple("e4", 3000)
    rig.collector.says = [("taken", 3, 0.0)]
    rig.run(5)
    assert (rig.exporter.says().dropped, rig.exporter.says().sent) == (11, 5)


def test_a_batch_that_is_too_large_is_halved(rig: Rig) -> None:
    for number in range(3):
        rig.turns.simple(f"e{number}", number)
    rig.collector.most = 5
    rig.run()
    assert len(rig.collector.spans) == 12
    assert max(map(len, rig.collector.batches)) <= 5
    rig.collector.most = 0
    rig.turns.simple("large", 900)
    rig.run(1)
    assert rig.exporter.says().dropped == 4


def test_a_turn_of_50_000_notes_is_sent_in_bounded_batches_with_flat_memory(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1")
    step = step_span(turn_id, 1)
    notes: list[tuple[str, int, str | None, str | None]] = [("step.started", 1, "1", turn_span(turn_id))]
    for number in range(24_990):
        called = encode_detail(CallDetail(f"c{number}", "x" * 300, args="y" * 400))
        notes.append(("tool.called", 2, called, step))
        notes.append(("tool.completed", 3, encode_detail(ResultDetail(f"c{number}", "ok")), step))
    rig.turns.note(turn_id, notes)
    rig.turns.end("e1", 100)
    sizes: list[int] = []
    seen: set[str] = set()

    def send(batch: list[tuple[str, Span]]) -> tuple[str, int, float, str]:
        sizes.append(len(batch))
        assert sum(map(exporter._size, (span for _, span in batch))) <= MAX_BYTES
        seen.update(span.span_id for _, span in batch)
        return "taken", 0, 0.0, ""

    rig.collector.send = send  # type: ignore[method-assign]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rig.run()
    assert len(seen) == 24_992
    assert max(sizes) <= MAX_SPANS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB


def test_what_files_say_is_not_believed(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1", parent="no span")
    step = step_span(turn_id, 1)
    rig.turns.note(
        turn_id,
        [
            ("turn.started", 0, '{"traceId": 7}', "x"),
            ("step.started", 50, "none", "x"),
            ("model.answered", 40, encode_detail(ModelDetail(step=1, model="", input_tokens=1 << 70)), step),
            ("model.answered", 40, encode_detail(ModelDetail(step=1, model="p/n", code="E_MODEL")), step),
            ("tool.called", 60, encode_detail(CallDetail("c\x1b[2J", "t\u202e\x1b]0;x\x07" + "n" * 9000)), step),
            ("tool.completed", 61, "not JSON", step),
            ("later.kind", 61, "\x00", step),
        ],
    )
    with rig.turns.store.write():
        rig.turns.store.execute(
            "INSERT INTO runtime_events (turn_id, type, at, detail, parent_span_id) "
            "VALUES (?, CAST(x'ff00' AS TEXT), CAST(x'fe' AS TEXT), CAST(x'c3' AS TEXT), 5)",
            (turn_id,),
        )
    rig.turns.end("e1", 20, "abandoned")
    rig.run()
    spans = rig.collector.spans
    turn = spans[-1]
    assert (turn.parent_id, turn.link, turn.error) == (None, None, "abandoned")
    assert len(spans) == 5
    for span in spans:
        assert span.start_ms <= span.end_ms
        for value in (span.name, *span.attributes.values()):
            assert not isinstance(value, str) or (value.isprintable() and len(value) < 2100)
    first, second = spans[0], spans[1]
    assert (first.span_id, second.error) == (model_span(turn_id, 1), "E_MODEL")
    assert first.span_id != second.span_id


def test_a_failed_turn_has_its_error_and_a_file_that_cannot_be_read_is_given_up(rig: Rig) -> None:
    turn_id = rig.turns.begin("e1")
    failure = encode_detail(FailureDetail(ErrorPayload("E_MODEL_REFUSED", "it said no")))
    rig.turns.note(turn_id, [("turn.failed", 30, failure, None)])
    rig.turns.end("e1", 30, "failed")
    rig.turns.begin("never", stored=False)
    rig.run(120)
    (turn,) = rig.collector.spans
    assert (turn.error, turn.attributes["error.type"], turn.link) == ("it said no", "E_MODEL_REFUSED", None)
    assert position.read(str(rig.folder)).turns == []  # type: ignore[union-attr]
    other = Turns(rig.folder, "other")
    other.simple("o1", 200_000)
    other.close()
    path = next((rig.folder / "instances").glob("*/*/conversation.db"))
    for path in (rig.folder / "instances").glob("other*/*/conversation.db"):
        path.write_bytes(b"no database" * 1000)
    rig.now = BEGAN.timestamp() + 201
    rig.run(600)
    assert rig.exporter.says().dropped_turns == 1
    assert rfc3339(rig.now) > at(0)
