"""Folders of deleted instances, with what a tool may have left in them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from goondan.kernel.broker.__main__ import assemble
from goondan.kernel.broker.instance_folders import DELETED, InstanceFolders, move_away, remove_deleted
from goondan.kernel.broker.journal.committer import open_store, wall_ms
from goondan.kernel.broker.routing.deletions import Moved
from goondan.kernel.broker.state.ledger import Ledger
from goondan.kernel.broker.state.records import deleted_subject
from goondan.schemas.bundle.address import instance_dir
from tests.kernel_fixture import ROOT
from tests.process.bare_broker import plan

#: Deeper than Python recurses, and longer than the system takes a path.
DEPTH = 1_200
KEYS = ("k", "..", ".", "../../../precious", "/etc", "a/../../b", "x" * 256, "\u00fc\u202e")


def made(state: Path, key: str = "k", agent: str = "coder") -> Path:
    """An instance's folder with a conversation and a workdir."""
    folder = Path(instance_dir(str(state), agent, key))
    (folder / "workspace").mkdir(parents=True)
    (folder / "conversation.db").write_bytes(b"words")
    (folder / "workspace" / "file").write_bytes(b"work")
    return folder


def emptied(state: Path) -> bool:
    return not os.listdir(state / DELETED)


@pytest.mark.parametrize("key", KEYS)
def test_a_folder_goes_and_nothing_beside_it_whatever_the_key(tmp_path: Path, key: str) -> None:
    state = tmp_path / "state"
    (tmp_path / "precious").mkdir()
    neighbour, folder = made(state, "neighbour"), made(state, key)
    folders = InstanceFolders(str(state))
    assert folders.exists("coder", key)
    move_away(str(state), "coder", key, keep_workdir=False)
    assert not folders.exists("coder", key)
    assert not folder.exists()
    assert stat.S_IMODE((state / DELETED).stat().st_mode) == 0o700
    remove_deleted(str(state))
    assert emptied(state)
    assert (neighbour / "conversation.db").read_bytes() == b"words"
    assert (tmp_path / "precious").is_dir()
    move_away(str(state), "coder", key, keep_workdir=False)  # once more is no error


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount")
def test_a_workdir_with_a_file_system_of_its_own_is_unmounted_first(tmp_path: Path) -> None:
    state = tmp_path / "state"
    workspace = made(state) / "workspace"
    deletes = (
        "import os, sys\n"
        "from goondan.kernel.broker.instance_folders import move_away\n"
        "state, workspace = sys.argv[1:]\n"
        "assert os.path.ismount(workspace)\n"
        "held = open(workspace + '/held', 'w')\n"
        "try:\n"
        "    move_away(state, 'coder', 'k', keep_workdir=False)\n"
        "except OSError as error:\n"
        "    print('busy', error.errno)\n"
        "assert os.path.ismount(workspace), 'it was moved while somebody works in it'\n"
        "held.close()\n"
        "move_away(state, 'coder', 'k', keep_workdir=False)\n"
        "print(workspace in open('/proc/self/mounts').read(), os.path.exists(workspace))\n"
    )
    script = 'mount -t tmpfs none "$2" && exec "$0" -c "$3" "$1" "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, str(state), str(workspace), deletes],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout.split("\n") == [f"busy {errno.EBUSY}", "False False", ""], done.stderr


def test_what_tools_have_left_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    state, outside = tmp_path / "state", tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o750)
    (outside / "mine").write_bytes(b"stays")
    folder = made(state)
    workspace = folder / "workspace"
    (workspace / "link").symlink_to(outside)
    (workspace / "file of another").symlink_to(outside / "mine")
    os.mkfifo(workspace / "pipe")
    locked = workspace / "locked" / "inner"
    locked.mkdir(parents=True)
    (locked / "file").write_bytes(b"")
    locked.chmod(0)
    locked.parent.chmod(0)
    here = os.open(workspace, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    move_away(str(state), "coder", "k", keep_workdir=False)
    remove_deleted(str(state))
    assert emptied(state)
    assert (outside / "mine").read_bytes() == b"stays"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o750


def test_a_workdir_or_a_folder_that_is_a_link_loses_the_link_only(tmp_path: Path) -> None:
    state, mine = tmp_path / "state", tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_bytes(b"stays")
    folder = made(state)
    (folder / "workspace" / "file").unlink()
    (folder / "workspace").rmdir()
    (folder / "workspace").symlink_to(mine)
    move_away(str(state), "coder", "k", keep_workdir=False)
    Path(instance_dir(str(state), "coder", "linked")).symlink_to(mine)
    move_away(str(state), "coder", "linked", keep_workdir=False)
    remove_deleted(str(state))
    assert emptied(state)
    assert (mine / "file").read_bytes() == b"stays"


def test_a_shared_workdir_stays_where_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "workspace.ext4").write_bytes(b"image")
    move_away(str(tmp_path), "coder", "k", keep_workdir=True)
    remove_deleted(str(tmp_path))
    assert sorted(os.listdir(folder)) == ["workspace", "workspace.ext4"]
    assert (folder / "workspace" / "file").read_bytes() == b"work"
    assert emptied(tmp_path)


def test_what_cannot_be_moved_is_said(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / DELETED).write_bytes(b"in the way")
    folders = InstanceFolders(str(tmp_path))
    folders.move("coder", "k", False)
    (moved,) = until(folders)
    assert "Not a directory" in moved.problem
    assert folders.exists("coder", "k")


def test_the_next_start_finishes_a_removal(tmp_path: Path) -> None:
    made(tmp_path)
    move_away(str(tmp_path), "coder", "k", keep_workdir=False)
    assert not emptied(tmp_path)
    folders = InstanceFolders(str(tmp_path))
    folders.move("coder", "none", False)  # behind the removal, in the same thread
    until(folders)
    assert emptied(tmp_path)


def test_the_next_broker_finishes_a_deletion_that_was_decided(tmp_path: Path) -> None:
    folder = made(tmp_path)
    store = open_store(str(tmp_path), "process")
    ledger = Ledger("boot", 0.0)
    store.commit(ledger.tombstone("coder", "k", False).writes, wall_ms())
    router = assemble(
        plan(str(tmp_path)), b"s" * 32, store, boot_id="boot", broker_id="b", now=time.monotonic(), blobs=None
    )
    bus = router.bus
    assert bus.mailbox.instances["coder", "k"].deleting
    deadline = time.monotonic() + 10
    while not bus.staged:
        assert time.monotonic() < deadline
        time.sleep(0.005)
        router.tick(time.monotonic())
    staged, bus.staged = bus.staged, []
    store.commit([write for item in staged for write in item.item.writes], wall_ms())
    router.settle(staged, time.monotonic())
    assert not folder.exists()
    assert not bus.mailbox.instances
    assert not store.find_records(deleted_subject("coder", "k"))
    ended = store.find_ended(deleted_subject("coder", "k"))
    assert ended is not None
    assert ended.state == "deleted"
    store.close()


def until(folders: InstanceFolders) -> list[Moved]:
    deadline = time.monotonic() + 10
    while not (moved := folders.moved()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return moved
