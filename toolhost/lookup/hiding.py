"""The folders that no jail may see, and every path at which they are on this host.

A folder can be in several places: a bind mount shows it, or a part of it, at another path, and a grant of that path
would uncover it. /proc/self/mountinfo says which part of which file system every mount shows. So the places are found
by device and path in the file system. Mounts come and go: each launch looks again.

A folder that is made, replaced or moved after a jail was started is not covered in that jail. `Hiding` notices that,
and the jail has to end.

Source: docs/design/sandbox.md section 1; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from goondan.schemas.bundle.launch import ToolHostSpec
from goondan.schemas.worker.grantable import KEYS, STATE_ROOT, TOP, runtime_bases, within, workspace_of
from goondan.toolhost.launcher.allow_list import state_root_of
from goondan.toolhost.policy.subject import HostFacts

_MOUNTS: Final = "/proc/self/mountinfo"
#: How Linux writes a blank, a tab, a line's end and a backslash in a path.
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
#: What Linux appends to the path of a folder that was removed while it was mounted.
_REMOVED: Final = "//deleted"


class MountInfo(NamedTuple):
    """One mount of /proc/self/mountinfo."""

    #: Its number.
    number: int
    #: The device of its file system.
    device: str
    #: The folder of that file system that it shows.
    root: str
    #: Where it shows it.
    point: str


def hidden_folders(spec: ToolHostSpec, endpoint: str, home: str, operator: int) -> list[str]:
    """The folders that no jail may see, whether they exist or not: state roots, and the places of runtime directories
    and of the key of OAuth tokens, as far as this host can tell.

    `endpoint` is the broker's, `operator` the user who has started us (powers.Powers), `home` that user's home
    directory.
    """
    folders = [state_root_of(spec.state_dir), *spec.hidden]
    if home not in ("", "/"):
        folders += [f"{home}/{STATE_ROOT}", f"{home}/{KEYS}"]
    folders += runtime_folders(endpoint)
    folders += runtime_bases(os.environ, operator)
    return list(dict.fromkeys(folders))


def runtime_folders(endpoint: str) -> list[str]:
    """The folder of all runtime directories in which a broker's socket lies; for a socket elsewhere, its own folder.

    [] for a broker that is reached by other means, or whose socket is in a folder that everybody uses.
    """
    if not endpoint.startswith("ipc://"):
        return []
    run_dir = os.path.dirname(endpoint.removeprefix("ipc://"))
    above = os.path.dirname(run_dir)
    if os.path.basename(above).startswith("goondan"):
        return [above]
    return [] if run_dir in TOP or run_dir in ("", "/run") else [run_dir]


def with_hidden(facts: HostFacts, wanted: Iterable[str]) -> HostFacts:
    """The same facts with these folders hidden, as this host has them now."""
    wanted = list(dict.fromkeys(wanted))
    there = list(dict.fromkeys(os.path.realpath(path) for path in wanted if os.path.isdir(path)))
    absent = [os.path.realpath(path) for path in wanted if not os.path.isdir(path)]
    found = [path for path in there if path != "/"]
    if found:
        found += [path for path in _elsewhere(found) if path not in found]
    return msgspec.structs.replace(facts, hide=wanted, hidden=found, absent=absent)


def as_it_is_now(facts: HostFacts) -> HostFacts:
    """The facts with the hidden folders looked up once more."""
    return with_hidden(facts, facts.hide)


# --- the same folder in other places --------------------------------------------------------------------------------


def _elsewhere(folders: list[str]) -> list[str]:
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as source:
            mounts = read_mounts(source.read())
    except OSError:
        return []  # /proc is not there: no jail can be made either
    found: list[str] = []
    for folder in folders:
        number = _mount_of(folder)
        for mount, path in places_of(folder, number, mounts):
            # Another mount can cover this one; then something else is at that path.
            if os.path.isdir(path) and _mount_of(path) == mount.number:
                found.append(os.path.realpath(path))
    return found


def read_mounts(text: str) -> list[MountInfo]:
    """The mounts of /proc/self/mountinfo."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) > 4 and fields[0].isdigit() and not fields[3].endswith(_REMOVED):
            mounts.append(MountInfo(int(fields[0]), fields[2], _plain(fields[3]), _plain(fields[4])))
    return mounts


def _plain(escaped: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), escaped)


