"""Twists of changesets: 004 §8 (BUNDLE-02 to BUNDLE-07) and docs/changesets.md, with a real repository."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from goondan.features.changesets.bundle.recovery import locked
from goondan.features.changesets.process.engine import Engine
from goondan.features.changesets.wire import CommittedChangeset, OpenedChangeset
from goondan.schemas.wire.errors import GoondanError
from tests.features.changesets.process.changeset_bundles import Bundles, git

pytestmark = pytest.mark.feature("changesets")

PROMPT = "prompts/system.md"
YAML = "goondan.yaml"


@pytest.fixture
def bundles(tmp_path: Path) -> Bundles:
    return Bundles(tmp_path)


def put(opened: OpenedChangeset, name: str, data: str | bytes) -> Path:
    path = Path(opened.workdir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def code(answer: CommittedChangeset) -> str:
    return answer.status if answer.error is None else answer.error.code


def edit(opened: OpenedChangeset, old: str, new: str) -> None:
    """Change the documents of the bundle."""
    path = Path(opened.workdir, YAML)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_corrected_until_it_fits(bundles: Bundles) -> None:
    """A rejected one stays: denied, invalid, denied again, then right; and once more after that."""
    opened = bundles.open()
    script = put(opened, "tools/words.py", "handlers = {}\n")
    assert code(bundles.end(opened)) == "E_CHANGESET_DENIED"
    script.write_text(bundles.files["tools/words.py"])
    edit(opened, "systemRef: prompts/system.md", "systemRef: prompts/nowhere.md")
    assert code(bundles.end(opened)) == "E_CHANGESET_INVALID"
    put(opened, "prompts/nowhere.md", "here now\n")
    os.chmod(Path(opened.workdir, "prompts/nowhere.md"), 0o755)
    assert code(bundles.end(opened)) == "E_CHANGESET_DENIED"
    os.chmod(Path(opened.workdir, "prompts/nowhere.md"), 0o644)
    answer = bundles.end(opened)
    assert (code(answer), len(bundles.log)) == ("ok", 2)
    assert bundles.end(opened) == answer, "the same answer, and no second commit"
    assert len(bundles.log) == 2


def test_nothing_in_the_end(bundles: Bundles) -> None:
    """Changed and changed back, written as it was, touched: no commit."""
    opened = bundles.open()
    path = put(opened, PROMPT, "other\n")
    path.write_text(bundles.files[PROMPT])
    put(opened, "notes/a.md", "x").unlink()
    os.utime(path, (1, 1))
    Path(opened.workdir, "empty").mkdir()
    answer = bundles.end(opened)
    assert (answer.status, answer.new_ref, answer.base_ref) == ("ok", f"git:{bundles.head}", opened.base_ref)
    assert len(bundles.log) == 1


NAMES = [
    ".git",
    ".git/config",
    ".GIT/config",
    ".gitattributes",
    "notes/.gitattributes",
    ".gitmodules",
    ".gitignore",
    ".git ",
    "git~1",
    ".g\u200cit",
    "notes/a.md ",
    "notes/a.md.",
    "notes/con.md",
    "notes/NUL",
    "notes/aux.x.md",
    "COM1/a.md",
    "notes/lpt² .md",
    "notes/a?.md",
    "notes/<a>.md",
    "notes/a:b.md",
    "notes/a\\b.md",
    "notes/a\nb.md",
    "notes/a\x07b.md",
    "notes/a\u202eb.md",
    "prompts/System.md",
    "Goondan.yaml",
    "tools/notes.md",
    "extensions/notes.md",
    "x.py",
    "notes/x.txt",
    "Makefile",
]


def test_names_that_are_something_else_to_somebody(bundles: Bundles) -> None:
    """Each alone; nothing of it may reach the checkout, whatever it is refused with."""
    wrong = []
    opened = bundles.open()
    for name in NAMES:
        if name == ".git":
            continue
        path = Path(opened.workdir, name)
        if name.startswith(".git/"):
            path = Path(opened.workdir, "notes/.git/config")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("[core]\n\thooksPath = /tmp\n")
        except OSError:
            continue
        found = code(bundles.end(opened))
        if found != "E_CHANGESET_DENIED":
            wrong.append((name, found))
        if found == "ok":
            opened = bundles.open()
            continue
        path.unlink()
        shutil.rmtree(Path(opened.workdir, "notes"), ignore_errors=True)
        shutil.rmtree(Path(opened.workdir, ".GIT"), ignore_errors=True)
    assert wrong == []
    assert len(bundles.log) == 1
    assert bundles.status == ""


def test_kinds_of_files_that_are_no_files(bundles: Bundles) -> None:
    opened = bundles.open()
    prompt = Path(opened.workdir, PROMPT)

    def link() -> None:
        prompt.unlink()
        prompt.symlink_to("/etc/passwd")

    def inside() -> None:
        prompt.unlink()
        prompt.symlink_to("../goondan.yaml")

    def folder() -> None:
        prompt.unlink()
        prompt.mkdir()
        (prompt / "a.md").write_text("x")

    def fifo() -> None:
        prompt.unlink()
        os.mkfifo(prompt)

    def parent() -> None:
        shutil.rmtree(prompt.parent)
        prompt.parent.symlink_to("/etc")

    def hard() -> None:
        prompt.unlink()
        os.link(Path(opened.workdir, YAML), prompt)

    for harm in (link, inside, folder, fifo, parent):
        harm()
        assert code(bundles.end(opened)) in ("E_CHANGESET_DENIED", "E_CHANGESET_INVALID"), harm.__name__
        if prompt.parent.is_symlink():
            prompt.parent.unlink()
        shutil.rmtree(prompt.parent, ignore_errors=True)
        put(opened, PROMPT, bundles.files[PROMPT])
    hard()
    assert code(bundles.end(opened)) in ("ok", "E_CHANGESET_DENIED", "E_CHANGESET_INVALID")
    assert bundles.status == ""


DOCUMENTS: list[tuple[str, str, str]] = [
    ("extensions: [Extension/prompts]", "extensions: []", "E_CHANGESET_DENIED"),
    ("config: {level: 1}", "config: {level: 1, transport: {command: [sh]}}", "E_CHANGESET_DENIED"),
    ("config: {level: 1}", "config: {level: 1, sandbox: {network: true}}", "E_CHANGESET_DENIED"),
    ("config: {level: 1}", "config: {a: {permissions: [agents]}}", "E_CHANGESET_DENIED"),
    ("entry: ./extensions/prompts.py", "entry: ./extensions/other.py", "E_CHANGESET_INVALID"),
    ("entry: ./tools/words.py", "entry: ./tools/words.py\n  sandbox: {network: public}", "E_CHANGESET_DENIED"),
    ("provider: embedded", "provider: openai, model: m", "E_CHANGESET_INVALID"),  # without a key
    ("provider: embedded", "provider: openai, model: m, apiKey: {value: k}", "E_CHANGESET_DENIED"),
    ("modelConfig: {modelRef: Model/console}", "modelConfig: {modelRef: Model/console, params: {a: 1}}", ""),
    ("metadata: {name: assistant}", "metadata: {name: helper}", ""),
    ("metadata: {name: demo}", "metadata: {name: demo, annotations: {a: b}}", ""),
    ("entryAgent: Agent/assistant", "entryAgent: Agent/nobody", ""),
    ("extensions: [Extension/prompts]", "extensions: [Extension/prompts]\n  tools: [Tool/bash]", "E_CHANGESET_DENIED"),
    ("extensions: [Extension/prompts]", "extensions: [Extension/prompts]\n  policy: {}", "E_CHANGESET_DENIED"),
    ("extensions: [Extension/prompts]", "extensions: [Extension/prompts, Extension/prompts]", ""),
    ("prompt: {systemRef: prompts/system.md}", "prompt: {systemRef: ../../../../etc/hostname}", ""),
    ("prompt: {systemRef: prompts/system.md}", "prompt: {systemRef: /etc/hostname}", ""),
    ("prompt: {systemRef: prompts/system.md}", "prompt: {system: 5}", "E_CHANGESET_INVALID"),
    ("kind: Swarm", "kind: Robot", ""),
    ("kind: Swarm", "kind: Swarm\nkind: Swarm", ""),
    ("apiVersion: goondan.ai/v1\nkind: Model", "apiVersion: v9\nkind: Model", ""),
    ("---\n", "---\napiVersion: goondan.ai/v1\nkind: Agent\nmetadata: {name: spy}\nspec: {}\n---\n", ""),
]


def test_documents(bundles: Bundles) -> None:
    """One change of a document each; none of these is an extension's to make, or none is a bundle."""
    opened = bundles.open()
    wrong: list[tuple[Any, str]] = []
    for old, new, wanted in DOCUMENTS:
        put(opened, YAML, bundles.files[YAML])
        edit(opened, old, new)
        found = code(bundles.end(opened))
        if found not in ([wanted] if wanted else ["E_CHANGESET_DENIED", "E_CHANGESET_INVALID"]):
            wrong.append((new, found))
            if found == "ok":
                opened = bundles.open()
    for data in (b"", b"\xff\xfe\x00", b"{" * 100_000, b"a: &a [*a]\n", b"- 1\n", b"%PDF\x00", b"x" * (2 << 20)):
        put(opened, YAML, data)
        found = code(bundles.end(opened))
        if found not in ("E_CHANGESET_DENIED", "E_CHANGESET_INVALID"):
            wrong.append((data[:10], found))
    assert wrong == []
    Path(opened.workdir, YAML).unlink()
    assert code(bundles.end(opened)) in ("E_CHANGESET_DENIED", "E_CHANGESET_INVALID")
    assert wrong == []
    assert (len(bundles.log), bundles.status) == (1, "")
    put(opened, YAML, "# A remark of its own.\n" + bundles.files[YAML].replace("{level: 1}", "{level: 2}"))
    answer = bundles.end(opened)
    assert code(answer) == "ok", answer
    assert answer.summary is not None
    assert answer.summary.files_changed == [YAML]


