"""Damage to the journal's files of every kind: bits, pages, cuts, other things in the files' places, no room.

Each attempt ends in one of three ways: nothing is lost; the start is refused, and `--accept-loss` goes on; or what is
asked for is refused. A retired subject never comes back by damage, and nothing hangs.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from goondan.kernel.broker.__main__ import assemble
from goondan.kernel.broker.journal.committer import GroupWriter
from goondan.kernel.broker.journal.files import RELEASE_BYTES, RESERVE_BYTES, Reserve
from goondan.kernel.broker.journal.store import SUSPICION_SUFFIX, JournalStore
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.records import DiskFull, Item, JournalFailed, Put, Retire
from goondan.schemas.wire.errors import GoondanError
from tests.unit.kernel.broker.swarm import plan

BOOT = "b" * 36
EVENTS = 200
#: Names with a letter outside of ASCII: one bit makes such a text unreadable.
OPEN = {f"event:é{number}" for number in range(EVENTS) if number % 3}
PAGE = 4096


def opened(folder: Path, *, accept_loss: bool = False) -> JournalStore:
    return JournalStore(str(folder / "kernel.db"), durability="process", boot_id=BOOT, accept_loss=accept_loss)


def subjects(journal: JournalStore) -> set[str]:
    return {row.subject for row in journal.rows()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with open and retired events."""
    folder = tmp_path_factory.mktemp("sound")
    journal = opened(folder)
    for number in range(EVENTS):
        journal.commit([Put(f"event:é{number}", b"x" * 250)], number)
        if number % 3 == 0:
            journal.commit([Retire(f"event:é{number}", b"d" * 16, "done", b"answer" * 150)], number)
    journal.close()
    return folder


def copied(sound: Path, folder: Path) -> Path:
    for path in sound.iterdir():
        shutil.copy(path, folder)
    return folder


def pages_of(path: Path, table: str) -> list[int]:
    """The pages of a table or an index of the file, the root first (numbers from 1)."""
    db = sqlite3.connect(path)
    root = int(db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0])
    db.close()
    data = path.read_bytes()
    page = data[(root - 1) * PAGE : root * PAGE]
    if page[0] not in (2, 5):  # a leaf by itself
        return [root]
    count, header = int.from_bytes(page[3:5], "big"), 12
    cells = [int.from_bytes(page[header + 2 * at : header + 2 * at + 2], "big") for at in range(count)]
    return [root, *(int.from_bytes(page[cell : cell + 4], "big") for cell in cells)]


def overwrite(path: Path, page: int, data: bytes = bytes(PAGE)) -> None:
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(data)


@pytest.mark.parametrize(
    ("table", "text", "at", "bit", "lost"),
    [
        ("records_subject", "é100", 4, 1, set()),  # é110 in the index only: no retired event comes back
        ("records", "event:é100", 6, 0x40, {"event:é100"}),  # no UTF-8 any more: it costs its row only
    ],
)
def test_a_wrong_byte_is_noticed(
    sound: Path, tmp_path: Path, table: str, text: str, at: int, bit: int, lost: set[str]
) -> None:
    copied(sound, tmp_path)
    data = bytearray((tmp_path / "kernel.db").read_bytes())
    found = [
        data.find(text.encode(), (page - 1) * PAGE, page * PAGE) for page in pages_of(tmp_path / "kernel.db", table)
    ]
    data[next(place for place in found if place >= 0) + at] ^= bit
    (tmp_path / "kernel.db").write_bytes(data)
    with pytest.raises(GoondanError, match="E_JOURNAL_CORRUPT"):
        opened(tmp_path)
    assert subjects(opened(tmp_path, accept_loss=True)) == OPEN - lost


def look_at_everything(journal: JournalStore) -> None:
    for number in range(0, EVENTS, 3):
        journal.find_ended(f"event:é{number}")
        journal.find_answer(f"event:é{number}")


