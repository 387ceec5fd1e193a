"""The walls that the fork server of a jail puts around each of its calls. Pure, as plan.py is for the jail.

With `isolation: call` a jail's first worker never loads the tool. It forks for every call, and the child gets process,
mount and IPC namespaces of its own, fresh private file systems, a fresh /proc, and then the walls that every jail has:
no capabilities, the filter, Landlock. For that the server keeps two capabilities inside of the jail's user namespace,
and a filter that lets it use them; neither reaches a call.

Rules.
- What is private to a jail is fresh for every call. What was granted or mounted below such a place shows through.
- A new /proc is read-only, as the jail's is: the kernel refuses one that shows more.

Source: docs/design/sandbox.md section 5; docs/decisions/030.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from goondan.schemas.grantable import within

#: The capabilities that a fork server keeps, by the names that bubblewrap takes: to make namespaces and mounts, and to
#: take both capabilities from the bounding set of a call.
CAPABILITIES: Final = {"CAP_SYS_ADMIN": 21, "CAP_SETPCAP": 8}
#: Calls that one jail runs at a time.
MAX_CALLS: Final = 16
#: Processes that are not the tool's: the server, the first process of each call's namespace, and one call made ahead.
OWN_PROCESSES: Final = 1 + MAX_CALLS + 2

_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC = 1, 2, 4, 8


class Fresh(Struct, frozen=True):
    """A new file system for a call."""

    #: Its kind.
    kind: str
    #: Where it is mounted.
    at: str
    #: The flags of mount(2).
    flags: int
    #: Its own options.
    options: str


class CallWalls(Struct, frozen=True, kw_only=True):
    """What a call gets."""

    #: New file systems, in this order.
    fresh: list[Fresh]
    #: Places of the jail that show through, at their own paths.
    kept: list[str]
    #: Where the call starts.
    workdir: str
    #: The numbers of the capabilities that no call may have.
    drop: list[int]
    #: The call's system call filter (hexadecimal).
    filter: str
    #: Files of the new /proc that show empty.
    covered: list[str] = []


def call_walls(
    private: dict[str, str], mounted: Iterable[str], workdir: str, filter_: bytes, covered: Iterable[str] = ()
) -> CallWalls:
    """`private` are the jail's memory file systems (place -> options), `mounted` the other places where there is a
    mount.
    """
    points = set(mounted)
    own = [place for place in private if place not in points]  # one that was granted is no call's own
    below = [point for point in points if any(point != place and within(point, place) for place in own)]
    # A place comes with everything that lies inside it.
    kept = [point for point in below if not any(point != other and within(point, other) for other in below)]
    fresh = [Fresh("tmpfs", place, _NO_SUID | _NO_DEV, private[place]) for place in own]
    fresh.append(Fresh("devpts", "/dev/pts", _NO_SUID | _NO_EXEC, "newinstance,ptmxmode=0666,mode=620"))
    fresh.append(Fresh("proc", "/proc", _READ_ONLY | _NO_SUID | _NO_DEV | _NO_EXEC, ""))
    return CallWalls(
        fresh=fresh,
        kept=sorted(kept),
        workdir=workdir,
        drop=sorted(CAPABILITIES.values()),
        filter=filter_.hex(),
        covered=list(covered),
    )
