"""The user numbers that root's tool hosts and their jails have, and the setting that moves them. This process's are
read once, when it starts: every process of a kernel inherits the setting, so all of them mean the same users.

Without the setting they lie above what directory services hand out (the ranges of SSSD and FreeIPA end at
2,000,200,000), where systemd's table (https://systemd.io/UIDS-GIDS/) has nothing assigned: up to 0x7FFFFFFE.
`$GOONDAN_JAIL_UIDS`, `FIRST-LAST`, is another range, for a machine on which these are somebody's. How a
tool host is let in to what is root's: startup.admit_toolhost.

Source: docs/decisions/039.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

VARIABLE: Final = "GOONDAN_JAIL_UIDS"
#: Numbers below are of the system's own users.
MIN_FIRST: Final = 1000
#: The last two of 32 bits mean "no user" to system calls.
MAX_LAST: Final = 0xFFFFFFFD
#: Fewer leave no room for several tool hosts, each with a block of numbers of its own, and for instances.
MIN_COUNT: Final = 16_384
#: `nobody` of many systems, and the same for 16 bits.
_NOBODY: Final = (65_534, 65_535)
_RANGE: Final = r"([0-9]{1,10})-([0-9]{1,10})"


class UserNumbers(NamedTuple):
    """The numbers of users on this machine. Groups have the same numbers."""

    #: First and last of the numbers of jails.
    jails: tuple[int, int]
    #: The number of every tool host.
    toolhost: int
    #: First and last of the numbers of instances.
    instances: tuple[int, int]


DEFAULT: Final = UserNumbers((0x77400000, 0x77FFFFFE), 0x77FFFFFF, (0x78000000, 0x7FFFFFFE))


def read_user_numbers(setting: str | None) -> UserNumbers:
    """The numbers for a value of the variable; None or empty: those without it. Raises ValueError, which says why."""
    if not setting:
        return DEFAULT
    found = re.fullmatch(_RANGE, setting.strip())
    if found is None:
        raise ValueError(f"{VARIABLE} is not FIRST-LAST, two numbers")
    first, last = int(found[1]), int(found[2])
    if first < MIN_FIRST or last > MAX_LAST:
        raise ValueError(f"{VARIABLE} must lie between {MIN_FIRST} and {MAX_LAST}")
    if last - first + 1 < MIN_COUNT:
        raise ValueError(f"{VARIABLE} needs at least {MIN_COUNT} numbers")
    if any(first <= nobody <= last for nobody in _NOBODY):
        raise ValueError(f"{VARIABLE} must not hold {_NOBODY[0]} and {_NOBODY[1]}, which are nobody's on many systems")
    middle = first + (last - first + 1) // 2
    return UserNumbers((first, middle - 1), middle, (middle + 1, last))


def problem() -> str | None:
    """Why the variable of this process is not used; None when nothing is."""
    try:
        read_user_numbers(os.environ.get(VARIABLE))
    except ValueError as error:
        return str(error)
    return None


#: Those of this process.
NUMBERS: Final = DEFAULT if problem() else read_user_numbers(os.environ.get(VARIABLE))
#: User and group of every tool host that root has started.
TOOLHOST_UID: Final = NUMBERS.toolhost
