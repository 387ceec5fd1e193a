"""Changesets of a bundle, with a real repository: what they become, what is refused, what a hostile worktree gets."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from goondan.features.changesets.bundle.git import References
from goondan.features.changesets.process import engine as engine_module
from goondan.features.changesets.process.engine import Engine
from goondan.features.changesets.wire import OpenedChangeset
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.tool_host_reports import WriteExposure
from tests.features.changesets.process.changeset_bundles import DOCUMENTS, Bundles, git


@pytest.fixture
def bundles(tmp_path: Path) -> Bundles:
    return Bundles(tmp_path)


def workdir(opened: OpenedChangeset) -> Path:
    return Path(opened.workdir)


@pytest.mark.requirement("BUNDLE-02")
@pytest.mark.requirement("BUNDLE-03")
def test_a_changeset_is_a_worktree_of_what_is_checked_out(bundles: Bundles) -> None:
    opened = bundles.open()

    assert opened.base_ref == f"git:{bundles.head}"
    assert opened.workdir.startswith(str(bundles.state))
    assert {name: (workdir(opened) / name).read_text() for name in bundles.files} == bundles.files
    assert opened.hint is not None
    assert opened.hint.bundle_root_in_workdir == "."
    assert opened.hint.recommended_files == ["goondan.yaml", "prompts/system.md"]
    assert opened.workdir in git(bundles.repository, "worktree", "list")
    assert git(workdir(opened), "status", "--porcelain") == ""


@pytest.mark.requirement("BUNDLE-04")
@pytest.mark.requirement("BUNDLE-05")
@pytest.mark.requirement("BUNDLE-06")
def test_a_commit_moves_branch_checkout_and_index(bundles: Bundles) -> None:
    base, opened = bundles.head, bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")
    bundles.write(opened.workdir, "notes/more.md", "more\n")

    assert bundles.status == ""  # nothing of it is in the bundle yet
    answer = bundles.end(opened, "chore: update\x00\x1b[31m the prompt")

    assert answer.status == "ok" and answer.error is None
    assert (answer.base_ref, answer.new_ref) == (f"git:{base}", f"git:{bundles.head}")
    assert answer.summary is not None
    assert answer.summary.files_changed == ["prompts/system.md"]
    assert answer.summary.files_added == ["notes/more.md"]
    assert answer.summary.files_deleted == []
    assert git(bundles.repository, "rev-parse", "main^").strip() == base
    assert bundles.checkout()["prompts/system.md"] == b"new\n"
    assert bundles.status == ""
    about = git(bundles.repository, "log", "-1", "--format=%an|%B")
    assert about.startswith("Agent/assistant|chore: update[31m the prompt\n")
    assert f"Changeset-Id: {opened.changeset_id}" in about
    assert not workdir(opened).exists()
    assert git(bundles.repository, "worktree", "list").count("\n") == 1
    assert bundles.end(opened) == answer  # asked again


def test_a_deleted_file_is_deleted(bundles: Bundles) -> None:
    bundles.write(bundles.root, "notes/old.md", "old\n")
    bundles.commit("A note")
    opened = bundles.open()
    (workdir(opened) / "notes/old.md").unlink()

    answer = bundles.end(opened)

    assert answer.summary is not None and answer.summary.files_deleted == ["notes/old.md"]
    assert not (bundles.root / "notes").exists()
    assert bundles.status == ""


def test_nothing_changed_is_no_commit(bundles: Bundles) -> None:
    base = bundles.head
    answer = bundles.end(bundles.open())

    assert (answer.status, answer.new_ref, bundles.head) == ("ok", f"git:{base}", base)


def test_a_bundle_in_a_folder_of_its_repository(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, "agents/one")
    opened = bundles.open()
    assert opened.hint is not None and opened.hint.bundle_root_in_workdir == "agents/one"
    bundles.write(opened.workdir, "agents/one/prompts/system.md", "new\n")
    bundles.write(bundles.repository, "elsewhere.txt", "the user's own\n")  # not the bundle's

    assert bundles.end(opened).status == "ok"
    assert bundles.checkout()["agents/one/prompts/system.md"] == b"new\n"

    outside = bundles.open()
    bundles.write(outside.workdir, "outside.md", "x\n")
    assert bundles.refused(outside) == "E_CHANGESET_DENIED"


@pytest.mark.requirement("BUNDLE-07")
def test_no_repository_and_no_commit(bundles: Bundles, tmp_path: Path) -> None:
    os.rename(bundles.repository / ".git", tmp_path / "gone")
    with pytest.raises(GoondanError) as none:
        bundles.open()
    git(bundles.repository, "init", "--quiet", "--initial-branch", "main")
    with pytest.raises(GoondanError) as empty:
        bundles.open()

    assert none.value.info.code == empty.value.info.code == "E_CHANGESET_IO"
    assert "git init" in (none.value.info.suggestion or "")


def test_a_repository_of_another_user_is_none(bundles: Bundles) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(bundles.repository / ".git", 12345, 12345)

    with pytest.raises(GoondanError) as caught:
        bundles.open()

    assert caught.value.info.code == "E_CHANGESET_IO" and "12345" in caught.value.info.message


@pytest.mark.requirement("BUNDLE-07")
@pytest.mark.parametrize("how", ["edited", "staged", "removed", "mode"])
def test_what_is_not_committed_is_not_overwritten(bundles: Bundles, how: str) -> None:
    opened = bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")
    mine = bundles.root / "README.txt"
    if how == "removed":
        mine.unlink()
    elif how == "mode":
        mine.chmod(0o755)
    else:
        mine.write_text("my own edit\n")
        if how == "staged":
            git(bundles.repository, "add", "README.txt")

    assert bundles.refused(opened) == "E_CHANGESET_CONFLICT"
    git(bundles.repository, "checkout", "--quiet", "HEAD", "--", ".")
    os.utime(mine, ns=(1, 1))  # touched, and the same
    assert bundles.end(opened).status == "ok"


def test_a_base_that_moved_merges_where_it_can(bundles: Bundles) -> None:
    first, second, third = bundles.open(), bundles.open(), bundles.open()
    bundles.write(first.workdir, "prompts/system.md", "FIRST\nline 2\nline 3\nline 4\nline 5\n")
    bundles.write(second.workdir, "prompts/system.md", "line 1\nline 2\nline 3\nline 4\nSECOND\n")
    bundles.write(third.workdir, "prompts/system.md", "THIRD\nline 2\nline 3\nline 4\nline 5\n")

    assert bundles.end(first).status == "ok"
    assert bundles.end(second).status == "ok"
    assert bundles.checkout()["prompts/system.md"] == b"FIRST\nline 2\nline 3\nline 4\nSECOND\n"
    assert bundles.refused(third) == "E_CHANGESET_CONFLICT"


def test_what_is_wrong_with_a_file_is_said_before_who_may_change_it(bundles: Bundles) -> None:
    opened = bundles.open()
    document = bundles.write(opened.workdir, "goondan.yaml", DOCUMENTS.replace("entryAgent:", "entryAgnt:"))
    bundles.write(opened.workdir, "notes.txt", "only the operator may add this\n")

    rejected = bundles.end(opened)

    assert rejected.error is not None
    assert rejected.error.code == "E_CHANGESET_INVALID" and "entryAgnt" in rejected.error.message
    document.write_text(DOCUMENTS)
    assert bundles.refused(opened) == "E_CHANGESET_DENIED"


@pytest.mark.requirement("BUNDLE-07")
def test_an_invalid_bundle_and_then_a_corrected_one(bundles: Bundles) -> None:
    opened = bundles.open()
    document = bundles.write(opened.workdir, "goondan.yaml", DOCUMENTS.replace("prompts/system.md", "prompts/none.md"))
    assert bundles.refused(opened) == "E_CHANGESET_INVALID"
    document.write_text(DOCUMENTS + "\n: :\n  - [")
    assert bundles.refused(opened) == "E_CHANGESET_INVALID"

    rejected = bundles.end(opened)
    assert rejected.status == "rejected" and rejected.error is not None and "goondan.yaml:" in rejected.error.message

    document.write_text(DOCUMENTS.replace("prompts/system.md", "prompts/none.md"))
    bundles.write(opened.workdir, "prompts/none.md", "now it is there\n")
    document.write_text(DOCUMENTS.replace("prompts/system.md", "prompts/none.md"))
    assert bundles.end(opened).status == "ok"


def _edit(at: Path, old: str, new: str) -> None:
    assert old in DOCUMENTS
    (at / "goondan.yaml").write_text(DOCUMENTS.replace(old, new, 1))


def _replaced(path: Path, target: str) -> None:
    os.rename(path, path.with_name("aside.md"))
    path.symlink_to(target)


def _repository(path: Path) -> None:
    path.mkdir()
    git(path, "init", "--quiet")


def _hole(path: Path) -> None:
    with open(path, "wb") as out:
        out.truncate(1 << 40)


def _deep(at: Path) -> None:
    here = os.open(at, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=here)
        inside = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inside
    os.close(here)


DENIED: dict[str, Callable[[Path], object]] = {
    "code of a tool": lambda at: (at / "tools/words.py").write_text("handlers = {}\n"),
    "a new file beside the code of a tool": lambda at: (at / "tools/data.md").write_text("x"),
    "code of an extension": lambda at: (at / "extensions/prompts.py").write_text("def register(api):\n    import os\n"),
    "data": lambda at: (at / "README.txt").write_text("x"),
    "a script": lambda at: (at / "Makefile").write_text("all:\n\ttrue\n"),
    "a model": lambda at: _edit(at, "provider: embedded", "provider: openai, model: x, endpoint: 'http://127.0.0.1:9'"),
    "a sandbox": lambda at: _edit(at, "  exports:", "  sandbox: {network: public}\n  exports:"),
    "policy": lambda at: _edit(at, "  extensions: [", "  policy: {toolCalls: {allowRegistry: ['*']}}\n  extensions: ["),
    "a bundled tool": lambda at: _edit(at, "  extensions: [", "  tools: [Tool/bash]\n  extensions: ["),
    "a document more": lambda at: _edit(
        at, "apiVersion", "apiVersion: goondan.ai/v1\nkind: Agent\nmetadata: {name: b}\nspec: {modelConfig: "
        "{modelRef: Model/console}}\n---\napiVersion"
    ),
    "a variable in a prompt": lambda at: _edit(at, "systemRef: prompts/system.md", "system: '${HOME}'"),
    "a transport": lambda at: _edit(at, "{level: 1}", "{transport: {type: stdio, command: [sh]}}"),
    "a prompt that is a secret file": lambda at: _edit(at, "systemRef: prompts/system.md", "systemRef: README.txt"),
    "a link": lambda at: (at / "notes.md").symlink_to("/etc/passwd"),
    "a link in the place of a prompt": lambda at: _replaced(at / "prompts/system.md", "/etc/passwd"),
    "a link in the place of a folder": lambda at: _replaced(at / "prompts", "/etc"),
    "a pipe": lambda at: os.mkfifo(at / "pipe.md"),
    "a hard link": lambda at: os.link(at / "README.txt", at / "linked.md"),
    "executable": lambda at: (at / "prompts/system.md").chmod(0o755),
    "attributes": lambda at: (at / ".gitattributes").write_text("*.md filter=x\n"),
    "attributes of a folder, in capitals": lambda at: (at / "prompts/.GitAttributes").write_text("* filter=x\n"),
    "submodules": lambda at: (at / ".gitmodules").write_text("[submodule]\n"),
    "a repository inside": lambda at: _repository(at / "notes"),
    "a name for Windows": lambda at: (at / "git~1.md").write_text("x"),
    "a name with a soft hyphen's kin": lambda at: (at / ".g\u200cit.md").write_text("x"),
    "a name with a newline": lambda at: (at / "a\nb.md").write_text("x"),
    "a name that is no UTF-8": lambda at: Path(os.fsdecode(os.fsencode(at) + b"/\xff.md")).write_text("x"),
    "a twin in capitals": lambda at: (at / "prompts/System.md").write_text("x"),
    "a twin of a folder": lambda at: Bundles.write(at, "Prompts/a.md", "x"),
    "too large": lambda at: (at / "large.md").write_bytes(b"x" * (2 << 20)),
    "a hole of a terabyte": lambda at: _hole(at / "hole.md"),
    "too many": lambda at: [(at / f"n{number}.md").write_text("x") for number in range(201)],
    "too deep": _deep,
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """One for all that is refused: nothing of it may change anything."""
    return Bundles(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def refusing(shared: Bundles, tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenedChangeset, Path]:
    """A changeset that is refused again and again, and what its worktree was."""
    opened = shared.open()
    kept = tmp_path_factory.mktemp("kept")
    shutil.copytree(workdir(opened), kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
    return opened, kept


@pytest.mark.requirement("BUNDLE-07")
@pytest.mark.parametrize("name", DENIED)
def test_what_only_the_operator_may_change(shared: Bundles, refusing: tuple[OpenedChangeset, Path], name: str) -> None:
    opened, kept = refusing
    DENIED[name](workdir(opened))

    assert shared.refused(opened) == "E_CHANGESET_DENIED"
    for path in workdir(opened).iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".git":
            path.unlink()
    shutil.copytree(kept, workdir(opened), dirs_exist_ok=True)


def test_what_a_worktree_says_of_itself_is_not_believed(bundles: Bundles, tmp_path: Path) -> None:
    """Its `.git` is replaced by a repository whose configuration, hooks, filters and attributes name a program; the
    repository's own configuration names it as well, as that of a folder does that was unpacked."""
    ran = tmp_path / "ran"
    program = bundles.write(tmp_path, "program", f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    settings = (
        f"[core]\n\tfsmonitor = {program}\n\thooksPath = {tmp_path}/hooks\n\tpager = {program}\n\teditor = {program}\n"
        f"\tsshCommand = {program}\n[filter \"x\"]\n\tclean = {program}\n\tsmudge = {program}\n\trequired = true\n"
        f"[diff \"x\"]\n\ttextconv = {program}\n\tcommand = {program}\n[merge \"x\"]\n\tdriver = {program}\n"
        f"[gpg]\n\tprogram = {program}\n[commit]\n\tgpgSign = true\n[include]\n\tpath = {tmp_path}/more\n"
        f"[extensions]\n\tpartialClone = origin\n[remote \"origin\"]\n\tpromisor = true\n\turl = {tmp_path}\n"
        f"\tuploadpack = {program}\n"
    )  # fmt: skip
    for hook in ("post-checkout", "pre-commit", "post-commit", "reference-transaction", "post-index-change"):
        for folder in (tmp_path / "hooks", bundles.repository / ".git" / "hooks"):
            bundles.write(folder, hook, program.read_text()).chmod(0o755)
    bundles.write(tmp_path, "more", settings.replace("[include]\n\tpath", "[x]\n\ty"))
    bundles.write(bundles.repository, ".git/info/attributes", "* filter=x diff=x merge=x\n")
    with open(bundles.repository / ".git" / "config", "a") as out:
        out.write(settings)

    opened = bundles.open()
    os.unlink(workdir(opened) / ".git")
    own = workdir(opened) / ".git"
    subprocess.run(["git", "init", "--quiet", str(workdir(opened))], check=True, capture_output=True)
    with open(own / "config", "a") as out:
        out.write(settings)
    bundles.write(own, "info/attributes", "* filter=x diff=x merge=x\n")
    bundles.write(own, "objects/info/alternates", "/nonexistent/objects\n")
    bundles.write(opened.workdir, "prompts/system.md", "FIRST\nline 2\nline 3\nline 4\nline 5\n")
    other = bundles.open()
    bundles.write(other.workdir, "prompts/system.md", "line 1\nline 2\nline 3\nline 4\nLAST\n")
    assert bundles.end(other).status == "ok"

    assert bundles.end(opened).status == "ok"
    assert bundles.engine.difference(opened.changeset_id)
    assert bundles.checkout()["prompts/system.md"] == b"FIRST\nline 2\nline 3\nline 4\nLAST\n"
    assert not ran.exists()
    assert not workdir(opened).exists()


def test_what_the_bundle_does_not_survive_is_undone(bundles: Bundles) -> None:
    opened = bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")
    bundles.write(opened.workdir, "notes/more.md", "more\n")
    before = bundles.checkout()

    def look() -> None:
        assert bundles.checkout()["prompts/system.md"] == b"new\n"
        raise fail("E_CHANGESET_INVALID", "no")

    answer = bundles.end(opened, look=look)

    assert answer.status == "rejected"
    assert bundles.checkout() == before
    assert bundles.status == ""
    assert not (bundles.root / "notes").exists()
    assert bundles.end(opened).status == "ok"


#: The steps of a commit that change the disk are about 40; a chaos run takes each of them.
POINTS = range(1, 36) if os.environ.get("GOONDAN_CHAOS_KILLS") else (1, 3, 5, 6, 7, 9, 10, 13, 19, 21, 22, 24, 28, 30)


class _Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@pytest.mark.parametrize("after", POINTS)
def test_a_kill_at_any_point_leaves_the_old_or_the_new(
    shared: Bundles, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed before the n-th thing that changes something on the disk; whoever comes next completes or undoes it."""
    opened = shared.open()
    text = f"prompt {after}\n"
    shared.write(opened.workdir, "prompts/system.md", text)
    shared.write(opened.workdir, f"notes/{after}.md", text)
    before, old = shared.checkout(), shared.head
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps >= after:  # a dead process does nothing more
            raise _Killed

    for owner, name in (
        (os, "rename"), (os, "unlink"), (os, "link"), (os, "mkdir"), (os, "fsync"), (os, "pwrite"),
        (References, "move"),
    ):  # fmt: skip
        real = getattr(owner, name)

        def stopped(*given, real=real, **more):  # type: ignore[no-untyped-def]
            step()
            return real(*given, **more)

        monkeypatch.setattr(owner, name, stopped)
    with pytest.raises(_Killed):
        shared.end(opened)
    monkeypatch.undo()

    Engine(shared.options, shared.engine._powers).recover()

    assert shared.status == ""
    now = shared.checkout()
    if shared.head == old:
        assert now == before
    else:
        assert now == {**before, "prompts/system.md": text.encode(), f"notes/{after}.md": text.encode()}
    assert [name for name in os.listdir(shared.repository / ".git") if "lock" in name or "goondan" in name] == []
    answer = shared.end(opened)
    assert answer.status == "ok" and answer.new_ref == f"git:{shared.head}"
    assert git(shared.repository, "log", "--format=%H", f"{old}..main").count("\n") == 1  # once
    assert not workdir(opened).exists()


def test_whoever_looks_at_the_bundle_first_completes_or_undoes(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any command or kernel reads the files."""
    for moved in (False, True):
        opened = bundles.open()
        bundles.write(opened.workdir, "prompts/system.md", f"{moved}\n")
        real = References.move

        def killed(self: References, *given: str, moved: bool = moved, real: object = real) -> None:
            if moved:
                real(self, *given)  # type: ignore[operator]
            raise _Killed

        monkeypatch.setattr(References, "move", killed)
        with pytest.raises(_Killed):
            bundles.end(opened)
        monkeypatch.undo()
        assert bundles.checkout()["prompts/system.md"] == f"{moved}\n".encode()

        inspect_bundle(bundles.options.bundle, state_dir=bundles.options.state_dir, handlers=False)

        assert (bundles.checkout()["prompts/system.md"] == b"True\n") is moved
        assert bundles.status == ""
        assert bundles.end(opened).status == "ok"


@pytest.mark.parametrize("how", ["committed", "undone"])
def test_what_a_changeset_writes_where_jails_can_write_is_not_taken_for_a_tools_work(
    bundles: Bundles, how: str
) -> None:
    host = bundles.state / "toolhosts" / "1"
    host.mkdir(parents=True)
    (host / "lock").write_text("")
    before = time.time_ns()
    stay = WriteExposure(str(bundles.root), before, before + 3600 * 10**9)
    (host / "workdirs.json").write_bytes(msgspec.json.encode([stay]))
    opened = bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")

    def look() -> None:
        assert not written()
        if how == "undone":
            raise fail("E_CHANGESET_INVALID", "no")

    def written() -> list[str]:
        found = inspect_bundle(bundles.options.bundle, state_dir=bundles.options.state_dir, handlers=False)
        return [one.path for one in found.written]

    answer = bundles.end(opened, look=look)
    assert answer.status == ("ok" if how == "committed" else "rejected")
    assert written() == []
    prompt = bundles.write(bundles.root, "prompts/system.md", "what a tool wants to be told\n")
    assert written() == [str(prompt)]  # just these bytes
    bundles.write(bundles.root, "prompts/system.md", "new\n")
    assert written() == ([] if how == "committed" else [str(prompt)])  # what was refused was accepted by nobody


def test_what_was_edited_meanwhile_stays(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")

    def killed(*_: object) -> None:
        raise _Killed

    monkeypatch.setattr(References, "move", killed)
    with pytest.raises(_Killed):
        bundles.end(opened)
    monkeypatch.undo()
    bundles.write(bundles.root, "prompts/system.md", "the user's own\n")

    Engine(bundles.options, []).recover()

    assert bundles.checkout()["prompts/system.md"] == b"the user's own\n"
    assert bundles.refused(opened) == "E_CHANGESET_CONFLICT"


def test_another_git_command_is_not_disturbed(bundles: Bundles) -> None:
    opened = bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")
    lock = bundles.write(bundles.repository, ".git/index.lock", "")

    answer = bundles.end(opened)

    assert answer.error is not None and answer.error.code == "E_CHANGESET_CONFLICT"
    assert lock.exists()
    lock.unlink()
    assert bundles.status == ""
    assert bundles.end(opened).status == "ok"


def test_who_asks_again_gets_the_same_and_others_get_nothing(bundles: Bundles) -> None:
    opened = bundles.open("one")
    assert bundles.open("one") == opened

    answer = bundles.engine.commit(
        opened.changeset_id, "", agent="assistant", instance_key="another", look=lambda: None
    )
    assert (answer.status, answer.error and answer.error.code) == ("failed", "E_CHANGESET_IO")
    for wrong in ("", "../../x", "0" * 16, "x" * 1000):
        assert (
            bundles.engine.commit(wrong, "", agent="assistant", instance_key="k", look=lambda: None).status == "failed"
        )


def test_open_changesets_are_counted(bundles: Bundles) -> None:
    for _ in range(8):
        bundles.open()
    with pytest.raises(GoondanError) as caught:
        bundles.open()
    assert caught.value.info.code == "E_CHANGESET_IO"

    held = bundles.engine.held()
    assert {one.event_id for one in held} == {"e"}
    bundles.engine.remove([one.changeset_id for one in held])
    assert bundles.engine.held() == []
    assert os.listdir(bundles.state / "changesets/worktrees") == []
    assert not (bundles.repository / ".git/worktrees").exists()


def test_a_commit_is_taken_back(bundles: Bundles) -> None:
    before, opened = bundles.checkout(), bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "FIRST\nline 2\nline 3\nline 4\nline 5\n")
    bundles.write(opened.workdir, "notes/more.md", "more\n")
    bundles.end(opened)
    later = bundles.open()
    bundles.write(later.workdir, "prompts/system.md", "FIRST\nline 2\nline 3\nline 4\nLAST\n")
    bundles.end(later)

    answer = bundles.engine.revert(opened.changeset_id, lambda: None)

    assert answer.status == "ok"
    assert bundles.checkout() == {**before, "prompts/system.md": b"line 1\nline 2\nline 3\nline 4\nLAST\n"}
    assert b"+more" in bundles.engine.difference(opened.changeset_id)
    with pytest.raises(GoondanError):
        bundles.engine.revert(opened.changeset_id, lambda: None)


def test_the_users_files_keep_their_modes(bundles: Bundles) -> None:
    prompt = bundles.root / "prompts/system.md"
    prompt.chmod(0o600)
    opened = bundles.open()
    bundles.write(opened.workdir, "prompts/system.md", "new\n")

    assert bundles.end(opened).status == "ok"
    assert stat.S_IMODE(prompt.stat().st_mode) == 0o600


def test_a_submodule_of_the_checkout_is_not_looked_into(bundles: Bundles, tmp_path: Path) -> None:
    """git looks for changes in a submodule with a git of the submodule's own configuration."""
    ran = tmp_path / "ran"
    program = bundles.write(tmp_path, "program", f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    _repository(bundles.root / "module")
    bundles.write(bundles.root, "module/.gitattributes", "*.txt filter=x\n")
    bundles.write(bundles.root, "module/new.txt", "x")
    git(bundles.root / "module", "add", "-A")
    git(bundles.root / "module", "commit", "--quiet", "--message", "x")
    bundles.commit("A submodule")
    opened = bundles.open()
    for setting in ("core.fsmonitor", "filter.x.clean", "filter.x.process"):
        git(bundles.root / "module", "config", setting, str(program))
    bundles.write(bundles.root, "module/new.txt", "y")
    bundles.write(opened.workdir, "prompts/system.md", "new\n")

    assert bundles.end(opened).status == "ok"
    assert not ran.exists()
    assert (bundles.root / "module/new.txt").read_text() == "y"


def test_a_disk_that_is_nearly_full_gets_no_worktree(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "KEPT_FREE_BYTES", 1 << 62)

    with pytest.raises(GoondanError) as caught:
        bundles.open()

    assert caught.value.info.code == "E_CHANGESET_IO"
    assert bundles.engine.held() == []
