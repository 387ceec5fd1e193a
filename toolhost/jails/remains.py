"""Ends the processes that a jail without namespaces leaves behind: those of its session.

The launcher begins a session for each jail and the filter refuses another, so whoever is in it belongs to the jail.

Source: docs/design/sandbox.md sections 5 and 7.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

from toolhost.signalling import signal_all

#: Rounds of finding and killing; each takes some milliseconds, and what is stopped first can start nothing more.
MAX_ROUNDS: Final = 50


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as source:
                state, _, _, its_session = source.read().rpartition(b")")[2].split()[:4]
                if int(its_session) == session and state not in (b"Z", b"X"):
                    found.append(int(name))
    return found


def end_session(session: int) -> None:
    """Kill every process of a session. They are stopped first, so that none can start another one meanwhile."""
    for _ in range(MAX_ROUNDS):
        if signal_all(lambda: members(session), signal.SIGSTOP) == 0:
            return
        signal_all(lambda: members(session), signal.SIGKILL)
