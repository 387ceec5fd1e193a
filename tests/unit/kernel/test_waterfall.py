"""The waterfall of a call: its stages, from what each process has noted."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from goondan.kernel.cli.commands.traces import waterfall_lines
from goondan.kernel.cli.output import Style
from goondan.kernel.traces.rules.turn import Step, ToolCall, Trace
from goondan.kernel.traces.rules.waterfall import WIDTH, rows, shown, stages
from goondan.schemas.traces.turn_notes import WayDetail
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt

SENT = 51_583_410_895


def a_call(way: WayDetail | None, seen: CallReceipt | None = None) -> ToolCall:
    """A call with that way, and with what its tool host saw."""
    jail = JailReceipt(tier="full", walls=[], limits={})
    receipt = None if seen is None else Receipt(jail=jail, call=seen)
    return ToolCall(
        tool_call_id="c1", tool_name="echo__same", status="ok", started_at="", duration_ms=1, receipt=receipt, way=way
    )


#: 100 to the broker, 50 to the host, 30 until the jail has it, 400 there (60 in the handler), 120 and 80 back.
WHOLE = a_call(
    WayDetail(SENT, SENT + 780, [SENT + 100, SENT + 700]),
    CallReceipt(0.4, came_us=SENT + 150, began_us=SENT + 180, handler_ms=0.06),
)


def told(call: ToolCall) -> list[tuple[str, int, int]]:
    """The stages without what draws them."""
    return [(stage.name, stage.began_us, stage.took_us) for stage in stages(call)]


def test_each_process_has_its_stage() -> None:
    assert told(WHOLE) == [
        ("agent to broker", 0, 100),
        ("broker to tool host", 100, 50),
        ("tool host, until the jail has it", 150, 30),
        ("jail", 180, 400),
        ("its handler, as it says", 180, 60),
        ("tool host to broker", 580, 120),
        ("broker to agent", 700, 80),
    ]


def test_what_nobody_has_said_is_left_out() -> None:
    of_an_old_broker = a_call(WayDetail(SENT, SENT + 500), CallReceipt(0.2, came_us=SENT + 100, began_us=SENT + 200))
    assert told(of_an_old_broker) == [
        ("agent to tool host", 0, 100),
        ("tool host, until the jail has it", 100, 100),
        ("jail", 200, 200),
        ("to the agent", 400, 100),
    ]
    without_a_jail = a_call(WayDetail(SENT, SENT + 90, [SENT + 20, SENT + 70]))
    assert told(without_a_jail) == [
        ("agent to broker", 0, 20),
        ("broker, until the result", 20, 50),
        ("broker to agent", 70, 20),
    ]
    assert told(a_call(None)) == []


def test_bars_stand_where_their_stages_are() -> None:
    drawn = list(rows(stages(WHOLE)))
    assert drawn[3] == ("jail", "+0.18 ms", "0.40 ms", " " * 9 + "█" * 20)
    assert drawn[4][3] == " " * 9 + "███"
    assert drawn[2][3].strip() == "█"
    assert max(len(bar) for *_, bar in drawn) <= WIDTH


def test_a_call_is_shown_with_its_stages() -> None:
    trace = Trace(
        turn_id="t",
        event_id="e",
        agent="main",
        instance_key="k",
        attempt=1,
        status="completed",
        started_at="2026-01-01T00:00:00.000Z",
        steps=[Step(step=1, started_at="", tools=[WHOLE, a_call(None)])],
    )
    first, *lines, other, nothing = waterfall_lines(trace, Style(False))
    assert first.startswith("echo__same  ok") and other.startswith("echo__same")
    assert lines[0].split("  ")[1] == "agent to broker" and len(lines) == 7
    assert nothing.strip() == "its way was not kept"
    trace.steps.clear()
    assert waterfall_lines(trace, Style(False)) == ["no tool was called"]


def test_times_are_short() -> None:
    assert [shown(us) for us in (0, 123, 9_990, 34_400, 1_250_000)] == [
        "0.00 ms",
        "0.12 ms",
        "9.99 ms",
        "34 ms",
        "1.2 s",
    ]


@example(WayDetail(-(10**400), 1, []), None)
@given(
    st.builds(WayDetail, st.integers(), st.integers(), st.lists(st.integers(), max_size=3)),
    st.none()
    | st.builds(CallReceipt, st.floats(), came_us=st.integers(), began_us=st.integers(), handler_ms=st.floats()),
)
def test_no_file_makes_a_stage_that_cannot_be(way: WayDetail, seen: CallReceipt | None) -> None:
    found = stages(a_call(way, seen))
    assert all(stage.took_us >= 0 and stage.began_us >= 0 for stage in found)
    last = 0
    for stage in found:
        if not stage.inside:
            assert stage.began_us == last
            last = stage.began_us + stage.took_us
    assert all(len(bar) <= WIDTH + 1 for *_, bar in rows(found))  # and each time can be shown