@pytest.mark.parametrize("table", ["ended_subject", "answers"])
def test_damage_in_what_has_ended_can_be_given_up(sound: Path, tmp_path: Path, table: str) -> None:
    copied(sound, tmp_path)
    pages = pages_of(tmp_path / "kernel.db", table)
    for page in pages[1:] or pages:
        overwrite(tmp_path / "kernel.db", page)
    journal = opened(tmp_path)  # these tables are not read in every start
    with pytest.raises(JournalFailed):
        look_at_everything(journal)
    journal.close()
    assert (tmp_path / f"kernel.db{SUSPICION_SUFFIX}").exists()
    with pytest.raises(GoondanError, match="E_JOURNAL_CORRUPT"):
        opened(tmp_path)
    journal = opened(tmp_path, accept_loss=True)
    assert subjects(journal) == OPEN
    journal.commit([Retire(name, b"d" * 16, "done", b"a") for name in sorted(OPEN)], 0)
    assert subjects(journal) == set()
    journal.close()
    assert subjects(opened(tmp_path)) == set()


def test_accept_loss_looks_at_the_whole_file(sound: Path, tmp_path: Path) -> None:
    copied(sound, tmp_path)
    overwrite(tmp_path / "kernel.db", pages_of(tmp_path / "kernel.db", "ended")[0])
    journal = opened(tmp_path, accept_loss=True)
    assert journal.losses
    journal.commit([Retire(name, b"d" * 16, "done") for name in sorted(OPEN)], 0)
    assert subjects(journal) == set()


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_rows_on_both_sides_of_a_lost_page_are_kept(sound: Path, tmp_path: Path, where: str) -> None:
    copied(sound, tmp_path)
    leaves = pages_of(tmp_path / "kernel.db", "records")[1:]
    page = leaves[{"first": 0, "middle": len(leaves) // 2, "last": -1}[where]]
    overwrite(tmp_path / "kernel.db", page)
    with pytest.raises(GoondanError, match="E_JOURNAL_CORRUPT"):
        opened(tmp_path)
    kept = subjects(opened(tmp_path, accept_loss=True))
    assert kept <= OPEN
    assert len(OPEN - kept) <= 20  # what was on that page


def test_a_file_that_was_cut_off_gives_back_what_is_left(sound: Path, tmp_path: Path) -> None:
    copied(sound, tmp_path)
    os.truncate(tmp_path / "kernel.db", max(pages_of(tmp_path / "kernel.db", "records")[:6]) * PAGE)
    with pytest.raises(GoondanError, match="E_JOURNAL_CORRUPT"):
        opened(tmp_path)
    kept = subjects(opened(tmp_path, accept_loss=True))
    assert 20 < len(kept) < len(OPEN)
    assert kept < OPEN
    assert not list(tmp_path.glob("*-filled*"))


def test_a_state_folder_may_have_any_name(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "100%25 #1?mode=memory"
    folder.mkdir()
    copied(sound, folder)
    overwrite(folder / "kernel.db", pages_of(folder / "kernel.db", "records")[-1])
    assert len(subjects(opened(folder, accept_loss=True))) > len(OPEN) // 2


def test_a_number_behind_its_own_rows_is_refused(sound: Path, tmp_path: Path) -> None:
    copied(sound, tmp_path)
    db = sqlite3.connect(tmp_path / "kernel.db")
    db.execute("UPDATE meta SET last = 7")
    db.commit()
    db.close()
    (tmp_path / "kernel.db-acked").unlink()
    with pytest.raises(GoondanError, match="E_JOURNAL_CORRUPT"):
        opened(tmp_path)
    journal = opened(tmp_path, accept_loss=True)
    journal.commit([Put("event:new", b"x")], 0)
    assert subjects(journal) == OPEN | {"event:new"}


def flipped(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def emptied(path: Path, chance: random.Random) -> None:
    overwrite(path, 1 + chance.randrange(path.stat().st_size // PAGE))


@pytest.mark.parametrize("damage", [flipped, cut, emptied])
def test_random_damage_is_noticed_or_harmless(
    sound: Path, tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    for seed in range(25):
        folder = tmp_path / str(seed)
        folder.mkdir()
        copied(sound, folder)
        damage(folder / "kernel.db", random.Random(seed))
        try:
            journal = opened(folder)
            assert subjects(journal) == OPEN
            journal.commit([Retire(name, b"d" * 16, "done") for name in sorted(OPEN)], 0)
            assert subjects(journal) == set()
            journal.close()
        except (GoondanError, JournalFailed):
            journal = opened(folder, accept_loss=True)
            assert subjects(journal) <= OPEN
            journal.commit([Retire(name, b"d" * 16, "done") for name in sorted(OPEN)], 0)
            assert subjects(journal) == set()
            journal.close()


# --- other things in the files' places

ATTEMPT = """
import sys
from goondan.kernel.broker.state.records import Item, Put
from goondan.kernel.broker.journal.committer import open_store, start
from goondan.kernel.broker.routing.router import Router
from goondan.schemas.wire.errors import GoondanError
from tests.unit.kernel.broker.swarm import plan
try:
    store = open_store(sys.argv[1], "process")
except GoondanError as error:
    print(error.info.code)
    sys.exit()
journal = start(store, sys.argv[1])
journal.append([Item((Put("event:1", b"x"),), True)])
print("refused" if journal.settled()[0] else "accepted")
"""


@pytest.mark.parametrize(
    ("name", "kind", "outcome"),
    [
        ("kernel.db", "pipe", "E_STATE"),
        ("kernel.db-acked", "pipe", "E_STATE"),
        ("kernel.db-acked", "link", "E_STATE"),
        ("kernel.db-acked", "folder", "E_STATE"),
        ("kernel.reserve", "pipe", "accepted"),
        ("kernel.reserve", "link", "accepted"),
        ("kernel.reserve", "folder", "accepted"),
        ("kernel.reserve", "socket", "accepted"),
    ],
)
def test_nothing_in_a_files_place_hangs_a_start_or_stops_the_work(
    tmp_path: Path, name: str, kind: str, outcome: str
) -> None:
    path, other = tmp_path / name, tmp_path / "other"
    other.write_bytes(b"untouched")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            here = os.getcwd()
            os.chdir(tmp_path)  # the names of sockets are short
            try:
                listening.bind(name)
            finally:
                os.chdir(here)
    done = subprocess.run([sys.executable, "-c", ATTEMPT, str(tmp_path)], capture_output=True, timeout=20, check=True)
    assert done.stdout.decode().strip() == outcome
    assert other.read_bytes() == b"untouched"


# --- the reserve


def test_a_reserve_with_holes_is_none(tmp_path: Path) -> None:
    path = tmp_path / "kernel.reserve"
    path.touch()
    os.truncate(path, RESERVE_BYTES)
    assert Reserve(str(path)).make()
    assert path.stat().st_blocks * 512 >= RESERVE_BYTES


def test_the_reserve_is_given_back_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "kernel.reserve"
    reserve = Reserve(str(path))
    assert reserve.make()
    assert reserve.release()
    assert path.stat().st_size == RESERVE_BYTES - RELEASE_BYTES
    times = 1
    while reserve.release():
        times += 1
    assert times == RESERVE_BYTES // RELEASE_BYTES
    assert not path.exists()


def test_ends_take_of_the_reserve_what_they_need(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    reserve = Reserve(str(tmp_path / "kernel.reserve"))
    writer = GroupWriter(journal, reserve, lambda: 0)
    # Together with the new event, without it, after a copy of the WAL, and again with a bit of the reserve.
    commit, room = journal.promise, iter([False, False, False, True])

    def narrow(batch: list[object], now_ms: int) -> int:
        if not next(room):
            raise DiskFull("no room")
        return commit(batch, now_ms)  # type: ignore[arg-type]

    journal.promise = narrow  # type: ignore[method-assign,assignment]
    settled = writer.write([[Item((Put("new", b""),), True), Item((Put("end", b""),))]])
    assert settled == [{0}]
    assert subjects(journal) == {"end"}
    assert (tmp_path / "kernel.reserve").stat().st_size == RESERVE_BYTES - RELEASE_BYTES


# --- rows that break recovery


def test_any_number_of_rows_that_break_recovery_costs_one_start(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in range(30):
        journal.commit([Put(f"event:{number}", b"no record")], 0)
    journal.close()
    with pytest.raises(GoondanError, match="E_JOURNAL_CORRUPT"):
        assembled(tmp_path)
    router = assembled(tmp_path)
    assert router.bus.mailbox.events == {}
    db = sqlite3.connect(tmp_path / "kernel.db")
    assert db.execute("SELECT count(*) FROM quarantine").fetchone() == (30,)
    db.close()


def assembled(folder: Path) -> Router:
    journal = opened(folder)
    try:
        return assemble(plan(), b"s" * 32, journal, boot_id=BOOT, broker_id="b", now=1000.0, blobs=str(folder))
    finally:
        journal.close()
