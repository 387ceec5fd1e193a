"""What a person agrees to: nothing of it hides, no text of it looks like the kernel's word, and a yes covers only what
was shown. With texts of hostile models, tools and MCP servers.
"""

from __future__ import annotations

import asyncio
import os
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.approvals import command as commands
from goondan.features.approvals.command import (
    MARK,
    MAX_LINES,
    OUTSIDE,
    always_lines,
    answer_issues,
    answered_lines,
    approve,
    command_lines,
    is_long,
    item_lines,
    list_lines,
    whole_digest,
)
from goondan.features.approvals.console import Asked
from goondan.kernel.cli import output
from goondan.kernel.cli.named_files import MAX_FILE_BYTES, MAX_FILES, with_files
from goondan.schemas.text.visible import TURNING
from goondan.schemas.wire.errors import GoondanError

ITEM: dict[str, Any] = {
    "id": "t1/c1",
    "code": "3f9a2c1b0d",
    "kind": "approval",
    "agent": "coder",
    "instanceKey": "k",
    "tool": "bash__exec",
    "digest": "0" * 64,
    "askedMs": 0,
    "expiresMs": 3_600_000,
    "state": "waits",
    "args": {"command": "ls"},
    "workdir": "/w",
}
#: Where a text from outside may stand in an item.
PLACES: dict[str, Any] = {
    "args": lambda text: {"args": {"command": text}},
    "script": lambda text: {"script": text, "covers": 20},
    "message": lambda text: {"kind": "question", "message": text},
    "schema": lambda text: {"kind": "question", "schema": {"description": text}},
    "rule": lambda text: {"reason": text},
    "workdir": lambda text: {"workdir": text},
    "caller": lambda text: {"instanceKey": text, "waitedForBy": [text]},
    "call": lambda text: {"id": text},
    "decided": lambda text: {"state": "denied", "decidedReason": text},
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_an_item_hides(place: str) -> None:
    for character in "\x1b\ufe0f\U000e0100\U000e01ef\u034f\u180b\u17b4\u2800\u3164\u00a0\u200d":
        assert character not in "\n".join(item_lines({**ITEM, **PLACES[place](f"rm{character} x")}))


@settings(max_examples=25)
@given(st.text(max_size=60), st.integers(1, 120))
def test_every_line_of_an_item_has_its_mark_and_fits_and_steers_no_terminal(text: str, columns: int) -> None:
    item = {**ITEM, "args": {"command": text}, "message": text, "reason": text, "workdir": text, "waitedForBy": [text]}
    lines = item_lines(item, columns)
    assert all(line.startswith(MARK) for line in lines)
    assert not {unicodedata.category(character) for line in lines for character in line} & {"Cc", "Zl", "Zp", "Cs"}
    assert not {chr(code) for code in TURNING} & set("".join(lines))
    assert max(len(line) for line in lines) < max(24, columns)


def test_nothing_of_a_long_line_is_left_out() -> None:
    text = "".join(chr(97 + at % 26) for at in range(3000))
    assert text in "".join(line.partition(OUTSIDE)[2] for line in item_lines({**ITEM, "message": text}, 40))


def test_the_code_the_callid_and_the_command_are_there() -> None:
    shown = "\n".join(item_lines(ITEM))
    for part in ("3f9a2c1b0d", "t1/c1", "coder/k", "bash__exec", "ls", "0" * 64, "denied if not answered by"):
        assert part in shown
    assert command_lines(ITEM) == ["answer it with: gdn approve yes 3f9a2c1b0d   or: gdn approve no 3f9a2c1b0d"]
    assert "gdn approve answer 3f9a2c1b0d" in command_lines({**ITEM, "kind": "question"})[0]
    assert list_lines([], 0) == ["nothing waits for a person"]
    assert list_lines([ITEM], 2)[-1] == "and 2 more"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("columns", [24, 40, 80, 100])
def test_no_text_looks_like_a_line_of_the_kernel_however_it_wraps(place: str, columns: int) -> None:
    labels = ("tool", "rule", "workdir", "covers", "digest", "asked", "state", "agent")
    forged = [f"{label:<8} {edge}forged" for label in labels for edge in ("", OUTSIDE)]
    for before in range(columns + 1):
        text = "x" * before + (" " * 3).join(forged) + "\n" + "\n".join(forged)
        for line in item_lines({**ITEM, **PLACES[place](text)}, columns):
            assert line.startswith(MARK) and len(line) < columns
            said = line.removeprefix(MARK)
            kernels = said.partition(OUTSIDE)[0]
            assert "forged" not in kernels and not kernels.startswith("x"), line
            if place == "args" and said.startswith("workdir"):
                assert said == f"workdir  {OUTSIDE}/w"


@pytest.mark.parametrize("columns", [40, 80])
def test_lists_have_one_row_for_each_line(columns: int) -> None:
    text = "y" * 200 + "\n3f9a2c1b0d  approved by uid 0"
    told = {"decidedMs": 0, "how": "denied", "what": text, "uid": 7, "reason": text}
    lines = list_lines([{**ITEM, "instanceKey": text, "message": text}], 0, columns)
    assert all(len(line) < columns for line in lines)
    assert all(len(line) < columns for line in answered_lines([{**ITEM, **told, "instanceKey": text}], 0, columns))
    assert [line for line in lines if not line.startswith((MARK, "3f9a2c1b0d  1970"))] == []


def test_letters_that_look_like_others_are_marked() -> None:
    shown = "\n".join(
        item_lines({**ITEM, "args": {"url": "https://b\u0430nk.example/\u0441\u0435"}, "workdir": "/h\u043eme"})
    )
    assert r"b\\u0430nk.example/\\u0441\\u0435".replace("\\\\", "\\") in shown
    assert "/h\\u043eme" in shown


@pytest.mark.parametrize("name", ["list", "show", "yes", "no", "answer"])
def test_json_works_with_all_of_them(name: str) -> None:
    assert isinstance(approve, click.Group)
    options = {option for parameter in approve.commands[name].params for option in parameter.opts}
    assert "--json" in options


def test_an_answer_fits_the_schema_of_its_question() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert answer_issues(schema, {"name": "Kim"}) == []
    for wrong in ({"name": 5}, {}, "Kim", None, ["Kim"]):
        assert answer_issues(schema, wrong), wrong
    assert answer_issues(None, 5) == [], "a question without a schema takes any value"


# --- a yes is for what was shown ------------------------------------------------------------------------------------

LONG = "\n".join(["x = 1"] * (MAX_LINES // 2 + 50) + ["pay('mallory')"] + ["x = 2"] * (MAX_LINES // 2 + 50))


@pytest.mark.parametrize("long", [{"script": LONG, "covers": 20}, {"args": {"lines": LONG.split("\n")}}])
def test_the_middle_of_a_long_item_is_announced_and_stands_in_the_whole(long: dict[str, Any]) -> None:
    item = {**ITEM, **long}
    first, whole = item_lines(item), item_lines(item, whole=True)
    assert is_long(item) and not is_long(ITEM)
    assert not any("mallory" in line for line in first) and any("mallory" in line for line in whole)
    (gap,) = [line for line in first if "are not shown here" in line]
    assert OUTSIDE not in gap, "it is the kernel's word"
    assert whole[-1] == f"{MARK}whole    sha256:{whole_digest(item)}"
    assert not any("whole    " in line for line in (*first, *item_lines(ITEM, whole=True)))
    assert [line for line in command_lines(item) if "gdn approve show 3f9a2c1b0d" in line]


def test_what_a_list_leaves_out_is_long_and_another_content_has_another_digest() -> None:
    assert is_long({**ITEM, "args": None, "argsBytes": 99_999})
    assert is_long({**ITEM, "covers": 20})
    item = {**ITEM, "script": LONG, "covers": 20}
    assert whole_digest(item) != whole_digest({**item, "script": LONG.replace("mallory", "alice")})


class Session:
    """The broker has this item."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self.asked: list[Mapping[str, Any]] = []

    def on(self, frame_type: str, call: Callable[[], None]) -> None:
        """Nothing changes here."""

    async def admin(self, question: Mapping[str, Any], answer_s: float) -> dict[str, Any]:
        self.asked.append(question)
        return self.item if question["op"] == "approve.show" else {"code": self.item["code"], "state": "approved"}


class Prompt:
    """A person who says these words."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)

    async def question(self, text: str) -> str:
        return self.words.pop(0)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["yes", "later"], ["approve.show"]),
        (["yes", "yes"], ["approve.show", "approve.answer"]),
        (["no"], ["approve.answer"]),
    ],
)
def test_a_yes_on_a_terminal_asks_for_the_whole_once(
    words: list[str], asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session({**ITEM, "script": LONG, "covers": 20})
    listed = {**session.item, "script": None}

    async def ask() -> None:
        await Asked(session)._ask(listed, Prompt(*words))  # type: ignore[arg-type]

    asyncio.run(ask())
    assert [question["op"] for question in session.asked] == asked
    assert ("mallory" in capsys.readouterr().err) is (words[0] == "yes")


@pytest.mark.parametrize(
    ("command", "kind"), [(["yes", "3f9a2c1b0d"], "approval"), (["answer", "3f9a2c1b0d", "5"], "question")]
)
def test_the_commands_want_the_digest_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, command: list[str], kind: str
) -> None:
    item = {**ITEM, "kind": kind, "args": {"lines": LONG.split("\n")}}
    asked: list[str] = []

    def ask(bundle: str | None, question: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(question["op"])
        return item if question["op"] == "approve.show" else {"code": item["code"], "state": "approved"}

    monkeypatch.setattr(commands, "ask_broker", ask)
    digest = whole_digest(item)
    for wrong in ([], ["--whole", digest[:4]], ["--whole", "0" * 64]):
        done = CliRunner().invoke(commands.approve, [*command, *wrong])
        assert isinstance(done.exception, GoondanError) and done.exception.info.code == "E_USAGE", done
        assert digest[:8] not in str(done.exception.info), "only the whole says it"
    assert "approve.answer" not in asked
    for right in (digest[:8], f"sha256:{digest}"):
        assert CliRunner().invoke(commands.approve, [*command, "--whole", right]).exit_code == 0


@pytest.mark.parametrize("agrees", [False, True])
def test_a_pattern_is_shown_at_a_terminal_before_it_is_agreed_to(monkeypatch: pytest.MonkeyPatch, agrees: bool) -> None:
    asked: list[Mapping[str, Any]] = []

    def ask(bundle: str | None, question: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return ITEM if question["op"] == "approve.show" else {"code": ITEM["code"], "state": "approved"}

    monkeypatch.setattr(commands, "ask_broker", ask)
    monkeypatch.setattr(output, "can_ask", lambda: True)
    monkeypatch.setattr(output, "confirmed", lambda question: agrees)
    done = CliRunner().invoke(commands.approve, ["yes", ITEM["code"], "--pattern", "command=git \u202epush"])
    assert OUTSIDE + "command: git \\u202epush" in done.output
    assert "git status; rm -rf ." in done.output
    decided = [question["always"] for question in asked if question["op"] == "approve.answer"]
    assert decided == ([{"command": "git \u202epush"}] if agrees else [])
    if not agrees:
        assert isinstance(done.exception, GoondanError) and done.exception.info.code == "E_CANCELLED"


def test_lasting_yeses_are_listed_with_marks_and_with_who_agreed() -> None:
    sly = f"x\n{MARK}77e0b1c2d3  by uid 0"
    yes = {"code": "77e0b1c2d3", "agent": "coder", "tool": "bash__exec", "uid": 1000, "atMs": 0, "what": sly}
    lines = always_lines([yes, {**yes, "argument": "command", "prefix": "ls \x1b[2J", "stale": True}])
    heads = [line for line in lines if not line.startswith(MARK)]
    assert heads[0] == "77e0b1c2d3  1970-01-01T00:00:00Z  by uid 1000  coder"
    assert len(heads) == 2
    assert lines[-1] == MARK + "it answers nothing: its rule was changed, or is gone"
    assert all(OUTSIDE in line for line in lines[:-1] if line not in heads)
    assert any("command begins with ls \\x1b[2J" in line for line in lines)
    assert always_lines([]) == ["there is no lasting yes"]


# --- files that an approved command names ---------------------------------------------------------------------------


def test_the_small_files_that_a_call_names_are_shown_with_their_digests(tmp_path: Path) -> None:
    work, outside = tmp_path / "w", tmp_path / "secret"
    (work / "sub").mkdir(parents=True)
    outside.write_text("secret")
    (work / "run.py").write_text("print(1)")
    (work / "sub" / "가.sh").write_text("true")
    (work / "large").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    (work / "link").symlink_to(outside)
    os.mkfifo(work / "pipe")
    command = f"python run.py && sh './sub/가.sh' <large link pipe . sub nothing ../secret {outside}\nrun.py\x00"
    item = {**ITEM, "workdir": str(work), "args": {"command": command, "more": [{"in": "sub/가.sh"}]}}
    found = with_files(item)["files"]
    assert sorted(found) == ["./sub/가.sh", "run.py", "sub/가.sh"]
    before = next(line for line in item_lines(with_files(item)) if "run.py" in line and "sha256:" in line)
    assert found["run.py"] in before
    (work / "run.py").write_text("print(2)")
    assert with_files(item)["files"]["run.py"] != found["run.py"], "another file is told from it"


def test_names_without_end_cost_little(tmp_path: Path) -> None:
    for at in range(MAX_FILES + 5):
        (tmp_path / f"f{at}").write_text("x")
    names = " ".join(f"f{at}" for at in range(100_000))
    item = {**ITEM, "workdir": str(tmp_path), "args": {"command": names}}
    assert len(with_files(item)["files"]) == MAX_FILES
    assert with_files({**item, "workdir": None})["files"] == {}


def test_a_link_that_a_tool_puts_in_the_way_shows_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, outside, real = tmp_path / "work", tmp_path / "outside", os.open
    for folder in (work / "src", outside):
        folder.mkdir(parents=True)
        (folder / "run.py").write_text("print()")
    item = {"args": {"command": "python src/run.py"}, "workdir": str(work)}
    assert [*with_files(item)["files"]] == ["src/run.py"]

    def swapped(path: str, flags: int) -> int:
        if path.endswith("run.py"):
            (work / "src").rename(work / "old")
            (work / "src").symlink_to(outside)
        return real(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    assert with_files(item)["files"] == {}
