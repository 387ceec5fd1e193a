"""The checks of what a tool host that gave root up may ask of root's processes (requests.py). Pure.

Root's processes get the allow-list before the tool host gives root up, and keep it until they end. A tool host that
somebody has taken over can ask for anything. At most it gets a jail, whose user owns nothing else. In that jail no
folder can be written to that belongs to the system, to the home directory, to our code or to our state.

On most hosts the launcher becomes a user who owns nothing before it executes anything, so the program does not matter.
Where bubblewrap runs as root, the tool host chooses the mounts among the parts that jails are made of. It does not
choose the program, its environment, its namespaces, its capabilities or its filter. The allow-list fixes them, and it
was written before anything hostile was read.

Source: docs/design/sandbox.md section 3.1; docs/decisions/038 and 039.
"""

from __future__ import annotations

import errno
import re

TYPE_CHECKING = False  # to import `typing` takes a tenth of the start of root's programs
if TYPE_CHECKING:
    from typing import Final

    from goondan.toolhost.launcher.requests import AllowList, Enclosed, Launch

#: Largest request (bytes): arguments, places and stages of one jail have some kilobytes.
MAX_REQUEST: Final = 1 << 17
#: Descriptors in one message; the kernel's own limit is 253.
MAX_DESCRIPTORS: Final = 200

# --- the allow-list ---------------------------------------------------------------------------------------------------

#: The name of a feature: of a folder.
_FEATURE: Final = re.compile(r"[a-z][a-z_]*")
#: The niceness values that set a jail's share of processors.
_NICENESS: Final = range(20)
#: The path of an instance's folder in a state root, and of everything in it.
_WORKSPACE: Final = re.compile(r"(?:/workspaces/[^/]+)?/instances/[^/]+/[^/]+/workspace(?:/.*)?", re.DOTALL)
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}")
#: Options that put something at a place, and how many words follow each.
_MOUNTS: Final = {
    "--ro-bind": 2, "--bind": 2, "--ro-bind-data": 2, "--symlink": 2, "--tmpfs": 1, "--proc": 1, "--dev": 1,
    "--perms": 1, "--size": 1, "--dir": 1, "--remount-ro": 1, "--setenv": 2, "--chdir": 1,
}  # fmt: skip
#: Those of them that take their first word from bubblewrap's own root directory.
_BINDS: Final = ("--ro-bind", "--bind")


class NotAllowed(OSError):
    """The tool host asked for something that the allow-list does not have."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EPERM, text)


def within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it. Both absolute and without `..`."""
    return path == folder or path.startswith(folder if folder.endswith("/") else folder + "/")


def is_feature(name: str) -> bool:
    """Whether this can be a feature's name: no path can be made of one."""
    return _FEATURE.fullmatch(name) is not None


def is_jails(uid: int, allowed: AllowList) -> bool:
    """Whether a user is one that jails of this tool host can be."""
    return any(first <= uid <= last for first, last in (allowed["jails"], allowed["instances"]))


def check_launch(request: Launch, allowed: AllowList, *, enclosed: bool) -> None:
    """Raise NotAllowed for a launch that is not a jail's. `check_writable` checks its places.

    `enclosed`: jails are made by a bubblewrap that runs as root, because there are no user namespaces.
    """
    if request["enclosure"] is not None and not enclosed:
        raise NotAllowed("jails have user namespaces here")
    if request["uid"] is None or not is_jails(request["uid"], allowed):
        raise NotAllowed(f"a jail cannot be the user {request['uid']}")
    fallback_owner = request["fallbackOwner"]
    if fallback_owner is not None and not allowed["instances"][0] <= fallback_owner <= allowed["instances"][1]:
        raise NotAllowed(f"a workdir cannot be given to the user {fallback_owner}")
    if request["stage"] not in allowed["stages"]:
        raise NotAllowed(f"{request['stage']} cannot be covered")
    for index, stage in enumerate(request["stages"]):
        if stage["at"] != f"{request['stage']}/{index}":
            raise NotAllowed(f"nothing can be staged at {stage['at']}")
    for path in request["joins"]:
        if not _is_group(path, allowed):
            raise NotAllowed(f"{path} is no control group of a jail")
    if request["niceness"] not in _NICENESS:
        raise NotAllowed(f"the niceness of a jail cannot be {request['niceness']}")


