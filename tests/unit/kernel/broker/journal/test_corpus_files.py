"""Attempts with the files of the journal: what somebody else has put at their names, and files that are gone."""

from __future__ import annotations

import os
import select
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from goondan.kernel.broker.journal import committer as committer_module
from goondan.kernel.broker.journal import tables as retention
from goondan.kernel.broker.journal.committer import RESERVE_FILE, WITNESS_FILE, boot_id, open_store, start
from goondan.kernel.broker.journal.files import RESERVE_BYTES, MarkFile
from goondan.kernel.broker.journal.redo import REDO_SUFFIX
from goondan.kernel.broker.journal.store import JOURNAL_FILE, SUSPICION_SUFFIX, Durability, JournalStore
from goondan.kernel.broker.state.records import Item, Put, Retire
from goondan.schemas.wire.errors import GoondanError
from tests.checks import refuses, there

#: Somebody else of this machine.
OTHER = 40_001


def linked(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def linked_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim.parent / "new")


def second_name(path: Path, victim: Path) -> None:
    os.link(victim, path)


def second_name_of_an_empty_file(path: Path, victim: Path) -> None:
    os.link(victim.parent / "empty", path)


def second_name_of_a_large_file(path: Path, victim: Path) -> None:
    os.link(victim.parent / "large", path)


