"""Finds out who has user numbers on this machine: accounts, ranges of other users' containers, and running processes.

A directory service (LDAP, Active Directory through SSSD or winbind) can have an account for any number, and a jail with
that number would own that person's files. So each tool host asks, while it is root, before it takes a block of numbers.

Source: docs/decisions/039.
"""

from __future__ import annotations

import grp
import os
import pwd
import time
from contextlib import suppress
from typing import Final

#: Numbers of a block that are asked of a service one by one: more jails than these are seldom alive at once.
ASKED: Final = 96
#: Longest wait for a service (seconds, for a whole block): one that does not answer must not hold up the start.
PATIENCE_S: Final = 2.0
#: Sources of accounts that are files, or whose numbers are elsewhere by definition.
_KNOWN: Final = frozenset(("files", "compat", "systemd", "mymachines", "db"))
#: More than any file of accounts has that a person wrote (bytes).
_MAX_FILE: Final = 8 << 20


class Accounts:
    """What is known of this machine, found out once."""

    def __init__(self, etc: str = "/etc", proc: str = "/proc") -> None:
        self._numbers = {*_second_field(f"{etc}/passwd"), *_second_field(f"{etc}/group"), *_owners(proc)}
        self._ranges = [*_ranges(f"{etc}/subuid"), *_ranges(f"{etc}/subgid")]
        self._asks = _has_services(f"{etc}/nsswitch.conf")

    def taken(self, first: int, last: int) -> bool:
        """Whether somebody has a number from `first` to `last`, as far as can be told."""
        if any(start <= last and first < start + count for start, count in self._ranges):
            return True
        if any(first <= number <= last for number in self._numbers):
            return True
        if not self._asks:
            return False
        until = time.monotonic() + PATIENCE_S
        for number in range(first, min(last, first + ASKED - 1) + 1):
            if account_of(number) is not None:
                return True
            if time.monotonic() > until:
                return False
        return False


def account_of(number: int) -> str | None:
    """The name of the user or group with that number; None when there is none."""
    with suppress(KeyError, OSError, OverflowError):
        return pwd.getpwuid(number).pw_name
    with suppress(KeyError, OSError, OverflowError):
        return grp.getgrgid(number).gr_name
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read(_MAX_FILE).splitlines()
    except OSError:
        return []


def _second_field(path: str) -> list[int]:
    """The numbers of the accounts in a file: name:password:NUMBER:…"""
    fields = (line.split(":") for line in _lines(path))
    return [int(found[2]) for found in fields if len(found) > 2 and found[2].isdecimal()]


def _ranges(path: str) -> list[tuple[int, int]]:
    """The ranges that users have for their containers, from a file: name:FIRST:COUNT"""
    fields = (line.split(":") for line in _lines(path))
    found = [entry for entry in fields if len(entry) == 3 and entry[1].isdecimal() and entry[2].isdecimal()]
    return [(int(first), int(count)) for _, first, count in found]


def _has_services(path: str) -> bool:
    """Whether accounts come from more than files."""
    for line in _lines(path):
        name, _, sources = line.partition("#")[0].partition(":")
        words = [word for word in sources.split() if not word.startswith("[")]
        if name.strip() in ("passwd", "group") and not _KNOWN.issuperset(words):
            return True
    return False


def _owners(proc: str) -> set[int]:
    """The users that run processes; jails of other tool hosts are among them."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(proc):
            if name.isdigit():
                with suppress(OSError):
                    found.add(os.stat(f"{proc}/{name}").st_uid)
    return found
