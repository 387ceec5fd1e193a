"""Processes by their numbers, which the kernel gives to others when they end: what the host's /proc shows of them,
signals, and the end of those that nothing else ends.

Two kinds of processes outlive what made them.

- A jail without namespaces: whatever it started belongs to its process session, because the launcher begins a session
  for each jail and the filter refuses another.
- A jail that was being made when its tool host was killed. bubblewrap is two processes. The second one, the first of
  the jail's pid namespace, waits until the first one lets it go on, and asks the kernel only later to be killed with
  it. When the first one is killed in between, the second one waits for ever, with the jail's namespaces and mounts.
  Nothing in the jail runs by then. So a tool host that begins looks for such processes. A jail that lives is never one:
  its second process has the first one for a parent.

Source: docs/design/sandbox.md sections 5 and 7.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from goondan.toolhost.policy.subject import JAIL_CODE

#: Rounds of finding and killing. Each takes some milliseconds; a process that is stopped first starts no other one.
MAX_ROUNDS: Final = 50
#: A part of the arguments of every jail's bubblewrap: what boots in it.
_OURS: Final = f"{JAIL_CODE}/boot.".encode()


def process_stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat behind the process's name, its state first; none when the process is gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as source:
        return source.read().rpartition(b")")[2].split()
    return []


def process_status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; empty when the process is gone."""
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as source:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in source)}
    return {}


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError), open(f"/proc/{pid}/task/{thread}/children", "rb") as source:
                found += map(int, source.read().split())
    return found


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(session: int) -> list[int]:
    """The living processes of a process session."""
    number = b"%d" % session
    return [pid for pid in _all() if (stat := process_stat(pid))[3:4] == [number] and stat[0] not in (b"Z", b"X")]


def end_session(session: int) -> None:
    """Kill every process of a process session. They are stopped first, so that none can start another meanwhile."""
    for _ in range(MAX_ROUNDS):
        if signal_all(lambda: members(session), signal.SIGSTOP) == 0:
            return
        signal_all(lambda: members(session), signal.SIGKILL)


def stranded() -> list[int]:
    """The processes of jails that were being made when their tool host was killed, as far as this user may see."""
    return [pid for pid in _all() if _is_stranded(pid)]


def end_stranded() -> int:
    """Kill these processes. Returns how many there were."""
    return signal_all(stranded, signal.SIGKILL)


def _is_stranded(pid: int) -> bool:
    status = process_status(pid)
    ended, inside = status.get("State", "X")[0] in "ZX", status.get("NSpid", "").split()[1:]
    if status.get("Name") != "bwrap" or ended or inside != ["1"]:
        return False
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb", buffering=0) as source:
        return _OURS in source.read() and process_status(int(status["PPid"])).get("Name") != "bwrap"
    return False


def signal_all(find: Callable[[], Collection[int]], number: int) -> int:
    """Send a signal to every process that `find` finds, and to none that took the number of one: how many it found.

    It is asked twice. Who is found again while we hold it by a descriptor is the one that we hold, or that has ended.
    """
    held: dict[int, int] = {}
    first = find()
    try:
        for pid in first:
            with suppress(OSError):  # it has ended, or we have no descriptor left: the next round's, or the kernel's
                held[pid] = os.pidfd_open(pid)
        found = set(find()) if held else set()
        for pid, pidfd in held.items():
            if pid in found:
                with suppress(OSError):
                    signal.pidfd_send_signal(pidfd, number)
    finally:
        for pidfd in held.values():
            os.close(pidfd)
    return len(first)