def piped(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


def listening(path: Path, victim: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def of_another(path: Path, victim: Path) -> None:
    path.touch()
    os.chown(path, OTHER, OTHER)


def journal_of_another(path: Path, victim: Path) -> None:
    """A whole journal with an event in it, which nobody here has sent."""
    made = path.parent / "made"
    made.mkdir()
    store = JournalStore(str(made / JOURNAL_FILE), durability="process", boot_id=boot_id())
    store.commit([Put("event:planted", b"planted")], 0)
    store.close()
    shutil.copy(made / JOURNAL_FILE, path)
    shutil.rmtree(made)
    os.chown(path, OTHER, OTHER)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "a link": linked,
    "a link to nothing": linked_to_nothing,
    "a second name": second_name,
    "a second name of an empty file": second_name_of_an_empty_file,
    "a second name of a large file": second_name_of_a_large_file,
    "a pipe": piped,
    "a folder": folder,
    "a socket": listening,
    "a file of another user": of_another,
    "a journal of another user": journal_of_another,
}
NAMES = (
    JOURNAL_FILE, f"{JOURNAL_FILE}-wal", f"{JOURNAL_FILE}-shm", f"{JOURNAL_FILE}-acked",
    f"{JOURNAL_FILE}{REDO_SUFFIX}", f"{JOURNAL_FILE}{SUSPICION_SUFFIX}", RESERVE_FILE, WITNESS_FILE,
)  # fmt: skip
#: Uses the journal of each of some folders, twice.
USE = """
import sys
from goondan.kernel.broker.state.records import Item, Put
from goondan.kernel.broker.journal.committer import open_store, start
from goondan.schemas.wire.errors import GoondanError
for folder in sys.argv[1:]:
    for number in (1, 2):
        try:
            store = open_store(folder, "process")
            print([row.subject for row in store.rows()])
            journal = start(store, folder)
            journal.append([Item((Put(f"event:{number}", b"ours"),), refusable=True)])
            journal.settled()
            journal.close()
        except GoondanError as error:
            print(error.info.code)
    print(flush=True)
"""


def seen(top: Path) -> dict[str, tuple[int, int, bytes]]:
    return {one.name: (one.stat().st_mode, one.stat().st_uid, one.read_bytes()[:64]) for one in sorted(top.iterdir())}


@pytest.mark.parametrize("planted", PLANTED)
def test_nothing_that_is_planted_is_written_through_or_believed(tmp_path: Path, planted: str) -> None:
    if "another user" in planted and os.geteuid() != 0:
        pytest.skip("takes the part of another user")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / "victim"
    victim.write_bytes(b"precious")
    (elsewhere / "empty").touch()
    with open(elsewhere / "large", "wb") as large:
        large.write(b"precious")
        os.posix_fallocate(large.fileno(), 0, RESERVE_BYTES)
    before = seen(elsewhere)
    states = []
    for number, name in enumerate(NAMES):
        state = tmp_path / f"state{number}"
        (state / "kernel").mkdir(parents=True)
        PLANTED[planted](state / name, victim)
        states.append(str(state))
    done = subprocess.run([sys.executable, "-c", USE, *states], check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(zip(NAMES, done.stdout.split("\n\n"), strict=False))
    assert seen(elsewhere) == before, said
    assert "planted" not in done.stdout
    assert not [text for text in said.values() if "Traceback" in text]
    assert set(said[JOURNAL_FILE].split()) <= {"E_STATE", "E_JOURNAL_CORRUPT"}, "nothing goes on as if it were new"
    for name in (f"{JOURNAL_FILE}-acked", RESERVE_FILE, WITNESS_FILE, f"{JOURNAL_FILE}{REDO_SUFFIX}"):
        if planted in ("a second name", "a second name of an empty file", "a second name of a large file"):
            assert said[name].split("\n") == ["[]", "['event:1']"], name
            if name.endswith(REDO_SUFFIX):
                continue  # it goes when everything is in the tables
            used_now = Path(states[NAMES.index(name)], name).stat(follow_symlinks=False)
            assert used_now.st_nlink == 1 or name == WITNESS_FILE, name


def used(folder: Path, durability: Durability, *, accept_loss: bool = False) -> list[str]:
    store = open_store(str(folder), durability, accept_loss=accept_loss)
    subjects = [row.subject for row in store.rows()]
    journal = start(store, str(folder))
    journal.append([Item((Put(f"event:{len(subjects)}", b"ours"),))])
    journal.close()
    return subjects


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("ended", ["in order", "killed"])
def test_a_journal_that_is_gone_with_its_side_file_is_missed(
    tmp_path: Path, durability: Durability, ended: str
) -> None:
    if ended == "killed":
        store = open_store(str(tmp_path), durability)
        store.commit([Put("event:0", b"ours")], 0)  # and never closed
    else:
        assert used(tmp_path, durability) == []
    for path in tmp_path.glob("kernel.*"):
        path.unlink()
    with refuses("E_JOURNAL_CORRUPT", match="gone"):
        used(tmp_path, durability)
    with pytest.raises(GoondanError, match="gone"):
        used(tmp_path, durability)
    assert used(tmp_path, durability, accept_loss=True) == []
    assert used(tmp_path, durability) == ["event:0"], "and it goes on"


def test_a_journal_that_the_power_may_have_taken_is_not_missed(tmp_path: Path) -> None:
    """With `process` nothing is promised beyond the machine's boot, until the file was seen on the disk."""
    open_store(str(tmp_path), "process")
    witness = tmp_path / WITNESS_FILE
    assert witness.read_text().strip() == boot_id()
    witness.write_text("an earlier boot\n")
    for path in tmp_path.glob("kernel.*"):
        path.unlink()
    assert used(tmp_path, "process") == []
    assert used(tmp_path, "process") == ["event:0"]
    assert witness.read_text() == "kept\n"


def test_a_state_of_an_older_kernel_has_no_witness_and_gets_one(tmp_path: Path) -> None:
    (tmp_path / "instances").mkdir()
    assert used(tmp_path, "process") == []
    (tmp_path / WITNESS_FILE).unlink()
    assert used(tmp_path, "process") == ["event:0"]
    assert (tmp_path / WITNESS_FILE).read_text() == "kept\n"
    assert MarkFile(str(tmp_path / f"{JOURNAL_FILE}-acked")).read() is not None


# --- growth


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("batch", [1, 6_000])
def test_what_is_kept_stays_in_its_bounds_under_a_load_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, batch: int
) -> None:
    """With `process` old answers and ids were never removed, with `power` 2,000 in half a minute."""
    monkeypatch.setattr(retention, "KEEP_ANSWER_BYTES", 1000)
    monkeypatch.setattr(retention, "KEPT_IDS", 10)
    monkeypatch.setattr(retention, "KEEP_IDS_MS", -1000)
    monkeypatch.setattr(committer_module, "TIDY_IDLE_S", 1000.0)
    monkeypatch.setattr(committer_module, "TIDY_BUSY_S", 1000.0)
    journal = start(open_store(str(tmp_path), durability), str(tmp_path))
    ends = [Item((Retire(f"event:{number}", b"digest", "done", b"an answer"),)) for number in range(12_000)]
    left = 0
    for at in range(0, len(ends), batch):
        journal.append(ends[at : at + batch])
        left += 1
    while left := left - len(journal.settled()):
        wake = there(journal.wake_fd())
        assert select.select([wake], [], [], 20)[0]
    journal.close()
    kept = sqlite3.connect(tmp_path / JOURNAL_FILE)
    most = batch + 2 * committer_module.TIDY_ITEMS + 200  # the last ones may still be looked at
    assert kept.execute("SELECT count(*) FROM answers").fetchone()[0] <= most
    assert kept.execute("SELECT count(*) FROM ended").fetchone()[0] <= most
