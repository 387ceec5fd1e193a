"""The Landlock ruleset of a jail: the second wall over files, connections and signals. Pure.

Landlock only takes away, and what it took never comes back. It holds for what runs after it, so the jail's boot stage
(inside/confine.py) applies it before any tool code. It cannot make an exception below a path that it allows: only a
mount keeps something inside a workdir read-only.

Source: docs/design/sandbox.md section 3.5; the kernel's landlock.rst.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: The newest version of the interface that we use; a newer Linux kernel has all of it.
NEWEST_ABI: Final = 6

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_MAKE_DEVICES: Final = 1 << 6 | 1 << 11

#: The rights on files of each version of the interface: all bits up to this one.
_FILE_RIGHTS: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_TCP: Final = 0b11  # bind and connect, from version 4
_SCOPES: Final = 0b11  # abstract sockets and signals, from version 6

LIST: Final = _READ_DIR
READ: Final = _READ_FILE | _READ_DIR
RUN: Final = READ | _EXECUTE
#: Everything that can be done to files and folders, except making device nodes and driving devices.
WRITE: Final = ((1 << 15) - 1) & ~_MAKE_DEVICES
DEVICES: Final = READ | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
#: The rights that something other than a folder can have; Linux refuses a rule with more.
_FOR_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


class Ruleset(Struct, frozen=True, rename="camel"):
    """A Landlock ruleset, as the boot stage applies it. The numbers are bits of the interface."""

    #: Rights on files that are taken away.
    files: int
    #: Rights on connections that are taken away.
    net: int
    #: What is kept inside the jail: abstract sockets, signals.
    scopes: int
    #: What is given back: (path, rights).
    rules: list[tuple[str, int]]


def ruleset(abi: int, rules: list[tuple[str, int]], *, network: bool) -> Ruleset | None:
    """The ruleset for a Linux kernel with that version of Landlock; None for one without it.

    `rules` give rights to what is at and below a path, as the jail sees it. `network`: a grant says what may be
    reached, so Landlock leaves TCP to it.
    """
    if abi < 1:
        return None
    known = _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]
    return Ruleset(
        files=known,
        net=_NET_TCP if abi >= 4 and not network else 0,
        scopes=_SCOPES if abi >= 6 else 0,
        rules=[(path, rights & known) for path, rights in rules if rights & known],
    )


def for_file(rights: int) -> int:
    """The part of the rights that a file can have."""
    return rights & _FOR_FILES
