"""The user numbers of this process's kernel: read from its environment once, when the process starts.

Every process of a kernel inherits the variable, so all of them mean the same users. How a tool host is let in to what
is root's: startup.admit_toolhost.

Source: docs/decisions/039.
"""

from __future__ import annotations

import os
from typing import Final

from goondan.schemas.system.users import DEFAULT, VARIABLE, read_user_numbers


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
