"""Where a hidden folder stands, from the kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.worker.grantable import runtime_place, uncovered, workspace_of
from goondan.toolhost.lookup.hiding import Hiding, MountInfo, places_of, read_mounts, runtime_folders, unknown_place

ROOT = MountInfo(1, "8:1", "/", "/")
STATE = "/home/u/.goondan"


def found(*mounts: MountInfo, number: int = 1, folder: str = STATE) -> list[str]:
    return [path for _, path in places_of(folder, number, [ROOT, *mounts])]


def test_lines_of_the_kernel() -> None:
    text = (
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw\n"
        "36 21 98:0 /mnt1/a\\040b /mnt2/c\\134d\\012 rw master:1 - ext3 /dev/root rw,errors=continue\n"
        "37 21 8:1 /gone//deleted /x rw - ext4 /dev/sda rw\n\nnonsense\n"
    )
    assert read_mounts(text) == [MountInfo(21, "8:1", "/", "/"), MountInfo(36, "98:0", "/mnt1/a b", "/mnt2/c\\d\n")]


@pytest.mark.parametrize(
    ("mount", "places"),
    [
        (MountInfo(2, "8:1", "/home/u/.goondan", "/mnt/x"), ["/mnt/x"]),
        (MountInfo(2, "8:1", "/home", "/mnt/x"), ["/mnt/x/u/.goondan"]),
        (MountInfo(2, "8:1", "/", "/mnt/x"), ["/mnt/x/home/u/.goondan"]),
        (MountInfo(2, "8:1", "/home/u/.goondan/workspaces", "/mnt/x"), ["/mnt/x"]),
        (MountInfo(2, "8:1", "/home/u/.goondan/workspaces/d/instances/a/k", "/mnt/x"), ["/mnt/x"]),
        # An instance's workspace is what its jails see anyway.
        (MountInfo(2, "8:1", "/home/u/.goondan/workspaces/d/instances/a/k/workspace", "/mnt/x"), []),
        (MountInfo(2, "8:1", "/home/u/.goondan2", "/mnt/x"), []),
        (MountInfo(2, "8:2", "/home/u/.goondan", "/mnt/x"), []),  # another file system
        (MountInfo(2, "8:1", "/home/u/.goondan/logs", f"{STATE}/other"), []),  # it stays inside
    ],
)
def test_other_places_of_a_folder(mount: MountInfo, places: list[str]) -> None:
    assert found(mount) == places


def test_a_folder_in_a_file_system_of_its_own() -> None:
    mounts = [
        MountInfo(2, "0:50", "/sub", "/data"),
        MountInfo(3, "0:50", "/", "/mnt/all"),
        MountInfo(4, "8:1", "/", "/mnt/root"),
    ]
    assert found(*mounts, number=2, folder="/data/state") == ["/mnt/all/sub/state"]


def test_what_is_mounted_in_a_folder_belongs_to_it() -> None:
    inner, elsewhere = MountInfo(2, "7:0", "/", f"{STATE}/workspaces"), MountInfo(3, "7:0", "/", "/mnt/x")
    assert found(inner, elsewhere) == ["/mnt/x"]
    own = MountInfo(2, "7:0", "/", f"{STATE}/workspaces/d/instances/a/k/workspace")
    assert found(own, elsewhere) == []


def test_a_mount_that_is_not_listed_has_no_other_places() -> None:
    assert found(number=9) == []


def test_where_sockets_are() -> None:
    assert runtime_folders("ipc:///run/user/0/goondan/abc/tools.sock") == ["/run/user/0/goondan"]
    assert runtime_folders("ipc:///tmp/goondan-0/abc/tools.sock") == ["/tmp/goondan-0"]
    assert runtime_folders("ipc:///x/y/tools.sock") == ["/x/y"]
    assert runtime_folders("ipc:///tmp/tools.sock") == runtime_folders("tcp://127.0.0.1:5") == []


def test_what_is_hidden_from_a_jail_is_looked_at_again(tmp_path: Path) -> None:
    there, later = tmp_path / "there", tmp_path / "later"
    there.mkdir()
    hiding = Hiding([str(there), str(later)], [str(later)])
    assert hiding.broken() is None
    there.rename(tmp_path / "away")
    assert hiding.broken() is None, "nothing stands there"
    (tmp_path / "other").mkdir()
    (tmp_path / "other").rename(there)
    assert hiding.broken() == str(there)
    (tmp_path / "away").replace(there)
    assert hiding.broken() is None
    later.mkdir()
    assert hiding.broken() == str(later)
    assert Hiding([str(later)], [str(later)]).broken() == str(later), "it came while the jail was being made"


def test_a_folder_is_known_whatever_it_is_called(tmp_path: Path) -> None:
    """A link stands here for what no test can make everywhere: a mount of this moment, a file system without cases."""
    state, home = tmp_path / "home" / "state", tmp_path / "home"
    (state / "a").mkdir(parents=True)
    (home / "work").mkdir()
    alias = tmp_path / "HOME"
    alias.symlink_to(home)
    hidden = [str(state)]
    for path in (f"{alias}/state", f"{alias}/state/a", str(alias)):
        assert unknown_place(path, hidden) == str(state), path
        assert unknown_place(path, [*hidden, f"{alias}/state"]) is None, "it is hidden there as well"
    beside = [str(home / "work"), f"{alias}/work", str(tmp_path / "no")]
    for path in (str(state), f"{state}/a", str(home), str(tmp_path), "/", *beside):
        assert unknown_place(path, hidden) is None, path


def test_the_state_root_of_another_kernel_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    other = tmp_path / "other"
    workspace = other / "workspaces" / "0123456789abcdef"
    (workspace / "kernel").mkdir(parents=True)
    for path in (other, workspace, workspace / "kernel", other / "policy.yaml"):
        assert unknown_place(str(path), []) == str(other)
        assert unknown_place(str(path), [str(other)]) is None, "others judge it"
    assert unknown_place(str(tmp_path), []) is None
    (tmp_path / "workspaces" / "project" / "kernel").mkdir(parents=True)
    assert unknown_place(str(tmp_path / "workspaces" / "project"), []) is None, "a project's folder"


# --- what may be named in a hidden folder (schemas/worker/grantable.py) ---------------------------------------------


@pytest.mark.parametrize(
    ("path", "workspace"),
    [
        ("/s/instances/a/k/workspace", "/s/instances/a/k/workspace"),
        ("/s/instances/a/k/workspace/x/y", "/s/instances/a/k/workspace"),
        ("/s/workspaces/d/instances/a/k/workspace", "/s/workspaces/d/instances/a/k/workspace"),
        ("/s/workspaces/d/instances/a/k/workspace/z", "/s/workspaces/d/instances/a/k/workspace"),
        ("/s", None), ("/s/instances/a/k", None), ("/s/instances/a/k/workspace2", None), ("/s/workspaces/d", None),
        ("/s2/instances/a/k/workspace", None), ("/s/workspaces/d/instances/a/workspace", None),
        ("/s/x/instances/a/k/workspace", None),
    ],
)  # fmt: skip
def test_workspaces(path: str, workspace: str | None) -> None:
    assert workspace_of(path, "/s") == workspace


@pytest.mark.parametrize(
    ("path", "own", "folder"),
    [
        ("/s", "", "/s"), ("/s/policy.yaml", "/b/t", "/s"), ("/r/d", "/b/t", "/r"), ("/sx", "", None), ("/b", "", None),
        ("/s/packages/p/data", "/s/packages/p/tools/t", None), ("/s/packages/q", "/s/packages/p/tools/t", "/s"),
        ("/s/packages/@a/p/.venv", "/s/packages/@a/p/t", None), ("/s/packages/@a/q", "/s/packages/@a/p/t", "/s"),
        ("/s/packages/p", "/s/packages", "/s"), ("/s/packages", "/s/packages", "/s"),
        ("/s/packages/@a/p", "/s/packages/@a", "/s"), ("/s/packages/p/data", "/s/packages/p", None),
        ("/s/packages", "/s/packages/p/t", "/s"), ("/s/policy.yaml", "/s/packages/p/t", "/s"),
        ("/s/instances/a/k/workspace/t", "/s/instances/a/k/workspace/t", None),
        ("/s/instances/a/j/workspace", "/s/instances/a/k/workspace/t", "/s"),
        ("/s/instances/a/k", "/s/instances/a/k", "/s"), ("/s", "/s", "/s"),
        ("/s/workspaces/d/private/c/t", "/s/workspaces/d/private/c/t", None),
        ("/s/workspaces/d/private/c/t/x", "/s/workspaces/d/private/c/t", None),
        ("/s/workspaces/d/private/c/u", "/s/workspaces/d/private/c/t", "/s"),
        ("/s/workspaces/d/private", "/s/workspaces/d/private", "/s"),
        ("/s/workspaces/d/logs", "/s/workspaces/d/private/c/t", "/s"),
        ("/s/bundle/t/data", "/s/bundle/t", None), ("/s/bundle", "/s/bundle/t", "/s"),
    ],
)  # fmt: skip
def test_what_may_be_shown(path: str, own: str, folder: str | None) -> None:
    assert uncovered(path, ["/s", "/r"], own) == folder


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/tmp/goondan-0", "/tmp/goondan-0"), ("/tmp/goondan-1000/d/client.token", "/tmp/goondan-1000"),
        ("/tmp/goondan-0-aBc9/d", "/tmp/goondan-0-aBc9"), ("/tmp/goondan-0-", "/tmp/goondan-0-"),
        ("/tmp/goondan", None), ("/tmp/goondan-kernel", None), ("/tmp/goondan-0x", None), ("/home/tmp/goondan-0", None),
    ],
)  # fmt: skip
def test_runtime_directories_of_other_kernels_are_known_by_their_names(path: str, folder: str | None) -> None:
    assert runtime_place(path) == uncovered(path, []) == folder


NAMES = st.sampled_from(["instances", "workspaces", "packages", "workspace", "private", "a", "k", "@s", "logs"])
#: Folders of tools in a state root `/s`, and what there is a tool's own; "" where nothing is.
OWN = {
    "/s/packages/a/k": "/s/packages/a",
    "/s/packages/@s/a/k": "/s/packages/@s/a",
    "/s/packages": "",
    "/s/packages/@s": "",
    "/s/instances/a/k/workspace/logs": "/s/instances/a/k/workspace",
    "/s/instances/a/k": "",
    "/s/workspaces/a/instances/a/k/workspace/k": "/s/workspaces/a/instances/a/k/workspace",
    "/s/workspaces/a/private/a/k": "/s/workspaces/a/private/a/k",
    "/s/workspaces/a/logs": "",
    "/s/a/k": "/s/a/k",
    "/s": "",
    "/elsewhere": "",
}


@given(st.sampled_from([*OWN]), st.lists(NAMES, max_size=8))
def test_only_what_is_the_tools_own_is_ever_excepted(folder: str, names: list[str]) -> None:
    own = OWN[folder]
    asked = "/".join(["/s", *names])
    mine = own != "" and (asked == own or asked.startswith(f"{own}/"))
    assert uncovered(asked, ["/s"], folder) == (None if mine else "/s")
    for its in ("/".join([own, *names]), folder) if own else ():
        assert uncovered(its, ["/s"], folder) is None
