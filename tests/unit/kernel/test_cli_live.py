"""What a person sees of a turn: whatever is lost or begun anew, the answer stands there, and no terminal obeys it."""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.cli.console import prompt
from goondan.kernel.cli.console.prompt import continues
from goondan.kernel.cli.console.screen import has_cursor
from goondan.kernel.cli.rules.plain import fit, flowing, one_line
from goondan.kernel.cli.rules.renderer import Break, Remark, Say, Shown, Think, TurnRenderer
from goondan.schemas.wire.runtime_events import RuntimeEvent, Wait


def text(step: int, at: int, piece: str, *, again: bool = False) -> RuntimeEvent:
    return RuntimeEvent(kind="text", step=step, at=at, text=piece, again=again)


def on_screen(shown: list[Shown]) -> str:
    """What a terminal would show."""
    screen = ""
    for item in shown:
        if isinstance(item, Say | Think):
            screen += item.text if isinstance(item, Say) else f"~{item.text}~"
        elif screen and not screen.endswith("\n"):
            screen += "\n"
        if isinstance(item, Remark):
            screen += item.text + "\n"
    return screen


def narrate(*events: RuntimeEvent, response: str) -> str:
    renderer = TurnRenderer()
    shown = [item for event in events for item in renderer.handle(event)]
    return on_screen([*shown, *renderer.end(response)])


def test_text_as_it_comes_is_the_answer() -> None:
    assert narrate(text(1, 0, "one "), text(1, 4, "two"), response="one two") == "one two\n"
    assert narrate(response="the answer") == "the answer\n", "nothing was heard"
    assert narrate(response="") == ""


def test_steps_stand_apart_and_only_the_last_is_the_answer() -> None:
    events = [
        RuntimeEvent(kind="turn.started"),
        RuntimeEvent(kind="step.started", step=1),
        text(1, 0, "let me see"),
        RuntimeEvent(kind="tool.called", step=1, tool_call_id="a", tool_name="t"),
        RuntimeEvent(kind="tool.completed", step=1, tool_call_id="a", tool_name="t"),
        RuntimeEvent(kind="step.started", step=2),
        text(2, 0, "found"),
    ]
    assert narrate(*events, response="found it") == "let me see\nt, ok, 0 ms\nfound it\n"


def thought(step: int, at: int, piece: str, *, again: bool = False) -> RuntimeEvent:
    return RuntimeEvent(kind="reasoning", step=step, at=at, text=piece, again=again)


def test_reasoning_stands_apart_and_is_no_answer() -> None:
    begun = RuntimeEvent(kind="step.started", step=1)
    heard = [begun, thought(1, 0, "hm"), thought(1, 2, " so"), text(1, 0, "The "), text(1, 4, "answer")]
    assert narrate(*heard, response="The answer") == "(reasoning)\n~hm~~ so~\n\nThe answer\n"
    assert narrate(*heard[:3], response="The answer") == "(reasoning)\n~hm~~ so~\n\nThe answer\n", "the text was lost"
    behind = [*heard, thought(1, 5, " was it?")]
    assert narrate(*behind, response="The answer").endswith("The answer\n(reasoning)\n~ was it?~\n")


def test_reasoning_that_begins_anew_or_has_a_gap() -> None:
    begun = RuntimeEvent(kind="step.started", step=1)
    anew = [begun, thought(1, 0, "hm"), text(1, 0, "x", again=True)]
    assert narrate(*anew, response="x") == "(reasoning)\n~hm~\n(the answer begins anew)\nx\n"
    gap = [begun, thought(1, 0, "hm"), thought(1, 5, "lost"), thought(1, 2, "late"), text(1, 0, "x")]
    assert narrate(*gap, response="x") == "(reasoning)\n~hm~\n\nx\n"
    steps = [begun, thought(1, 0, "hm"), RuntimeEvent(kind="step.started", step=2), thought(2, 0, "ah")]
    assert narrate(*steps, response="x") == "(reasoning)\n~hm~\n(reasoning)\n~ah~\n\nx\n"