def places_of(folder: str, number: int, mounts: list[MountInfo]) -> list[tuple[MountInfo, str]]:
    """Where else `folder`, or a part of it, shows: the mounts, and the paths. `number` is the mount that it is in.

    What is mounted in the folder belongs to it, except the folders that instances work in.
    """
    at = next((mount for mount in mounts if mount.number == number), None)
    if at is None:
        return []
    of_it = [(at.device, _joined(at.root, folder[len(at.point.rstrip("/")) :]), folder)]
    in_it = [mount for mount in mounts if mount.point != folder and within(mount.point, folder)]
    of_it += [(mount.device, mount.root, mount.point) for mount in in_it if workspace_of(mount.point, folder) is None]
    found = []
    for mount in mounts:
        for device, path, stands in of_it:
            if mount.device != device:
                continue
            if within(path, mount.root):
                place = _joined(mount.point, path[len(mount.root.rstrip("/")) :])
            elif (
                within(mount.root, path) and workspace_of(stands + mount.root[len(path.rstrip("/")) :], folder) is None
            ):
                place = mount.point
            else:
                continue
            if not within(place, folder):
                found.append((mount, place))
    return found


def _joined(folder: str, rest: str) -> str:
    return folder.rstrip("/") + rest if rest.strip("/") else folder


def _mount_of(path: str) -> int:
    """The number of the mount that a path is in; -1 when that cannot be told."""
    with suppress(OSError, StopIteration, ValueError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as source:
                return int(next(line for line in source if line.startswith("mnt_id:")).partition(":")[2])
        finally:
            os.close(fd)
    return -1


# --- by names that are not known ------------------------------------------------------------------------------------

#: The name of a workspace's state directory in `workspaces` of a state root, where nothing else is.
_WORKSPACE: Final = re.compile("[0-9a-f]{16}")
#: How many names are looked at there: a tool may have put a million into a folder of that name.
_LOOKED_AT: Final = 64


def unknown_place(path: str, hidden: Iterable[str]) -> str | None:
    """The hidden folder that `path` (without links) is, lies in or holds under a name that `hidden` does not know.

    None when there is none. Names prove nothing: a file system may take `/data/STATE` for `/data/state`, and a mount
    may be new. The state root of another kernel is in no list; its content shows what it is.
    """
    known = frozenset(hidden)
    here = {identity: above for above in _upwards(path) if (identity := _identity(above)) is not None}
    itself = _identity(path)
    for folder in known:
        identity = _identity(folder)
        if identity is None:
            continue
        place = here.get(identity, folder)
        if not any(within(place, one) for one in known):
            return folder  # it is the folder, or lies in it
        for above in _upwards(folder)[1:]:
            if itself is not None and _identity(above) == itself and above != path:
                place = _joined(path, folder[len(above.rstrip("/")) :])
                if place not in known and _identity(place) == identity:
                    return folder  # it holds the folder
    if any(within(path, folder) for folder in known):
        return None  # others judge it
    return next((above for above in here.values() if _is_state_root(above)), None)


def _upwards(path: str) -> list[str]:
    """A path and the folders above it, the nearest first."""
    parts = path.rstrip("/").split("/")
    return ["/".join(parts[:end]) or "/" for end in range(len(parts), 0, -1)]


def _is_state_root(path: str) -> bool:
    try:
        with os.scandir(f"{path}/workspaces") as entries:
            names = [entry.name for entry in islice(entries, _LOOKED_AT)]
    except OSError:
        return False
    return any(_WORKSPACE.fullmatch(name) and os.path.isdir(f"{path}/workspaces/{name}/kernel") for name in names)


# --- while a jail lives ---------------------------------------------------------------------------------------------


class Hiding:
    """The folders that one jail must not see, in the state in which they were before it was made."""

    __slots__ = ("_were",)

    def __init__(self, paths: Iterable[str], absent: Iterable[str] = ()) -> None:
        """`paths` lie in something that the jail sees. Of these, `absent` did not exist when the plan was made."""
        gone = frozenset(absent)
        self._were = [(path, None if path in gone else _identity(path)) for path in paths]

    def broken(self) -> str | None:
        """A folder that has changed and shows in the jail; None while all are hidden."""
        for path, was in self._were:
            now = _identity(path)
            if now != was and now is not None:
                return path
        return None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