def _is_group(path: str, allowed: AllowList) -> bool:
    folder, _, file = path.rpartition("/")
    if file not in ("tasks", "cgroup.procs"):
        return False
    starts = [f"{group}/" for group in allowed["groups"]] + ([allowed["beside"]] if allowed["beside"] else [])
    return any(folder.startswith(start) and _NUMBER.fullmatch(folder[len(start) :]) for start in starts)


def check_writable(path: str, allowed: AllowList, state_root: str | None) -> None:
    """Raise NotAllowed for a place that no jail may write to. `path` has no links."""
    if not path.startswith("/") or path.endswith(" (deleted)"):
        raise NotAllowed(f"{path} is no place of this host")
    if state_root is not None and within(path, state_root):
        check_workspace(path, state_root)
        return
    if path in allowed["top"] or any(within(path, folder) for folder in allowed["closed"]):
        raise NotAllowed(f"{path} is never writable for a jail")
    home = allowed["home"]
    hidden = within(path, home) and path[len(home) + 1 :].startswith(".")
    if home not in ("", "/") and (within(home, path) or hidden):
        raise NotAllowed(f"{path} is never writable for a jail: the home directory's own programs trust it")


def check_workspace(path: str, state_root: str | None) -> None:
    """Raise NotAllowed unless `path` is an instance's folder or lies in one. `path` has no links and no `..`."""
    if state_root is None or not path.startswith(state_root) or not _WORKSPACE.fullmatch(path[len(state_root) :]):
        raise NotAllowed(f"{path} is no instance's folder")


def state_root_of(state_dir: str) -> str:
    """The state root of every workspace; for a state directory that stands by itself, that directory."""
    above, _, _ = state_dir.rpartition("/")
    return above.rpartition("/")[0] if above.endswith("/workspaces") else state_dir


def way_of(request: Launch, ways: list[Enclosed]) -> Enclosed:
    """The entry of `ways` that has this root directory. Raises NotAllowed. Pure."""
    for way in ways:
        if request["enclosure"] == way["enclosure"]:
            return way
    raise NotAllowed("that is not the root directory that bubblewrap gets here")


def check_enclosed(request: Launch, options: bytes, code: bytes, allowed: Enclosed, filters: list[str]) -> None:
    """Raise NotAllowed for anything but a jail that begins as root with the walls of `allowed` and one of these filters
    (hexadecimal). Pure.
    """
    if request["argv"] != allowed["argv"] or request["env"] or request["folder"] is not None:
        raise NotAllowed("that is not how bubblewrap is started here")
    if code.hex() not in filters:
        raise NotAllowed("that is no system call filter of a jail")
    words = [word.decode("utf-8", "surrogateescape") for word in options.split(b"\0")]
    walls = allowed["walls"]
    if words[: len(walls)] != walls or words[-1] != "":
        raise NotAllowed("these are not the walls of a jail")
    # Processes of the host show in its /proc, which bubblewrap needs for itself.
    sources = [path for path in allowed["enclosure"]["shown"] if path != "/proc"]
    _check_mounts(words[len(walls) : -1], [*sources, str(request["stage"])])


def _check_mounts(words: list[str], sources: list[str]) -> None:
    at = 0
    while at < len(words):
        option = words[at]
        count = _MOUNTS.get(option)
        given = words[at + 1 : at + 1 + (count or 0)]
        if count is None or len(given) < count:
            raise NotAllowed(f"bubblewrap has no {option} for a jail")
        if option in _BINDS and not (_is_plain(given[0]) and any(within(given[0], path) for path in sources)):
            raise NotAllowed(f"nothing of a jail is in {given[0]}")
        if option in ("--proc", "--dev") and given[0] != option.replace("--", "/"):
            raise NotAllowed(f"bubblewrap has no {option} {given[0]} for a jail")
        at += 1 + count


def _is_plain(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/")