def test_what_is_void_is_marked() -> None:
    events = [text(1, 0, "half"), text(1, 0, "whole", again=True)]
    assert narrate(*events, response="whole") == "half\n(the answer begins anew)\nwhole\n"
    resumed = [text(1, 0, "half"), RuntimeEvent(kind="turn.started", again=True)]
    assert narrate(*resumed, response="whole") == "half\n(the answer begins anew)\nwhole\n"
    assert narrate(text(1, 0, "abc"), response="xyz") == "abc\n(the answer begins anew)\nxyz\n", "another one"


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.booleans(), st.booleans()), max_size=30),
    st.booleans(),
)
def test_the_answer_stands_there_whatever_is_lost(pieces: list[tuple[str, bool, bool]], tail: bool) -> None:
    renderer, shown, whole, at = TurnRenderer(), [], "", 0
    shown += renderer.handle(RuntimeEvent(kind="step.started", step=1))
    for piece, again, lost in pieces:
        whole, at = (piece, 0) if again else (whole + piece, at)
        if not lost:
            shown += renderer.handle(text(1, at, piece, again=again))
        at += len(piece)
    response = whole + ("rest" if tail else "")
    said = [item.text for item in shown if isinstance(item, Say)]
    screen = on_screen([*shown, *renderer.end(response)])
    assert screen.endswith((response, response + "\n"))
    assert len("".join(said)) <= sum(len(piece) for piece, _, _ in pieces)


def test_a_call_leaves_one_line_with_its_arguments_outcome_and_time() -> None:
    renderer = TurnRenderer()
    called = RuntimeEvent(kind="tool.called", tool_call_id="a", tool_name="t__x", arguments="path=a\x1b[2J\nb")
    assert renderer.handle(called, 1.0) == []
    failed = RuntimeEvent(kind="tool.failed", tool_call_id="a", tool_name="t__x", code="E_TOOL")
    assert renderer.handle(failed, 3.5) == [Remark(r"t__x path=a\x1b[2J b, failed E_TOOL, 2.50 s")]
    unheard = RuntimeEvent(kind="tool.completed", tool_call_id="b", tool_name="late__one")
    assert renderer.handle(unheard, 4.0) == [Remark("late__one, ok")]


def test_the_status_tells_step_tools_and_progress() -> None:
    renderer = TurnRenderer()
    assert renderer.status(0.7) == "working, 1 s"
    renderer.handle(RuntimeEvent(kind="step.started", step=2))
    for call, name in (("a", "bash__exec\x1b[2J\nx"), ("b", "wait__seconds")):
        renderer.handle(RuntimeEvent(kind="tool.called", step=2, tool_call_id=call, tool_name=name))
    assert renderer.status(3) == r"working, step 2, bash__exec\x1b[2J x and 1 more, 3 s"
    renderer.handle(RuntimeEvent(kind="tool.completed", step=2, tool_call_id="a"))
    renderer.handle(RuntimeEvent(kind="tool.progress", tool_call_id="b", done=1, total=4, message="a quarter\n"))
    assert renderer.status(3) == "working, step 2, wait__seconds, 25% a quarter , 3 s"
    for done, total in ((float("nan"), 1.0), (1.0, float("inf")), (1.0, 0.0), (-5.0, 1.0), (9.0, 1.0)):
        renderer.handle(RuntimeEvent(kind="tool.progress", tool_call_id="b", done=done, total=total))
        assert "nan" not in renderer.status(3)
    renderer.handle(RuntimeEvent(kind="tool.failed", step=2, tool_call_id="b", code="E_TOOL"))
    assert renderer.status(3) == "working, step 2, 3 s"


