"""What a tool host remembers of this machine: only the best finding, only while nothing has changed, and only from a
file that nobody else could have written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.schemas.system import secrecy
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.worker.tool_host_reports import SURVEY, Obstacle
from goondan.toolhost import app, remembered
from goondan.toolhost.app import App, Settings
from goondan.toolhost.lookup.this_host import host_facts
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.remembered import Memory
from goondan.toolhost.serving.answers import Answers
from goondan.toolhost.survey import Survey, read_signs
from tests.containment.ordinary_user import ORDINARY_USER
from tests.toolhost_fixture import POWERS


@pytest.fixture(scope="module")
def machine() -> HostFacts:
    return host_facts("", [], POWERS)


@pytest.fixture
def usual(machine: HostFacts, tmp_path: Path) -> HostFacts:
    program = tmp_path / "bwrap"
    program.write_bytes(b"a program")
    return replace(machine, bwrap=str(program))


@pytest.fixture
def file(short_tmp: Path) -> Path:
    return short_tmp / SURVEY


def memory(file: Path, usual: HostFacts) -> Memory:
    return Memory(str(file), POWERS, usual, os.geteuid())


def found_by(usual: HostFacts) -> Survey:
    return Survey(tier="full", notes=["a note"], facts=replace(usual, disable_userns=False))


def test_what_was_found_is_known_on_the_same_machine(file: Path, usual: HostFacts) -> None:
    first = memory(file, usual)
    assert first.survey is None
    first.keep(found_by(usual))
    known = memory(file, usual)
    assert known.survey is not None
    assert known.survey.facts == found_by(usual).facts
    assert known.survey.notes == ["a note"]
    assert "namespaces" in known.survey.walls
    assert not known.forks
    known.keep_forks()
    assert memory(file, usual).forks


@pytest.mark.parametrize(
    "survey",
    [
        lambda usual: Survey(tier=None, findings=[Obstacle("a", "b", "c")]),
        lambda usual: Survey(tier="reduced", facts=replace(usual, tier="reduced")),
        lambda usual: Survey(tier="full", facts=usual, findings=[Obstacle("a", "b", "c")]),
        lambda usual: Survey(tier="full", facts=replace(usual, user_namespaces=False)),
        lambda usual: Survey(tier="full", facts=replace(usual, net_admin=False)),
    ],
)
def test_only_the_best_is_kept(file: Path, usual: HostFacts, survey: Callable[[HostFacts], Survey]) -> None:
    memory(file, usual).keep(survey(usual))
    assert not file.exists()


def _new_program(usual: HostFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.stat(usual.bwrap)
    Path(usual.bwrap).write_bytes(b"b program")
    os.utime(usual.bwrap, ns=(before.st_atime_ns, before.st_mtime_ns))  # its owner can set that back


def _another_boot(usual: HostFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    read = remembered._text
    monkeypatch.setattr(remembered, "_text", lambda path: "another" if "boot_id" in path else read(path))


def _another_setting(usual: HostFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    signs = read_signs
    monkeypatch.setattr("goondan.toolhost.remembered.read_signs", lambda *of: replace(signs(*of), max_userns="0"))


def _another_container(usual: HostFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_namespaces", lambda: ["mnt:[1]"])


@pytest.mark.parametrize("change", [_new_program, _another_boot, _another_setting, _another_container])
def test_a_change_of_the_machine_ends_it(
    file: Path,
    usual: HostFacts,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[HostFacts, pytest.MonkeyPatch], None],
) -> None:
    memory(file, usual).keep(found_by(usual))
    change(usual, monkeypatch)
    assert memory(file, usual).survey is None


def test_other_facts_end_it(file: Path, usual: HostFacts) -> None:
    memory(file, usual).keep(found_by(usual))
    assert memory(file, replace(usual, landlock=usual.landlock + 1)).survey is None


def _open_to_others(file: Path) -> None:
    file.chmod(0o660)


def _in_an_open_folder(file: Path) -> None:
    file.parent.chmod(0o777)


def _a_link(file: Path) -> None:
    file.rename(file.with_suffix(".old"))
    file.symlink_to(file.with_suffix(".old"))


def _a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _of_another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes files of others")
    os.chown(file, 12345, -1)


def _no_finding(file: Path) -> None:
    file.write_bytes(b'{"premises":')


@pytest.mark.parametrize(
    "spoil", [_open_to_others, _of_another_user, _in_an_open_folder, _a_link, _a_pipe, _no_finding]
)
def test_what_somebody_else_could_have_written_is_not_believed(
    file: Path, usual: HostFacts, spoil: Callable[[Path], None]
) -> None:
    memory(file, usual).keep(found_by(usual))
    spoil(file)
    assert memory(file, usual).survey is None


def test_a_process_that_closed_its_memory_knows_its_machine(file: Path, usual: HostFacts) -> None:
    """A tool host of an ordinary user has closed its memory before, and cannot list its own namespaces any more."""
    file.parent.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
                os.setresuid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            secrecy.close_memory()
            os._exit(0 if len(memory(file, usual)._premises) == 64 else 1)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_jail_that_cannot_be_made_ends_it(file: Path, usual: HostFacts) -> None:
    known = memory(file, usual)
    known.keep(found_by(usual))
    known.forget()
    assert memory(file, usual).survey is None
    known.forget()  # a second time does no harm


async def test_a_tool_host_that_knows_its_machine_makes_no_jail_to_try(
    file: Path, usual: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def try_one(powers: object, usual: HostFacts) -> Survey:
        tried.append(usual)
        return found_by(usual)

    monkeypatch.setattr(app, "survey", try_one)
    settings = Settings(endpoint="ipc:///nobody", token="", survey_path=str(file))
    first = App(settings, POWERS, usual)
    known = first._remember()
    assert known is not None
    known.keep(await first._survey(known))
    second = App(settings, POWERS, usual)
    assert (await second._survey(second._remember())).facts == found_by(usual).facts
    assert len(tried) == 1


@pytest.mark.parametrize(("code", "unmade"), [("E_SANDBOX_UNAVAILABLE", True), ("E_TOOL_CRASHED", False)])
def test_a_call_whose_walls_could_not_be_put_up_is_noticed(code: str, unmade: bool) -> None:
    anything: Any = None
    heard: list[bool] = []
    answers = Answers(anything, anything, anything, anything, anything, lambda: heard.append(True))
    concluded: list[object] = []
    answers.conclude = lambda *of: concluded.append(of)  # type: ignore[method-assign]
    call: Any = SimpleNamespace(tool=SimpleNamespace(error_message_limit=1000))
    answers.fail(call, tool_error(code, "no", name="No"))
    assert heard == [True] * unmade
    assert len(concluded) == 1