@pytest.mark.parametrize(
    "prompt", [b"", b"\n", "한국어 🙂\n".encode(), b"no line end", b"a\r\nb\r\n", b"\xef\xbb\xbfbom\n", b"x" * 200_000]
)
def test_prompts_arrive_byte_by_byte(bundles: Bundles, prompt: bytes) -> None:
    opened = bundles.open()
    put(opened, PROMPT, prompt)
    answer = bundles.end(opened)
    assert code(answer) == "ok", answer.error
    assert bundles.checkout()[PROMPT] == prompt
    assert bundles.status == ""


def test_too_much(bundles: Bundles) -> None:
    opened = bundles.open()
    for number in range(201):
        put(opened, f"notes/{number}.md", "x")
    assert code(bundles.end(opened)) != "ok"
    Path(opened.workdir, "notes/0.md").unlink()
    put(opened, "notes/1.md", b"x" * ((1 << 20) + 1))
    assert code(bundles.end(opened)) != "ok"
    for number in range(1, 10):
        put(opened, f"notes/{number}.md", b"x" * (1 << 20))
    assert code(bundles.end(opened)) != "ok"
    assert (len(bundles.log), bundles.status) == (1, "")


def test_two_that_meet(bundles: Bundles) -> None:
    """Opened together: other lines merge, the same lines do not, and the loser may look again and commit."""
    first, second, third = (bundles.open() for _ in range(3))
    lines = bundles.files[PROMPT].splitlines(keepends=True)
    put(first, PROMPT, "".join(["FIRST\n", *lines[1:]]))
    put(second, PROMPT, "".join([*lines[:-1], "LAST\n"]))
    put(third, PROMPT, "".join(["third\n", *lines[1:]]))
    assert [code(bundles.end(one)) for one in (first, second, third)] == ["ok", "ok", "E_CHANGESET_CONFLICT"]
    assert bundles.checkout()[PROMPT].decode() == "".join(["FIRST\n", *lines[1:-1], "LAST\n"])
    again = bundles.open()
    assert Path(again.workdir, PROMPT).read_bytes() == bundles.checkout()[PROMPT]
    put(again, PROMPT, "third after all\n")
    assert code(bundles.end(again)) == "ok"


