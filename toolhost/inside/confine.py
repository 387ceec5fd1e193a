"""The jail's boot stage: it puts up the last walls, which is possible from inside only. No tool code runs before it.

The plan comes on a descriptor, as one msgpack map. If a wall cannot be put up, the process ends, and with it the jail.

Limits are set here and not before bubblewrap. A limit of processes that is set inside a user namespace counts only the
processes there.

Source: docs/design/sandbox.md sections 3.5 and 3.6; toolhost/policy computes what is in the plan.
"""

from __future__ import annotations

import posix
import sys

from . import wire
from .system import FAILED, PR_SET_NO_NEW_PRIVS, REPLACED, Filter, call

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: The descriptor of the plan (goondan.toolhost.policy.subject.BOOT_FD).
PLAN_FD = 8
#: A plan is some kilobytes; one per path that shows.
MAX_PLAN = 1 << 20

RLIMIT_NOFILE = 7  # include/uapi/asm-generic/resource.h
_PATH_BENEATH = 1
_O_PATH = 0o10000000
_S_IFMT, _S_IFDIR = 0o170000, 0o040000
#: Run, write, read, truncate, drive a device.
_FOR_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def confine() -> dict[str, Any]:
    """Put up the walls of the plan, and return the plan.

    With `drops` this process is still root. It becomes the user of its first argument before anything else. The other
    arguments are places of which the launcher made copies.

    With `calls` this is the fork server, and two walls are left to each call. Landlock forbids mounts, which the server
    makes for each call. The limit of open files is the tool's, and the server needs more.

    The places of the jail must still be those of the plan: somebody who can write to a folder of the host could have
    put a link in the place of one before it was mounted.
    """
    try:
        plan = _read_plan()
        if plan["drops"]:
            from .dropping import drop

            drop(int(sys.argv[1]), plan["folder"])
        for path in sys.argv[2:]:
            plan["seen"].pop(path, None)  # a copy, made where no jail can write
        for path, (device, inode) in plan["seen"].items():
            _check(path, posix.lstat(path), device, inode)
        for number, value in plan["limits"]:
            if number != RLIMIT_NOFILE or plan["calls"] is None:
                limit(number, value)
        if plan["filter"] is not None:
            call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # where bubblewrap has not seen to it
        if plan["landlock"] is not None and plan["calls"] is None:
            landlock(plan["landlock"], open_places(plan["landlock"]["rules"], plan["seen"]))
        if plan["filter"] is not None:
            Filter(bytes.fromhex(plan["filter"])).install()
    except Replaced as error:
        fail(str(error), REPLACED)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{type(error).__name__}: {error}")
    return plan


def _read_plan() -> dict[str, Any]:
    data = b""
    while len(data) < MAX_PLAN:
        more = posix.read(PLAN_FD, MAX_PLAN)
        if not more:
            break
        data += more
    posix.close(PLAN_FD)
    plan: dict[str, Any] = wire.unpack(data)
    return plan


def limit(number: int, value: int) -> None:
    """Lower a resource limit for good; what is lower already stays."""
    try:  # noqa: SIM105 # contextlib is not imported here
        call("prlimit64", 0, number, value.to_bytes(8, "little") * 2, 0)
    except PermissionError:
        pass  # it would have been raised


class Replaced(ValueError):
    """A place of the jail is not the one that was looked at."""


def _check(path: str, status: posix.stat_result, device: int, inode: int) -> None:
    if (status.st_dev, status.st_ino) != (device, inode):
        raise Replaced(f"{path} was replaced while the jail was being made")


def open_places(rules: list[tuple[str, int]], seen: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """The places of rules as descriptors, with the rights that they get; one that is not there gets none.

    `seen` are the device and inode that some must have. Raises Replaced.
    """
    places = []
    for path, rights in rules:
        try:
            place = posix.open(path, _O_PATH | posix.O_CLOEXEC)
        except FileNotFoundError:
            continue
        status = posix.fstat(place)
        if path in seen:  # without mounts it could have been replaced since
            _check(path, status, *seen[path])
        if status.st_mode & _S_IFMT != _S_IFDIR:
            rights &= _FOR_FILES  # the kernel refuses a rule that gives a file what only folders have
        places.append((place, rights))
    return places


def landlock(ruleset: dict[str, Any], places: list[tuple[int, int]]) -> None:
    """Put this process, and all that it starts, under a ruleset for good, and close the places. Raises OSError."""
    # An older kernel knows a shorter structure, and takes a longer one that ends in zeros.
    attributes = b"".join(ruleset[name].to_bytes(8, "little") for name in ("files", "net", "scopes"))
    fd = call("landlock_create_ruleset", attributes, len(attributes), 0)
    for place, rights in places:
        rule = rights.to_bytes(8, "little") + place.to_bytes(4, "little")
        call("landlock_add_rule", fd, _PATH_BENEATH, rule, 0)
        posix.close(place)
    call("landlock_restrict_self", fd, 0)
    posix.close(fd)


def fail(reason: str, status: int = FAILED) -> NoReturn:
    """Write to standard error, which the host reads, why a wall cannot be put up, and end this process."""
    posix.write(2, f"boot: {reason}\n".encode("utf-8", "replace"))
    posix._exit(status)
