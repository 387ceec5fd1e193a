"""How the log files of a role are named."""

from __future__ import annotations

from typing import Final

#: A log's file is `<role>.log`; its content before it became too large is `<role>.log.1`, and what is kept of all that
#: was before is `<role>.log.2` (kernel/log_bounds.py).
SUFFIX: Final = ".log"
OLD_SUFFIX: Final = ".1"
OLDER_SUFFIX: Final = ".2"


def role_of(name: str) -> str | None:
    """The role that a file of the log folder belongs to; None for what is no log."""
    role = name.removesuffix(OLD_SUFFIX).removesuffix(OLDER_SUFFIX).removesuffix(SUFFIX)
    return role if role and name in (role + SUFFIX + end for end in ("", OLD_SUFFIX, OLDER_SUFFIX)) else None