def test_one_takes_away_what_another_changes_or_adds(bundles: Bundles) -> None:
    bundles.write(bundles.root, "notes/a.md", "a\n")
    bundles.write(bundles.root, "notes/b.md", "b\n")
    bundles.commit("Notes")
    removes, changes, same, adds, other = (bundles.open() for _ in range(5))
    Path(removes.workdir, "notes/a.md").unlink()
    put(changes, "notes/a.md", "changed\n")
    Path(same.workdir, "notes/a.md").unlink()
    put(adds, "notes/new.md", "one\n")
    put(other, "notes/new.md", "two\n")
    assert code(bundles.end(removes)) == "ok"
    assert code(bundles.end(changes)) == "E_CHANGESET_CONFLICT"
    assert code(bundles.end(same)) == "ok", "both want the same"
    assert code(bundles.end(adds)) == "ok"
    assert code(bundles.end(other)) == "E_CHANGESET_CONFLICT"
    assert bundles.checkout()["notes/new.md"] == b"one\n"
    assert bundles.status == ""


def test_work_of_a_person_in_the_way(bundles: Bundles) -> None:
    """Where a new file would go: a file, a folder, a link, a socket, a file on the way. Never overwritten, and nothing
    of the refused commit keeps later ones from being made."""
    opened = bundles.open()
    put(opened, "notes/mine.md", "the agent's\n")
    notes = bundles.root / "notes"
    place = notes / "mine.md"

    def folder() -> None:
        bundles.write(place, "inner.txt", "a person's\n")

    def on_the_way() -> None:
        notes.rmdir()
        notes.write_text("a person's\n")

    def link_on_the_way() -> None:
        notes.rmdir()
        notes.symlink_to("prompts")

    for harm in (
        lambda: place.write_text("a person's\n"),
        folder,
        lambda: place.symlink_to("nowhere"),
        lambda: place.symlink_to("../goondan.yaml"),
        lambda: os.mkfifo(place),
        on_the_way,
        link_on_the_way,
    ):
        notes.mkdir()
        harm()
        before = bundles.checkout()
        assert code(bundles.end(opened)) == "E_CHANGESET_CONFLICT"
        with locked(bundles.engine.folder, wait=True):
            bundles.engine.recover()
        assert bundles.checkout() == before
        if notes.is_dir() and not notes.is_symlink():
            shutil.rmtree(notes)
        else:
            notes.unlink()
    assert code(bundles.end(opened)) == "ok"
    assert bundles.remains == []


