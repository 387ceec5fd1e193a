"""The checker of the walls around features finds each way over them, and every name."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.features import Feature
from scripts import feature_walls
from scripts.feature_walls import import_faults, name_faults, named, named_in_core, shrunk

ROWS = (
    Feature("notes", ("wire", "broker", "agent", "command", "api")),
    Feature("rules", ("wire", "broker", "agent", "host", "jail", "process", "bundle"), needs=("notes",)),
)
HOME = "goondan.features"


def fault(module: str, other: str) -> str:
    return "; ".join(import_faults({module: {other}, other: set()}, ROWS))


@pytest.mark.parametrize(
    ("module", "other"),
    [
        (f"{HOME}.notes.agent", "goondan.agentproc.machine.turn"),
        (f"{HOME}.notes.agent.inner", f"{HOME}.notes.agent.other"),
        (f"{HOME}.notes.agent", "goondan.schemas.wire.frames"),
        (f"{HOME}.notes.agent", f"{HOME}.notes.wire"),
        (f"{HOME}.notes.broker", "goondan.kernel.broker.state.bus"),
        (f"{HOME}.rules.agent", f"{HOME}.notes.api"),
        (f"{HOME}.rules.agent", f"{HOME}.notes.wire"),
        (f"{HOME}.rules.host", "goondan.toolhost.calls"),
        (f"{HOME}.rules.jail.program", "goondan.toolhost.inside"),
        (f"{HOME}.notes.command", f"{HOME}.notes.wire"),
        ("goondan.kernel.broker.__main__", HOME),
        ("goondan.kernel.broker.__main__", "goondan.schemas.wire.frames"),
        (f"{HOME}.notes", "goondan.schemas.wire.frames"),
    ],
)
def test_what_may_be_imported(module: str, other: str) -> None:
    assert fault(module, other) == ""


@pytest.mark.parametrize(
    ("module", "other", "said"),
    [
        ("goondan.kernel.broker.state.bus", f"{HOME}.notes.broker", "the core imports no feature"),
        ("goondan.schemas.wire.frames", f"{HOME}.notes.wire", "the core imports no feature"),
        (f"{HOME}.notes.agent", "goondan.kernel.broker.state.bus", "agent is not loaded by kernel"),
        (f"{HOME}.notes.broker", "goondan.agentproc.machine.turn", "broker is not loaded by agentproc"),
        (f"{HOME}.notes.wire", "goondan.kernel.bundle.rules.plan", "wire is not loaded by kernel"),
        (f"{HOME}.rules.host", "goondan.kernel.bundle.rules.plan", "host is not loaded by kernel"),
        (f"{HOME}.notes.broker", f"{HOME}.notes.agent", "loaded by different processes"),
        (f"{HOME}.notes.agent", f"{HOME}.notes.command", "loaded by different processes"),
        (f"{HOME}.rules.jail", f"{HOME}.rules.api", "loaded by different processes"),
        (f"{HOME}.rules.agent", f"{HOME}.notes.agent", "it takes api and wire only"),
        (f"{HOME}.notes.agent", f"{HOME}.rules.wire", "the row of notes does not need rules"),
        (f"{HOME}.notes.broker", HOME, "a feature does not read the table"),
        (f"{HOME}.notes.more", "goondan.schemas.wire.frames", "no process loads more"),
        (f"{HOME}.notes", f"{HOME}.notes.wire", "no process loads it"),
    ],
)
def test_an_import_over_a_wall(module: str, other: str, said: str) -> None:
    assert said in fault(module, other)


def test_a_wall_is_not_gone_around() -> None:
    """An interface may call its own process, and then no file of another process may take it."""
    api = {f"{HOME}.notes.api": {"goondan.kernel.bundle.rules.plan"}, "goondan.kernel.bundle.rules.plan": set[str]()}
    assert import_faults(api | {f"{HOME}.rules.broker": {f"{HOME}.notes.api"}}, ROWS) == []
    assert import_faults(api | {f"{HOME}.rules.agent": {f"{HOME}.notes.api"}}, ROWS) == [
        f"{HOME}.rules.agent reaches goondan.kernel.bundle.rules.plan, which another process loads"
    ]


@pytest.mark.parametrize("module", ["launcher.program", "drop_privileges", "privileges.tree", "inside"])
def test_what_has_privileges_reaches_no_table(module: str) -> None:
    graph = {f"goondan.toolhost.{module}": {"goondan.toolhost.host"}, "goondan.toolhost.host": {HOME}, HOME: set[str]()}
    assert import_faults(graph, ROWS) == [
        f"goondan.toolhost.{module} reaches {HOME}: it has privileges, or runs in a jail, and loads nothing by a table"
    ]


# --- names ----------------------------------------------------------------------------------------------------------

WORDS = {"notes": ["note", "notes"], "dead_letters": ["dead_letter"]}


@pytest.mark.parametrize(
    "source",
    [
        "notes = 1",
        "x.take_note",
        "def f(a_note): ...",
        "f(note=1)",
        "class NoteTaken: ...",
        "def note(): ...",
        "import notes.x",
        "from a.notes import b",
        "from a import note",
        "x = 'note.taken'",
        "x = 'E_NOTE_LOST'",
        "x = 'as E_NOTE_LOST says'",
        "x = 'see `gdn notes`'",
        "def f():\n    'about'\n    return 'note'",
        "HTTPNote = 1",
    ],
)
def test_a_name_that_is_found(source: str) -> None:
    assert named("kernel/x.py", source, WORDS) == {"notes"}


@pytest.mark.parametrize(
    "source", ["'''About E_NOTE_LOST.'''", "# note", "x = 'a note'", "footnote = notebook = 1", "def f():\n    'note'"]
)
def test_a_text_that_is_no_name(source: str) -> None:
    assert named("kernel/x.py", source, WORDS) == set()


def test_the_name_of_a_file_is_one() -> None:
    assert named("kernel/broker/dead_letter.py", "", WORDS) == {"dead_letters"}


def test_new_names_and_clean_modules_are_faults() -> None:
    names = {"words": WORDS, "today": {"notes": ["a.py", "b.py"]}}
    assert name_faults({"a.py": {"notes"}, "b.py": {"notes"}}, names, ["notes"]) == []
    assert name_faults({"a.py": {"notes"}, "c.py": {"notes"}}, names, ["notes", "new"]) == [
        "names.yaml says no words for the feature new",
        "c.py names the feature notes",
        "b.py does not name notes any more: python -m scripts.feature_walls --update",
    ]


def test_exceptions_have_a_reason_and_are_few() -> None:
    entry = {"module": "a.py", "feature": "notes"}
    reason = {"reason": "it counts them"}
    found = {f"{number}.py": {"notes"} for number in range(13)}
    assert name_faults({"a.py": {"notes"}}, {"words": WORDS, "exceptions": [entry | reason]}, []) == []
    assert "no reason" in name_faults({"a.py": {"notes"}}, {"words": WORDS, "exceptions": [entry]}, [])[0]
    many = [entry | reason | {"module": module} for module in found]
    assert name_faults(found, {"words": WORDS, "exceptions": many}, []) == [
        "names.yaml has 13 exceptions, and 12 are allowed"
    ]


def test_the_list_follows_moved_modules_and_never_grows() -> None:
    names = {"words": WORDS, "today": {"notes": ["a.py", "b.py"], "dead_letters": ["a.py"]}}
    assert shrunk({"c.py": {"notes"}}, names) == {"notes": ["c.py"]}
    with pytest.raises(ValueError, match=r"3 modules name notes, and 2 did: c.py"):
        shrunk({name: {"notes"} for name in ("a.py", "b.py", "c.py")}, names)


def test_the_list_is_written_anew_below_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("schemas", "kernel", "agentproc", "toolhost", "features/notes"):
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "kernel" / "x.py").write_text("note = 1\n")
    (tmp_path / "features" / "notes" / "wire.py").write_text("note = 1\n")
    file = tmp_path / "names.yaml"
    file.write_text("# why\nwords: {notes: [note]}\nexceptions: []\n\ntoday:\n  notes:\n  - kernel/old.py\n")
    monkeypatch.setattr(feature_walls, "NAMES", file)
    monkeypatch.setattr(feature_walls, "named_in_core", lambda words: named_in_core(words, tmp_path))
    assert feature_walls.main(["--update"]) == 0
    assert file.read_text() == ("# why\nwords: {notes: [note]}\nexceptions: []\n\ntoday:\n  notes:\n  - kernel/x.py\n")
