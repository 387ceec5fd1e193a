"""Programs of ours that the launcher starts beside jails: the egress proxy, makers of sockets, the template of MCP
workers.

Each is a child of the tool host, which waits for it. Use from the loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from goondan.toolhost.launcher.request import Run
from goondan.toolhost.privileges.launcher_link import LauncherLink, LauncherLost


class OwnPrograms:
    """The programs that one part of the tool host has started."""

    def __init__(self, loop: asyncio.AbstractEventLoop, launcher: LauncherLink) -> None:
        self._loop = loop
        self._launcher = launcher
        self._pidfds: dict[int, int] = {}

    async def run(self, program: Run, fds: list[int]) -> int:
        """Have the launcher start a program, and return its number. If the launcher is lost meanwhile, it is asked once
        more.

        Raises OSError.
        """
        try:
            answer, _ = await self._launcher.ask(program, fds)
        except LauncherLost:  # what it may have begun ends with its descriptors
            answer, _ = await self._launcher.ask(program, fds)
        if "error" in answer:
            raise OSError(0, answer["error"])
        pid = int(answer["pid"])
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        self._loop.add_reader(pidfd, self._reap, pid)
        return pid

    def close(self) -> None:
        """End them all."""
        for pid in list(self._pidfds):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is None:
            return
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