WRONG_IDS: list[Any] = ["", "x", "../x", "/etc", "0" * 16, "F" * 16, "한", "a" * 100_000, "0\n", "*", "."]


def of(bundles: Bundles, changeset_id: Any, agent: str = "assistant", key: str = "k") -> str:
    """What a commit of this changeset comes to, for whoever asks."""
    try:
        return code(bundles.engine.commit(changeset_id, "m", agent=agent, instance_key=key, look=lambda: None))
    except GoondanError as error:
        return error.code


def test_ids_that_are_nobodys(bundles: Bundles) -> None:
    opened = bundles.open()
    put(opened, PROMPT, "new\n")
    for wrong in [*WRONG_IDS, opened.changeset_id.upper() + " ", opened.changeset_id[:-1]]:
        if wrong == opened.changeset_id:
            continue
        assert of(bundles, wrong) not in ("ok", ""), wrong
    for agent, key in (("other", "k"), ("assistant", "other"), ("assistant", "K"), ("", "")):
        assert of(bundles, opened.changeset_id, agent, key) not in ("ok", ""), (agent, key)
    assert len(bundles.log) == 1
    assert code(bundles.end(opened)) == "ok"


MESSAGES = ["", "--amend", "a\n\nChangeset-Id: forged", "한글 \x00\x1b[2J", "x" * 50_000, "\ud800"]


