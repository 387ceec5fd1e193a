"""The descriptors that stay open across the restart of a supervisor, as plain values: see handover.py.

It is a module of its own, because every start needs it. Only a restart needs the rest of the package.
"""

from __future__ import annotations

import signal
from typing import Final

from msgspec import Struct

from goondan.kernel.lock import KernelRecord

#: They wait until the new program can handle them: their default would end it.
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Held(Struct, kw_only=True):
    """The descriptors of what makes a process the kernel of a workspace (kernel/premises.py), and its record."""

    #: The folder of the locks and of the record.
    folder_fd: int
    #: The lock of the supervisor.
    lock_fd: int
    #: The lock that every trusted process of the kernel holds.
    alive_fd: int
    #: The runtime directory.
    run_dir_fd: int
    #: The path of the runtime directory, without links.
    run_dir: str
    #: The record of the kernel.
    record: KernelRecord


class Waiting(Struct, kw_only=True):
    """A command that is connected."""

    #: Its connection.
    fd: int
    #: The bytes after its last whole line.
    rest: bytes = b""
    #: The line that it waits for an answer to. Empty: it waits for none.
    asked: bytes = b""
    #: It uses the kernel.
    holds: bool = False
