"""The kernels of this user that run, of whatever bundle and state root: by the workspaces of the usual state root, and
by the sockets of supervisors that the system lists.

Source: docs/design/commands.md section 4.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from goondan.kernel import lock, paths
from goondan.kernel.lock import KernelRecord
from goondan.kernel.rundir import SUPERVISOR_SOCKET
from goondan.kernel.supervisor_client import SupervisorClient
from goondan.schemas.wire.errors import GoondanError

#: How long a supervisor may take to answer (seconds): one that hangs keeps nobody from seeing the others.
ANSWER_S: Final = 1.0


def kernels() -> list[KernelRecord]:
    """Their records, in the order of their bundles. One that does not answer, or whose state others can change, is
    left out.
    """
    workspaces = os.path.join(paths.state_root(), "workspaces")
    states: set[str] = set()
    with suppress(OSError):
        states.update(os.path.join(workspaces, name) for name in os.listdir(workspaces))
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            folder, _, name = line.rstrip("\n").rpartition("/")
            if name == SUPERVISOR_SOCKET and "/" in folder:
                with suppress(GoondanError, OSError):
                    states.update(_state_in(folder[folder.index("/") :]))
    found = []
    for state_dir in states:
        with suppress(GoondanError):
            record = lock.read_record(state_dir)
            if record is not None and lock.is_held(state_dir):
                found.append(record)
    return sorted(found, key=lambda record: (record.bundle, record.pid))


def _state_in(run_dir: str) -> list[str]:
    """The state of the kernel in this runtime directory, if there is one of ours. Raises GoondanError."""
    client = SupervisorClient.at(run_dir)
    if client is None:
        return []
    try:
        state_dir = client.ask("ps", ANSWER_S).state_dir
    finally:
        client.close()
    return [] if state_dir is None else [state_dir]