def test_messages_are_only_words(bundles: Bundles) -> None:
    for number, message in enumerate(MESSAGES):  # each of them a commit
        opened = bundles.open()
        put(opened, PROMPT, f"{number}\n")
        answer = bundles.end(opened, message)
        assert code(answer) == "ok", (message[:20], answer.error)
        body = git(bundles.repository, "log", "-1", "--format=%B")
        assert "\x1b" not in body
        trailer = [line for line in body.strip().splitlines() if line.startswith("Changeset-Id:")][-1]
        assert trailer == f"Changeset-Id: {opened.changeset_id}", message[:20]
    assert len(bundles.log) == 1 + len(MESSAGES)


def test_a_worktree_that_is_gone_or_another(bundles: Bundles) -> None:
    gone, moved = bundles.open(), bundles.open()
    shutil.rmtree(gone.workdir)
    try:
        told = code(bundles.end(gone))
    except GoondanError as error:
        told = error.code
    assert told.startswith("E_CHANGESET_") or told == "E_NOT_FOUND"
    shutil.rmtree(moved.workdir)
    Path(moved.workdir).symlink_to(bundles.root)
    try:
        told = code(bundles.end(moved))
    except GoondanError as error:
        told = error.code
    assert told != "ok"
    assert (len(bundles.log), bundles.status) == (1, "")
    opened = bundles.open()
    put(opened, PROMPT, "new\n")
    assert code(bundles.end(opened)) == "ok"


def test_the_worktrees_own_git_says_what_it_likes(bundles: Bundles) -> None:
    opened = bundles.open()
    own = Path(opened.workdir, ".git")
    own.unlink() if own.is_file() else shutil.rmtree(own)
    own.mkdir()
    (own / "config").write_text("[core]\n\tfsmonitor = touch /tmp/owned-by-twist\n\tworktree = /\n")
    (own / "HEAD").write_text("ref: refs/heads/evil\n")
    put(opened, PROMPT, "new\n")
    assert code(bundles.end(opened)) in ("ok", "E_CHANGESET_DENIED")
    assert not os.path.exists("/tmp/owned-by-twist")
    assert bundles.status == ""


def test_ninth_of_an_instance(bundles: Bundles) -> None:
    opened = [bundles.open() for _ in range(8)]
    with pytest.raises(GoondanError) as refused:
        bundles.open()
    assert refused.value.code.startswith("E_")
    assert bundles.open(key="other").workdir
    put(opened[3], PROMPT, "new\n")
    assert code(bundles.end(opened[3])) == "ok"
    assert bundles.open().workdir, "one is through"
    assert (
        bundles.open(request="same", key="other").changeset_id == bundles.open(request="same", key="other").changeset_id
    )


def test_an_engine_of_another_process_goes_on(bundles: Bundles) -> None:
    """The worker that opened it is gone: what it said still holds."""
    opened = bundles.open()
    put(opened, PROMPT, "new\n")
    bundles.engine = Engine(bundles.options, bundles.powers())
    answer = bundles.end(opened)
    assert code(answer) == "ok"
    bundles.engine = Engine(bundles.options, bundles.powers())
    assert bundles.end(opened) == answer
