"""Protects the memory of a process that holds keys or tokens: no core file, and no other process can read it.

When a process crashes, it leaves its memory in a file if limits allow one. Other processes of the same user can read
the memory of a living process. docs/decisions/044 has the table of who does what, and why.
"""

from __future__ import annotations

import resource


def forbid_core_dumps() -> None:
    """Leave no core file, whatever the shell allows. The same holds for every process that this one starts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def close_memory() -> None:
    """No program can dump this process, not even one that the system starts for crashes. Only root can look into it.

    The files of this process in /proc that tell its memory, environment and descriptors belong to root from now on. It
    can still read its own. It lasts until the next exec. Forked processes have it too.
    """
    from goondan.schemas.system.startup import (
        deny_dumps,  # ctypes takes milliseconds, and some commands need only the other half
    )

    forbid_core_dumps()
    deny_dumps()