def test_the_status_tells_what_is_waited_for_until_there_is_news() -> None:
    renderer = TurnRenderer()
    renderer.handle(RuntimeEvent(kind="step.started", step=1))
    renderer.waits = "waits for its model openai/m: nothing came for 5s (try 1)"
    assert renderer.status(6) == "working, waits for its model openai/m: nothing came for 5s (try 1), 6 s"
    for kind in ("model.waits", "extension.waits", "waits.over"):
        renderer.handle(RuntimeEvent(kind=kind, step=1, message="503", wait=Wait(wait_ms=4000, attempt=2)))
    assert renderer.waits
    renderer.handle(RuntimeEvent(kind="text", step=1, text="hi"))
    assert renderer.status(7) == "working, 7 s"


# --- terminals


@given(st.text())
def test_no_control_reaches_a_terminal(raw: str) -> None:
    for shown in (flowing(raw), one_line(raw, 1000)):
        left = {c for c in shown if unicodedata.category(c) == "Cc"} - {"\n", "\t"}
        assert not left
        assert not {
            c for c in shown if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI")
        }
    assert "\n" not in one_line(raw, 1000)
    plain = "".join(c for c in raw if c.isprintable() or c in "\n\t")
    assert flowing(plain) == plain, "what is harmless stays"


@given(st.lists(st.text(max_size=6)))
def test_pieces_are_as_harmless_as_the_whole(pieces: list[str]) -> None:
    assert "".join(map(flowing, pieces)) == flowing("".join(pieces))


def test_a_line_is_cut_to_the_terminal() -> None:
    assert fit("abcdef", 3) == "abc"
    assert fit("한국어", 5) == "한국"
    assert fit("e\u0301e\u0301", 1) == "e\u0301"
    assert fit("ab", 5) == "ab"
    assert len(one_line("\x1b" * 500, 60)) == 60


@pytest.mark.parametrize(("term", "cursor"), [("xterm-256color", True), ("dumb", False), ("", False), (None, False)])
def test_what_a_terminal_can(term: str | None, cursor: bool) -> None:
    assert has_cursor({} if term is None else {"TERM": term}) is cursor


@pytest.mark.parametrize(
    ("line", "more"), [("a\\", True), ("a\\\\", False), ("a\\\\\\", True), ("", False), ("a", False)]
)
def test_a_backslash_at_the_end_asks_for_more(line: str, more: bool) -> None:
    assert continues(line) is more


# --- history


def test_history_is_private_and_survives(tmp_path: Path) -> None:
    path = str(tmp_path / "history")
    for entry in ("one", "two\nlines", " secret", "", "  ", "세", "\ud800", "x" * (prompt.MAX_ENTRY + 1)):
        prompt.keep_entry(path, entry)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert prompt.load_history(path) == ["one", "two\nlines", "세", "\ud800"]


def test_history_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"".join(prompt.entry_line(f"n{n}") for n in range(3 * prompt.MAX_ENTRIES)))
    path.chmod(0o644)
    kept = prompt.load_history(str(path))
    assert kept == [f"n{n}" for n in range(2 * prompt.MAX_ENTRIES, 3 * prompt.MAX_ENTRIES)]
    assert path.read_bytes() == b"".join(map(prompt.entry_line, kept))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["history"]
    big = ["y" * prompt.MAX_ENTRY] * 100
    path.write_bytes(b"".join(map(prompt.entry_line, big)))
    assert prompt.load_history(str(path)) == big[: prompt.MAX_HISTORY_BYTES // len(prompt.entry_line(big[0]))]
    assert path.stat().st_size <= prompt.MAX_HISTORY_BYTES


@given(st.binary(max_size=300))
def test_any_bytes_are_read_as_some_history(data: bytes) -> None:
    entries = prompt.parse_history(data)
    assert prompt.parse_history(b"".join(map(prompt.entry_line, entries))) == entries


def test_history_follows_no_link_and_blocks_on_no_pipe(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text('"stolen"\n')
    link = tmp_path / "link"
    link.symlink_to(target)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path, tmp_path / "no" / "where"):
        prompt.keep_entry(str(path), "entry")
        assert prompt.load_history(str(path)) == []
    assert target.read_text() == '"stolen"\n'


def test_break_is_no_text() -> None:
    assert on_screen([Break(), Say("a"), Break(), Break()]) == "a\n"
