"""Jails that nobody can end: they were being made when their tool host was killed.

bubblewrap is two processes. The second one, the first of the jail's pid namespace, waits until the first one lets it
go on, and asks the kernel only later to be killed with it. When the first one is killed in between, because its tool
host was, the second one waits for ever, with the jail's namespaces and mounts. Nothing in the jail runs by then.

So a tool host that begins looks for such processes. A jail that lives is never one: its second process has the first
one for a parent.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

from toolhost.policy.conventions import JAIL_CODE
from toolhost.signalling import signal_all

#: bubblewrap's name, as the kernel has it (/proc/PID/comm).
_BUBBLEWRAP: Final = b"bwrap\n"
#: What stands in the arguments of every jail's bubblewrap.
_OURS: Final = f"{JAIL_CODE}/boot.py".encode()


def end_stranded() -> int:
    """Kill them; how many there were."""
    return signal_all(stranded, signal.SIGKILL)


def stranded() -> list[int]:
    """The processes that were left so, as far as this user may see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_stranded(name)]


def _is_stranded(pid: str) -> bool:
    with suppress(OSError, ValueError, KeyError):  # it has ended, or is closed to us
        if _read(pid, "comm") != _BUBBLEWRAP:
            return False
        fields = dict(line.split(b":", 1) for line in _read(pid, "status").splitlines() if b":" in line)
        if fields[b"State"].split()[0] in (b"Z", b"X") or fields[b"NSpid"].split()[1:] != [b"1"]:
            return False
        parent = fields[b"PPid"].split()[0].decode()
        return _OURS in _read(pid, "cmdline") and _read(parent, "comm") != _BUBBLEWRAP
    return False


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()
