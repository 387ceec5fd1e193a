"""Turns of several agents as one tree, with work apart from waiting, found by the index."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.conversation.store import ConversationStore
from goondan.kernel.cli.commands.traces import find_trace, message_lines, trace_lines
from goondan.kernel.cli.output import Style
from goondan.kernel.traces import search as trace_search
from goondan.kernel.traces.rules.tree import (
    MAX_DEPTH,
    _common,
    _length,
    _union,
    _without,
    below,
    find,
    grow,
    total_of,
    tree_of,
)
from goondan.kernel.traces.rules.turn import Note, Trace, Waits, tell
from goondan.kernel.traces.search import Search
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.system.trace_index import IndexRow, TraceIndex
from goondan.schemas.traces.turn_notes import (
    CallDetail,
    FailureDetail,
    ModelDetail,
    ResultDetail,
    TryDetail,
    TurnDetail,
    encode_detail,
    encode_receipt,
)
from goondan.schemas.wire.frames import ErrorPayload
from goondan.schemas.wire.spans import call_span, step_span, turn_span
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt
from tests.checks import refuses, there

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NOW = "2026-01-01T00:01:00.000Z"


def at(ms: int) -> str:
    return f"2026-01-01T00:00:{ms // 1000:02}.{ms % 1000:03}Z"


def turn(name: str, start: int, end: int | None, notes: list[Note], parent: str | None = None, **changes: Any) -> Trace:
    known: dict[str, Any] = {
        "turn_id": name,
        "event_id": f"e-{name}",
        "agent": name.rstrip("0123456789"),
        "instance_key": "k",
        "attempt": 1,
        "status": "running" if end is None else "completed",
        "started_at": at(start),
        "ended_at": None if end is None else at(end),
        "trace_id": TRACE,
        "parent_span_id": parent,
    }
    interrupted = changes.pop("interrupted", False)
    waited_ms = changes.pop("waited_ms", None)
    waits = None if waited_ms is None else Waits(queue_ms=waited_ms)
    return tell(Trace(**{**known, **changes}, steps=[], waits=waits), notes, interrupted=interrupted)


def step(number: int, start: int, answered: int, **detail: Any) -> list[Note]:
    told = ModelDetail(step=number, model="openai/m", **detail)
    return [Note("step.started", at(start), str(number)), Note("model.answered", at(answered), encode_detail(told))]


def call(name: str, start: int, end: int | None, receipt: Receipt | None = None) -> list[Note]:
    called = [Note("tool.called", at(start), encode_detail(CallDetail(name, "agents__request")))]
    if end is None:
        return called
    kept = None if receipt is None else encode_receipt(receipt)
    return [*called, Note("tool.completed", at(end), encode_detail(ResultDetail(name, "ok", None, kept)))]


def chain() -> list[Trace]:
    """`lead` asks its model from 100 to 400, then `coder` until 1400. That one's turn was queued from 450, and ran from
    600 to 1300.
    """
    asks = [Note("turn.started", at(100), encode_detail(TurnDetail(TRACE, 50)))]
    asks += [*step(1, 100, 400, input_tokens=7, output_tokens=1), *call("a", 400, 1400), *step(2, 1400, 1500)]
    works = [Note("turn.started", at(600), encode_detail(TurnDetail(TRACE, 150, True)))]
    works += [*step(1, 600, 1000, input_tokens=5), *call("b", 1000, 1200), *step(2, 1200, 1250)]
    return [
        turn("coder1", 600, 1300, works, call_span("lead1/a"), waited_ms=150),
        turn("lead1", 100, 1510, asks, None, waited_ms=50),
    ]


def test_a_turn_hangs_on_the_call_that_asked_for_it() -> None:
    (lead,) = grow(chain(), NOW)
    assert lead.turn_id == "lead1"
    assert [asked.turn_id for asked in lead.steps[0].tools[0].turns] == ["coder1"]
    assert find([lead], "coder1") is lead.steps[0].tools[0].turns[0]


def test_work_is_told_from_waiting() -> None:
    (lead,) = grow(chain(), NOW)
    (asking,) = lead.steps[0].tools
    (coder,) = asking.turns
    # 1000 ms for the call: 450 to 1300 are the other agent's, with its queue
    assert (asking.duration_ms, asking.work_ms) == (1000, 150)
    assert coder.waits == Waits(queue_ms=150, model_ms=450)
    assert coder.work_ms == 200 + 50  # its call, and what it did after its last answer
    assert lead.waits == Waits(queue_ms=50, model_ms=400, agents_ms=850)
    assert lead.work_ms == 150 + 10


def test_what_is_done_beside_waiting_counts_as_work() -> None:
    notes = [*step(1, 0, 100), *call("a", 100, 1100), *call("b", 100, 600)]
    asked = turn("coder1", 100, 1100, [], call_span("lead1/a"))
    (lead,) = grow([turn("lead1", 0, 1100, notes), asked], NOW)
    assert (lead.work_ms, lead.waits) == (500, Waits(model_ms=100, agents_ms=500))


def test_a_jail_that_begins_late_and_a_process_that_was_lost_are_waited_for() -> None:
    jail = JailReceipt(tier="full", walls=[], limits={})
    receipt = Receipt(jail=jail, call=CallReceipt(wall_ms=300.0))
    lost = [*step(1, 0, 100), *call("a", 100, 600, receipt), Note("turn.resumed", at(900)), *step(2, 900, 950)]
    (lead,) = grow([turn("lead1", 0, 1000, lost)], NOW)
    assert lead.waits == Waits(model_ms=150, sandbox_ms=200, lost_ms=300)
    assert (lead.work_ms, lead.lost_at, lead.resumed_at) == (350, [at(600)], [at(900)])


def test_a_call_that_a_person_is_asked_about_waits_for_the_person_and_not_for_its_jail() -> None:
    jail = JailReceipt(tier="full", walls=[], limits={})
    receipt = Receipt(jail=jail, call=CallReceipt(wall_ms=300.0))
    (called, completed) = call("a", 100, 10_500, receipt)
    waits = Note("tool.waits", at(110), json.dumps("a"))
    parked = [*step(1, 0, 100), called, waits, Note("turn.resumed", at(10_000)), completed, *step(2, 10_500, 10_600)]
    (lead,) = grow([turn("lead1", 0, 10_600, parked)], NOW)
    assert lead.waits is not None
    # 10 ms before the question and 200 ms after the answer for the jail, which then worked for 300 ms
    assert (lead.waits.person_ms, lead.waits.sandbox_ms, lead.work_ms) == (9890, 210, 300)

    (called, completed) = call("a", 100, 1000, receipt)  # answered at once: nothing was resumed
    at_once = [*step(1, 0, 100), called, waits, completed, *step(2, 1000, 1100)]
    (lead,) = grow([turn("lead1", 0, 1100, at_once)], NOW)
    assert lead.waits == Waits(model_ms=200, person_ms=590, sandbox_ms=10)
    assert lead.work_ms == 300


def test_a_message_that_nobody_waits_for_is_no_waiting() -> None:
    notes = [*step(1, 0, 100), *call("a", 100, 110), *step(2, 110, 200)]
    sent = turn("coder1", 200, 900, [], call_span("lead1/a"))
    by_middleware = turn("coder2", 20, 90, [], turn_span("lead1"))
    awaited = [Note("turn.started", at(110), encode_detail(TurnDetail(TRACE, 0, True)))]
    asked = turn("coder3", 110, 150, awaited, step_span("lead1", 2), waited_ms=0)
    (lead,) = grow([turn("lead1", 0, 200, notes), sent, by_middleware, asked], NOW)
    assert [other.turn_id for other in lead.turns] == ["coder2", "coder3"]
    assert lead.waits == Waits(model_ms=190, agents_ms=40)


def test_what_runs_has_no_end_and_what_ended_with_its_kernel_does_not_run() -> None:
    notes = [*step(1, 0, 100), *call("a", 100, None)]
    (running,) = grow([turn("lead1", 0, None, notes)], at(5000))
    assert (running.status, running.tools[0].status, running.work_ms) == ("running", "running", 4900)
    (over,) = grow([turn("lead1", 0, None, notes, interrupted=True)], at(5000))
    assert (over.status, over.tools[0].status, over.work_ms) == ("interrupted", "interrupted", 0)
    shown = "\n".join(trace_lines(over, Style()))
    assert "running" not in shown
    assert "goes on when the kernel starts again" in shown
    (asking,) = grow([turn("lead1", 0, None, notes[:1], interrupted=True)], at(5000))
    assert there(asking.steps[0].model).status == "interrupted"


def test_the_wait_for_a_place_is_told_from_the_queue() -> None:
    begun = [Note("turn.started", at(0), encode_detail(TurnDetail(TRACE, 50, False, 20)))]
    (lead,) = grow([turn("lead1", 0, 100, begun)], NOW)
    assert lead.waits == Waits(queue_ms=30, place_ms=20)
    assert "  work 100 ms, in the queue before 30 ms, for a place 20 ms" in trace_lines(lead, Style())


def test_a_trace_is_summed_and_takes_the_worst_status() -> None:
    tree = tree_of(TRACE, grow([*chain(), turn("other1", 50, 80, [], "f" * 16)], NOW), 3, NOW)
    assert [root.turn_id for root in tree.turns] == ["other1", "lead1"]
    assert (tree.status, tree.started_at, tree.duration_ms, total_of(tree).turns) == ("completed", at(50), 1460, 3)
    assert total_of(tree).agents == ["coder", "lead", "other"]
    assert tree.work_ms == 160 + 250 + 30
    lines = trace_lines(tree, Style())
    assert lines[0] == f"trace {TRACE}  completed in 1.46 s"
    assert "3 more turns are not shown" in "\n".join(lines)
    for status in ("running", "interrupted", "failed"):
        worse = [*chain(), turn("other1", 50, None, [], status=status)]
        assert tree_of(TRACE, grow(worse, NOW), 0, NOW).status == status


def test_sums_are_of_all_that_is_shown_with_money_in_each_currency() -> None:
    lead, coder = step(1, 0, 9, input_tokens=7, output_tokens=2), step(1, 4, 8, input_tokens=5, output_tokens=1)
    priced = [
        *step(2, 9, 10, input_tokens=90, output_tokens=10, cached_tokens=60, money=2_000_000, currency="USD"),
        *step(3, 10, 11, input_tokens=8, money=500_000, currency="EUR"),
    ]
    asks = [*lead, *call("a", 1, 9)]
    (root,) = grow([turn("lead1", 0, 20, asks), turn("coder1", 4, 8, [*coder, *priced], call_span("lead1/a"))], NOW)
    total = total_of(root)
    assert (total.turns, total.agents) == (2, ["coder", "lead"])
    assert (total.input_tokens, total.output_tokens, total.cached_tokens) == (110, 13, 60)
    assert total.costs == {"USD": 0.002, "EUR": 0.0005}
    assert total_of(tree_of(TRACE, [root], 0, NOW)) == total
    said = "  in all of 2 turns: 110 tokens in (60 cached), 13 out, $0.002, 0.0005 EUR"
    assert said in trace_lines(root, Style())
    assert said in trace_lines(tree_of(TRACE, [root], 0, NOW), Style())
    (line,) = [line for line in message_lines([(root, total)]) if "lead1" in line]
    assert line.split()[:5] == ["lead1", "completed", "2026-01-01T00:00:00", "20", "ms"]
    assert line.split()[5:] == ["coder,lead", "123", "$0.002", "+", "0.0005", "EUR", "-"]


def test_the_tree_is_shown_with_times_from_one_beginning() -> None:
    lines = trace_lines(grow(chain(), NOW)[0], Style())
    assert [line.replace("│", " ").split() for line in lines if "turn " in line or "  step" in line] == [
        ["turn", "lead1", "completed", "in", "1.41", "s"],
        ["+0", "ms", "step", "1"],
        ["+500", "ms", "turn", "coder1", "completed", "in", "700", "ms"],
        ["+500", "ms", "step", "1"],
        ["+1.10", "s", "step", "2"],
        ["+1.30", "s", "step", "2"],
    ]
    assert "  work 160 ms, waited for the model 400 ms, waited for agents 850 ms, in the queue before 50 ms" in lines
    assert f"  in trace {TRACE}" in lines


def test_tries_of_a_model_and_failures_are_shown() -> None:
    error = ErrorPayload("E_MODEL_FAILED", "busy")
    notes = [
        *step(1, 0, 100, attempts=3, paused_ms=60, waited_ms=5000, tries=[TryDetail("503 Loading\x1b", 500)]),
        Note("step.failed", at(100), encode_detail(FailureDetail(error, 1))),
    ]
    (lead,) = grow([turn("lead1", 0, 100, notes, status="failed", error=error)], NOW)
    assert (lead.steps[0].error, lead.steps[0].duration_ms) == (error, 100)
    shown = "\n".join(trace_lines(lead, Style()))
    assert "3 tries, 60 ms between them  waited 5.00 s for others" in shown
    assert r"tried: 503 Loading\x1b; the next 500 ms later" in shown
    assert "error: busy [E_MODEL_FAILED]" in shown


def test_no_data_makes_a_circle_or_a_tree_too_deep_to_print() -> None:
    circle = [
        turn("a1", 0, 9, call("x", 1, 2), call_span("b1/x")),
        turn("b1", 1, 9, call("x", 1, 2), call_span("a1/x")),
        turn("c1", 2, 9, call("x", 1, 2), call_span("c1/x")),
        turn("d1", 2, 9, [], turn_span("d1")),
    ]
    roots = grow(circle, NOW)
    assert [root.turn_id for root in roots] == ["b1", "c1", "d1"]
    assert [asked.turn_id for asked in roots[0].tools[0].turns] == ["a1"]
    long = [turn(f"t{n:04}", n, 9000, call("x", n, n + 1), call_span(f"t{n - 1:04}/x")) for n in range(500)]
    (root,) = grow(long, NOW)
    document = json.loads(msgspec.json.encode(root))
    assert str(document).count("'turnId'") == 500
    depth, level = 0, [root]
    while level:
        depth, level = depth + 1, [other for one in level for other in below(one)]
    assert depth <= MAX_DEPTH + 2


def test_nothing_in_a_tree_steers_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e\n"
    asked = turn("coder1", 5, 9, [], call_span("lead1/a"), agent=evil, event_id=evil, instance_key=evil)
    roots = grow([turn("lead1", 0, 10, call("a", 1, 9)), asked], NOW)
    for found in (roots[0], tree_of(evil, roots, 0, NOW)):
        text = "\n".join(trace_lines(found, Style()))
        assert all(line.isprintable() for line in text.split("\n"))
        assert "owned" in text


pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)


@given(pieces, pieces)
def test_intervals_are_sets_of_moments(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def moments(found: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in found for moment in range(start, end)}

    assert moments(_union(one)) == moments(one)
    assert moments(_without(one, other)) == moments(one) - moments(other)
    assert moments(_common(one, other)) == moments(one) & moments(other)
    assert _length(one) == len(moments(one))


KINDS = ["step.started", "step.failed", "model.answered", "tool.called", "tool.completed", "turn.resumed"]
notes = st.lists(
    st.builds(
        Note,
        st.sampled_from(KINDS),
        st.sampled_from([at(0), at(700), at(900), "yesterday", "2026-01-01"]),
        st.sampled_from(["1", encode_detail(CallDetail("a", "x")), encode_detail(ResultDetail("a", "ok")), "{", None]),
    ),
    max_size=8,
)  # fmt: skip


@given(st.lists(st.tuples(notes, st.sampled_from([None, "lead0/a", "lead1/a", "lead2/a", "lead3/a"])), max_size=4))
def test_any_files_give_a_tree_with_every_turn_once(told: list[tuple[list[Note], str | None]]) -> None:
    made = [
        turn(f"lead{number}", number * 100, 1000, some, None if parent is None else call_span(parent))
        for number, (some, parent) in enumerate(told)
    ]
    roots = grow(made, NOW)
    seen = list(roots)
    for one in seen:
        seen.extend(below(one))
    assert sorted(one.turn_id for one in seen) == [one.turn_id for one in made]
    for root in roots:
        assert all(line.isprintable() for line in trace_lines(root, Style()))
    for one in seen:
        assert 0 <= (one.work_ms or 0) <= (one.duration_ms or 0)


# --- found in files


def index_turn(state: Path, row: IndexRow) -> None:
    with closing(TraceIndex(str(state))) as index:
        index.add(row)


def put(
    state: Path, agent: str, key: str, event: str, start: int, parent: str | None = None, trace: str = TRACE
) -> None:
    """A turn with one call `a`, as an agent stores it."""
    name = f"t-{event}"
    store = ConversationStore(instance_dir(str(state), agent, key), durability="process")
    store.adopt(1)
    index_turn(state, IndexRow(at(start), trace, name, event, agent, key))
    with store.write():
        store.begin_turn(event, name, 1, at(start), trace_id=trace, parent_span_id=parent, waited_ms=1)
        store.note(name, "turn.started", at(start), encode_detail(TurnDetail(trace, 1)))
        for note in call("a", start + 1, start + 9):
            store.note(name, note.kind, note.at, note.detail)  # type: ignore[arg-type]
        store.note(name, "turn.completed", at(start + 9))
        store.finish_turn(event, name, "completed", at(start + 9), steps=1, answer=None)
    store.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """`lead` asks `coder` twice, in instances of their own; another trace is beside it."""
    put(tmp_path, "other", "k", "e0", 5, trace="a" * 32)
    put(tmp_path, "lead", "k" * 200, "e1", 10)
    put(tmp_path, "coder", "one", "t-e1/a~1", 12, call_span("t-e1/a"))
    put(tmp_path, "coder", "two", "t-e1/a~2", 14, call_span("t-e1/a"))
    put(tmp_path, "coder", "two", "later", 30, trace="b" * 32)
    return tmp_path


@pytest.mark.requirement("AGENTS-04", "HANDOFF-04")
@pytest.mark.parametrize("name", ["t-e1/a~2", "corr:t-e1/a~2", "handoff:t-e1/a~2", "t-e1/a~2:answer"])
def test_a_trace_is_followed_by_the_correlation_id(state: Path, name: str) -> None:
    found = Search(str(state), NOW).turn(name)
    assert (found.turn_id, found.agent, found.instance_key, found.trace_id) == ("t-t-e1/a~2", "coder", "two", TRACE)
    tree = there(Search(str(state), NOW).trace(found.trace_id or ""))
    (lead,) = tree.turns
    assert (lead.event_id, lead.instance_key) == ("e1", "k" * 200)
    assert [one.event_id for one in lead.tools[0].turns] == ["t-e1/a~1", "t-e1/a~2"]


def test_a_turn_is_shown_with_what_it_asked_for_and_the_last_one_with_who_asked(state: Path) -> None:
    search = Search(str(state), NOW)
    assert [one.turn_id for one in search.turn("e1").tools[0].turns] == ["t-t-e1/a~1", "t-t-e1/a~2"]
    assert search.last().event_id == "later"
    put(state, "coder", "one", "t-e1/a~3", 40, call_span("t-e1/a"))
    assert search.last().event_id == "e1"
    assert search.last("coder").event_id == "t-e1/a~3"
    assert search.last("coder", "two").event_id == "later"
    assert search.last(None, "two").event_id == "later"


def test_the_last_messages_of_people_are_listed_without_what_agents_asked_and_operators_called(state: Path) -> None:
    search = Search(str(state), NOW)
    put(state, "coder", "two", "late", 40, call_span("t-e1/a"))  # an old message is still at work
    put(state, "_operator", "default", "call", 50, trace="c" * 32)
    assert [one.event_id for one in search.messages(10)] == ["later", "e1", "e0"]
    assert [one.event_id for one in search.messages(1)] == ["later"]
    assert search.last().event_id == "call"
    last = find_trace(str(state), None, None, None, False, True)
    assert isinstance(last, Trace)
    assert last.event_id == "later"


def test_instances_that_have_nothing_to_do_with_it_are_not_looked_at(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(*_: object) -> Any:
        raise AssertionError("the folders were walked")

    monkeypatch.setattr(trace_search, "conversation_files", walk)
    search = Search(str(state), NOW)
    assert search.trace(TRACE) is not None
    for name in ("e1", "t-e1", "corr:t-e1/a~1"):
        assert search.turn(name).trace_id == TRACE
    assert search.last().event_id == "later"


def test_without_the_index_everything_is_found_in_the_files(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (state / "traces").iterdir():
        path.unlink()
    search = Search(str(state), NOW)
    tree = there(search.trace(TRACE))
    assert total_of(tree).turns == 3
    assert (search.turn("e1").turn_id, search.last().event_id) == ("t-e1", "later")
    monkeypatch.setattr(trace_search, "MAX_FILES", 2)
    assert search.trace(TRACE) is None
    with refuses("E_TURN_NOT_FOUND") as caught:
        search.turn("e1")
    assert "--search" in (caught.value.info.suggestion or "")
    everywhere = Search(str(state), NOW, everywhere=True)
    assert (everywhere.turn("e1").turn_id, everywhere.trace(TRACE) is None) == ("t-e1", False)


def test_lines_of_the_index_that_lead_nowhere_hide_nothing(state: Path) -> None:
    index_turn(state, IndexRow(at(50), TRACE, "t-x", "x", "gone", "k"))  # its turn was not stored
    index_turn(state, IndexRow(at(5), TRACE, "t-e0", "e0", "other", "k"))  # it belongs to another trace
    damaged = Path(instance_dir(str(state), "coder", "one"), "conversation.db")
    damaged.write_bytes(b"garbage" * 1000)
    tree = there(Search(str(state), NOW).trace(TRACE))
    assert sorted(one for root in tree.turns for one in (root.event_id, *(b.event_id for b in below(root)))) == [
        "e1",
        "t-e1/a~2",
    ]
    assert Search(str(state), NOW).last().event_id == "later"


@pytest.mark.parametrize(
    "column", ["started_at", "ended_at", "turn_id", "trace_id", "waited_ms", "first_note", "status"]
)
def test_values_of_another_type_are_one_error(state: Path, column: str) -> None:
    path = Path(instance_dir(str(state), "lead", "k" * 200), "conversation.db")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"UPDATE turns SET {column} = x'c1ff'")
        db.execute("UPDATE runtime_events SET at = x'c1', detail = x'c1' WHERE type = 'tool.called'")
        db.commit()
    if column == "first_note":
        assert Search(str(state), NOW).turn("e1").steps == []
    else:
        with refuses("E_STATE"):
            Search(str(state), NOW).turn("e1")
    assert Search(str(state), NOW).turn("later").turn_id == "t-later"


def test_turns_beyond_the_limit_are_counted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_search, "MAX_TURNS", 2)
    tree = there(Search(str(state), NOW).trace(TRACE))
    assert (total_of(tree).turns, tree.left_out) == (2, 1)
