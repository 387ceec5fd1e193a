"""Notes to a story, the story to lines, and turns found in real conversation files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from goondan.agentproc.conversation.store import ConversationStore
from goondan.kernel.cli.commands.traces import trace_lines
from goondan.kernel.cli.output import Style
from goondan.kernel.cli.rules.plain import duration
from goondan.kernel.traces.rules.tree import total_of
from goondan.kernel.traces.rules.turn import Hang, Note, Trace, between_ms, said_in, tell
from goondan.kernel.traces.search import Search
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.traces.turn_notes import (
    SHORT_CHARS,
    CallDetail,
    LayerDetail,
    ModelDetail,
    ResultDetail,
    encode_detail,
    encode_receipt,
)
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import AgentEvent, Answer
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt, kept
from tests.checks import there

_KEYS = ("id", "data", "role", "content", "toolCallId", "args", "result", "output")


def at(ms: int) -> str:
    return f"2026-01-01T00:00:{ms // 1000:02}.{ms % 1000:03}Z"


def turn(**changes: Any) -> Trace:
    known: dict[str, Any] = {
        "turn_id": "t1",
        "event_id": "e1",
        "agent": "main",
        "instance_key": "default",
        "attempt": 1,
        "status": "completed",
        "started_at": at(0),
        "ended_at": at(2500),
    }
    return Trace(**{**known, **changes}, steps=[])


WHOLE = [
    Note("turn.started", at(0)),
    Note("step.started", at(0), "1"),
    Note("model.answered", at(800), encode_detail(ModelDetail(step=1, model="openai/m", input_tokens=7))),
    Note("tool.called", at(800), encode_detail(CallDetail("a", "bash__exec"))),
    Note("tool.called", at(800), encode_detail(CallDetail("b", "notes__add"))),
    Note("tool.failed", at(900), encode_detail(ResultDetail("b", "error", "E_TOOL_TIMEOUT"))),
    Note("tool.completed", at(2000), encode_detail(ResultDetail("a", "ok"))),
    Note("step.started", at(2000), "2"),
    Note("model.answered", at(2500), encode_detail(ModelDetail(step=2, input_tokens=3, output_tokens=4))),
    Note("turn.completed", at(2500)),
]


def test_a_turn_is_told_by_steps_with_durations_and_sums() -> None:
    trace = tell(turn(), WHOLE)
    assert (trace.status, trace.duration_ms) == ("completed", 2500)
    assert (total_of(trace).input_tokens, total_of(trace).output_tokens) == (10, 4)
    first, second = trace.steps
    assert first.model is not None
    assert (first.step, first.model.model, first.model.duration_ms) == (1, "openai/m", 800)
    assert [(call.tool_name, call.status, call.code, call.duration_ms) for call in first.tools] == [
        ("bash__exec", "ok", None, 1200),
        ("notes__add", "error", "E_TOOL_TIMEOUT", 100),
    ]
    assert (second.step, there(second.model).duration_ms, second.tools) == (2, 500, [])


def test_a_layer_that_hung_is_shown_with_its_point_and_since_when() -> None:
    layer = encode_detail(LayerDetail("guard", "step.pre"))
    notes = [WHOLE[0], Note("extension.waits", at(100), layer), Note("extension.over", at(2400), layer), *WHOLE[1:]]
    trace = tell(turn(), notes)
    assert trace.hangs == [Hang(extension="guard", point="step.pre", started_at=at(100), duration_ms=2300)]
    shown = "\n".join(trace_lines(trace, Style(False)))
    assert "+100 ms  extension guard hung at step.pre for 2.30 s" in shown
    trace = tell(turn(status="running", ended_at=None), notes[:2])
    assert "extension guard hung at step.pre and has not gone on" in "\n".join(trace_lines(trace, Style(False)))


def test_a_request_that_only_the_servers_limit_held_back_has_not_waited_for_others() -> None:
    detail = encode_detail(ModelDetail(step=1, model="openai/m", paused_ms=2800))
    trace = tell(turn(), [*WHOLE[:2], Note("model.answered", at(800), detail), WHOLE[-1]])
    shown = "\n".join(trace_lines(trace, Style(False)))
    assert "held back 2.80 s" in shown
    assert "for others" not in shown


@pytest.mark.parametrize(("status", "open_as"), [("running", "running"), ("failed", "lost"), ("abandoned", "lost")])
def test_what_has_no_end_runs_or_was_lost(status: str, open_as: str) -> None:
    trace = tell(turn(status=status, ended_at=None), WHOLE[:5])
    assert [call.status for call in trace.steps[0].tools] == [open_as, open_as]
    trace = tell(turn(status=status, ended_at=None), WHOLE[:2])
    assert there(trace.steps[0].model).status == open_as


def test_a_model_that_is_asked_again_after_a_crash_does_not_count_the_time_between() -> None:
    trace = tell(turn(), [*WHOLE[:2], Note("turn.resumed", at(700)), *WHOLE[2:]])
    assert trace.resumed_at == [at(700)]
    assert there(trace.steps[0].model).duration_ms == 100


def message(number: int, data: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"t1.{number}", "data": data}


def test_calls_are_shown_with_what_the_messages_of_their_turn_say_in_short() -> None:
    call = {"type": "tool-call", "toolCallId": "a", "toolName": "bash__exec", "args": {"command": "x" * 500}}
    result = {"type": "tool-result", "toolCallId": "a", "result": {"status": "ok", "output": {"stdout": "y\x1b[2J"}}}
    said = said_in(
        [
            message(0, {"role": "user", "content": "please " * 100}),
            message(1, {"role": "assistant", "content": [{"type": "text", "text": "so"}, call]}),
            message(2, {"role": "tool", "content": [result]}),
        ]
    )
    trace = tell(turn(), WHOLE, said)
    first, other = trace.steps[0].tools
    assert len(trace.message or "") == len(first.args or "") == SHORT_CHARS
    assert (first.args or "").startswith('{"command":"xxx')
    assert (first.output, other.args, other.output) == ('{"stdout":"y\\u001b[2J"}', None, None)
    lines = trace_lines(trace, Style())
    assert any(line.strip("│ ").startswith('with {"command":"xxx') for line in lines)
    assert any(line.strip("│ ").startswith('gave {"stdout":"y') for line in lines)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["toolCallId", "t1.0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(_KEYS)), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=4))
def test_no_stored_message_keeps_a_turn_from_being_shown(messages: list[Any]) -> None:
    lines = trace_lines(tell(turn(), WHOLE, said_in(messages)), Style())
    assert all(line.isprintable() for line in lines)


def test_an_operator_call_has_no_model() -> None:
    trace = tell(turn(), [WHOLE[0], WHOLE[3], WHOLE[6], WHOLE[9]])
    (step,) = trace.steps
    assert (step.step, step.model, step.tools[0].status) == (0, None, "ok")
    assert "operator call" in "\n".join(trace_lines(trace, Style()))


notes = st.builds(
    Note,
    st.sampled_from([note.kind for note in WHOLE] + ["turn.resumed", "model.failed", "something.new"]),
    st.sampled_from([at(0), at(5), "yesterday", ""]),
    st.sampled_from([note.detail for note in WHOLE] + ["{", "[]", '"x"', "null", "1e9", "\ud800"]) | st.text(),
)


@given(st.lists(notes), st.sampled_from(["running", "completed", "whatever"]))
def test_any_notes_give_a_story_of_printable_lines(some: list[Note], status: str) -> None:
    lines = trace_lines(tell(turn(status=status), some), Style())
    assert all(line.isprintable() for line in lines)


def test_nothing_in_a_trace_steers_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e\n"
    hostile = [
        Note("step.started", at(0), "1"),
        Note("model.failed", at(1), encode_detail(ModelDetail(step=1, model=evil, finish_reason=evil, code=evil))),
        Note("tool.called", at(1), encode_detail(CallDetail(evil, evil))),
        Note("tool.failed", at(1), encode_detail(ResultDetail(evil, evil, evil))),
    ]
    told = tell(turn(event_id=evil, instance_key=evil, status=evil, error=error_payload("E_TOOL", evil)), hostile)
    text = "\n".join(trace_lines(told, Style()))
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("owned") == 11  # everything is still told
    coloured = "\n".join(trace_lines(told, Style(True)))
    assert coloured.replace("\x1b[", "").count("\x1b") == 0


def receipt(**jail: Any) -> Receipt:
    known: dict[str, Any] = {"tier": "full", "walls": ["seccomp"], "limits": {"memory": "cgroup"}}
    return Receipt(jail=JailReceipt(**{**known, **jail}), call=CallReceipt(wall_ms=1.5))


def with_receipt(data: Raw) -> list[Note]:
    result = ResultDetail("a", "ok", None, data)
    return [*WHOLE[:4], Note("tool.completed", at(900), encode_detail(result)), WHOLE[9]]


def test_a_calls_receipt_is_told_in_a_line_and_whole() -> None:
    seen = receipt(cpu_ms=40, peak_memory_kb=12_595, denied=["evil.test:443", "\x1b]0;x\x07:1"], exit="ended by us")
    told = tell(turn(), with_receipt(encode_receipt(seen)))
    assert told.steps[0].tools[0].receipt == seen
    lines = trace_lines(told, Style())
    (line,) = [line for line in lines if "jail" in line]
    assert line.split("jail ")[1].startswith("full, peak 12.3 MiB, cpu 40 ms, denied evil.test:443 ")
    assert line.endswith("ended: ended by us")
    assert all(line.isprintable() for line in lines)
    quiet = trace_lines(tell(turn(), with_receipt(encode_receipt(receipt()))), Style())
    assert [line for line in quiet if "denied" in line or "ended" in line] == []


def test_a_call_past_the_catalog_is_said_to_be_one() -> None:
    told = tell(turn(), [Note("tool.called", at(0), encode_detail(CallDetail("a", "x__y", direct=True))), *WHOLE[4:]])
    assert [call.direct for call in told.steps[0].tools] == [True, False]
    assert ["by policy" in line for line in trace_lines(told, Style()) if "__" in line] == [True, False]


def test_a_receipt_that_cannot_be_read_costs_nothing_but_itself() -> None:
    told = tell(turn(), with_receipt(Raw(b'{"jail":{"tier":"of another version"}}')))
    assert (told.steps[0].tools[0].status, told.steps[0].tools[0].receipt) == ("ok", None)


def test_a_kept_receipt_is_small_whatever_the_jail_tried() -> None:
    hosts = [f"{number}.{'x' * 250}:65535" for number in range(256)]
    small = kept(receipt(denied=hosts, reached=hosts, exit="words " * 1000))
    assert small.jail.denied == [*hosts[-8:], "and 248 more"]
    assert len(encode_receipt(small)) < 6000
    assert kept(receipt(denied=hosts[:8])) == receipt(denied=hosts[:8])


def test_times_that_are_none_or_go_backwards() -> None:
    assert between_ms(at(0), at(1500)) == 1500
    assert between_ms(at(1500), at(0)) == 0
    assert between_ms("x", at(0)) is None
    assert between_ms("2026-01-01", at(0)) is None
    assert [duration(ms) for ms in (7, 1240, 185_000)] == ["7 ms", "1.24 s", "3 min 5 s"]


# --- files


def run_turn(state: Path, agent: str, key: str, event: str, started: int, *, close: bool = True) -> ConversationStore:
    store = ConversationStore(instance_dir(str(state), agent, key), durability="process")
    store.adopt(1)
    with store.write():
        store.begin_turn(event, f"t-{event}", 1, at(started))
        store.note(f"t-{event}", "step.started", at(started), "1")
    if close:
        answer = AgentEvent(
            id="x",
            type="agent.response",
            created_at=at(started),
            answer=Answer(turn_id="t", status="failed", error=error_payload("E_MODEL_FAILED", "no")),
        )
        with store.write(final=True):
            store.finish_turn(
                event, f"t-{event}", "failed", at(started + 5), steps=1, answer=msgspec.msgpack.encode(answer)
            )
        store.close()
    return store


def find_trace(state: str, wanted: str | None, *, agent: str | None, instance: str | None) -> Trace:
    """As `gdn trace` finds a turn."""
    search = Search(state, at(0))
    return search.last(agent, instance) if wanted is None else search.turn(wanted, agent, instance)


def code(caught: pytest.ExceptionInfo[GoondanError]) -> str:
    return caught.value.info.code


def test_the_last_turn_and_turns_by_name_are_found(tmp_path: Path) -> None:
    run_turn(tmp_path, "a", "k/1 한", "e1", 10)
    run_turn(tmp_path, "b", "k" * 200, "e2", 30)
    run_turn(tmp_path, "a", "k2", "e3", 20)
    last = find_trace(str(tmp_path), None, agent=None, instance=None)
    assert (last.turn_id, last.agent, last.instance_key) == ("t-e2", "b", None)
    assert (there(last.error).code, last.duration_ms) == ("E_MODEL_FAILED", 5)
    assert find_trace(str(tmp_path), None, agent="a", instance=None).turn_id == "t-e3"
    for name in ("e1", "t-e1"):
        assert find_trace(str(tmp_path), name, agent=None, instance=None).instance_key == "k/1 한"
    assert find_trace(str(tmp_path), None, agent="b", instance="k" * 200).turn_id == "t-e2"
    for wanted, agent in (("t-e9", None), (None, "c"), ("t-e1", "b")):
        with pytest.raises(GoondanError) as caught:
            find_trace(str(tmp_path), wanted, agent=agent, instance=None)
        assert code(caught) == "E_TURN_NOT_FOUND"


def test_a_file_that_is_being_written_is_read_and_a_closed_one_is_left_as_it_was(tmp_path: Path) -> None:
    store = run_turn(tmp_path, "a", "k", "e1", 10, close=False)
    assert find_trace(str(tmp_path), None, agent=None, instance=None).status == "interrupted", "no kernel runs"
    with store.write():
        store.note("t-e1", "tool.called", at(11), encode_detail(CallDetail("c", "x__y")))
        # What is not committed is not shown.
        assert find_trace(str(tmp_path), "e1", agent=None, instance=None).steps[0].tools == []
    assert find_trace(str(tmp_path), "e1", agent=None, instance=None).steps[0].tools[0].tool_name == "x__y"
    store.close()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert find_trace(str(tmp_path), "e1", agent=None, instance=None).turn_id == "t-e1"
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_files_that_are_none_do_not_hide_the_others(tmp_path: Path) -> None:
    run_turn(tmp_path, "a", "good", "e1", 10)
    for name, data in (("empty", b""), ("garbage", b"x" * 5000)):
        folder = tmp_path / "instances" / "a" / name
        folder.mkdir()
        (folder / "conversation.db").write_bytes(data)
    run_turn(tmp_path, "a", "later", "e2", 20)
    with closing(sqlite3.connect(tmp_path / "instances/a/later/conversation.db")) as db:
        db.execute("PRAGMA user_version = 99")
    assert find_trace(str(tmp_path), None, agent=None, instance=None).turn_id == "t-e1"
    for instance in ("garbage", "later"):
        with pytest.raises(GoondanError) as caught:
            find_trace(str(tmp_path), None, agent="a", instance=instance)
        assert code(caught) == "E_STATE"
    with pytest.raises(GoondanError) as caught:
        find_trace(str(tmp_path), None, agent="a", instance="empty")
    assert code(caught) == "E_TURN_NOT_FOUND"


def called(name: str, script: str | None = None) -> Note:
    return Note("tool.called", at(1), encode_detail(CallDetail(name, "x__y", script=script)))


def test_the_calls_of_a_script_stand_below_it() -> None:
    ended = Note("tool.completed", at(5), encode_detail(ResultDetail("s>1", "ok")))
    told = tell(turn(), [called("s"), called("s>1", "s"), called("s>2", "s"), ended])
    (script,) = told.steps[0].tools
    assert [(call.tool_call_id, call.status) for call in script.calls] == [("s>1", "ok"), ("s>2", "lost")]
    assert [call.tool_call_id for call in told.tools] == ["s", "s>1", "s>2"]


def test_no_note_makes_a_call_its_own_script_or_a_deep_one() -> None:
    told = tell(turn(), [called("a", "a"), called("a", "a"), called("b", "a"), called("c", "b"), called("d", "nobody")])
    assert [call.tool_call_id for call in told.steps[0].tools] == ["a", "a", "c", "d"]
    msgspec.json.encode(told)


def test_a_model_call_has_the_name_that_answered_and_the_parts_of_its_tokens() -> None:
    detail = ModelDetail(
        step=1,
        model="openai/m-2026",
        asked="m",
        input_tokens=1200,
        output_tokens=40,
        cached_tokens=1000,
        reasoning_tokens=30,
        money=2_500_000,
        currency="USD",
    )
    notes = [Note("step.started", at(0), "1"), Note("model.answered", at(9), encode_detail(detail))]
    told = tell(turn(), [*notes, notes[1]])  # an extension asked twice
    call = there(told.steps[0].model)
    assert (call.cached_tokens, call.reasoning_tokens, total_of(told).cached_tokens) == (2000, 60, 2000)
    assert call.costs == {"USD": 0.005}
    line = next(line for line in trace_lines(told, Style()) if "m-2026" in line)
    assert "2400 tokens in (2000 cached), 80 out (60 reasoning), $0.005  asked for m" in line
    assert "in all: 2400 tokens in (2000 cached), 80 out (60 reasoning), $0.005" in "\n".join(
        trace_lines(told, Style())
    )


def test_a_model_that_answered_in_place_of_another_has_its_name_and_the_other_stands_among_the_tries() -> None:
    failed = ModelDetail(step=1, model="openai/first", code="E_MODEL_QUOTA")
    notes = [
        Note("step.started", at(0), "1"),
        Note("model.failed", at(3), encode_detail(failed)),
        Note("model.answered", at(9), encode_detail(ModelDetail(step=1, model="anthropic/second", waited_ms=7))),
    ]
    call = there(tell(turn(), notes).steps[0].model)
    assert (call.model, call.status, call.attempts, call.waited_ms) == ("anthropic/second", "answered", 2, 7)
    assert [tried.error for tried in call.tries] == ["openai/first: E_MODEL_QUOTA"]
