"""The supervisor that a command starts before its own imports, when no kernel of the bundle has a record: both import
at the same time, on two processors. It gets its arguments, log and descriptors when the command knows them, as the
programs get theirs that a supervisor forks ahead (kernel/ahead.py). Until then it only imports.

A command that finds no use for it ends it, and one that dies closes the socket on which it waits. What goes wrong here
is not told: the command looks at everything again and in order.

Nothing is imported here that takes a command more than a millisecond.

Source: docs/design/processes.md section 1.
"""

from __future__ import annotations

import _socket
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from goondan.kernel import paths
from goondan.kernel.start import SUPERVISOR, import_whole

if TYPE_CHECKING:
    from goondan.kernel.ahead import Ahead

#: The one that waits: its pid, and our end of its socket.
_waiting: list[tuple[int, _socket.socket]] = []


def start(bundle: str | None) -> None:
    """Start one for the bundle that a command was given, if no kernel has a record. Raises nothing."""
    with suppress(Exception):  # the command says why
        path = paths.find_bundle(bundle)
        if os.path.lexists(f"{paths.state_dir(path)}/{paths.FOLDER}/{paths.RECORD}"):
            return
        import_whole("goondan.kernel.spawn")
        from goondan.kernel.spawn import WAITS, command, environment, start_program

        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            argv = command(SUPERVISOR, [WAITS, str(theirs.fileno())])
            pid = start_program(argv, env=environment(os.environ), output_fd=null, pass_fds=[theirs.fileno()])
        finally:
            os.close(null)
            theirs.close()
        _waiting.append((pid, ours))


def take() -> Ahead:
    """What starts the supervisor: the one that waits, or else one by exec."""
    from goondan.kernel.ahead import Ahead

    ahead = Ahead()
    while _waiting:
        pid, channel = _waiting.pop()
        ahead.add(SUPERVISOR, pid, channel.detach())
    return ahead


def end() -> None:
    """End the one that was not taken."""
    while _waiting:
        pid, channel = _waiting.pop()
        channel.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
