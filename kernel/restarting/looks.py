"""Has the bundle of a running kernel read again (reader.py), one look at a time."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec

from goondan.kernel.log_bounds import open_log
from goondan.kernel.restarting.reader import Task
from goondan.kernel.restarting.revision import Revision, RevisionRefused, decode
from goondan.kernel.spawn import command, memory_file, start_failure, start_program
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.reaping import Child, Exit, Reaper
from goondan.kernel.trust.powers import Power
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import GoondanError, fail

#: Reading a bundle takes well under a second, and longer for one with many modules on a busy machine. One that takes
#: more is given up (seconds).
LOOK_S: Final = 30.0


class Looks:
    """`log_path` is the supervisor's own log: what the reader says goes there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reaper: Reaper, options: Options, log_path: str) -> None:
        self.loop = loop
        self.reaper = reaper
        self.options = options
        self.log_path = log_path
        #: Held while the bundle is read, or changed by a changeset.
        self.turn = asyncio.Lock()
        self._child: Child | None = None

    async def look(self, running: list[Power]) -> Revision:
        """The bundle as it is now; `running` are the powers of what runs.

        Raises GoondanError: why it may not run, or why that cannot be found out; nothing has changed then.
        """
        async with self.turn:
            result = os.memfd_create("revision")
            try:
                seen = await self._read(running, result)
                with open(os.dup(result), "rb") as source:
                    source.seek(0)
                    data = source.read()
            finally:
                os.close(result)
        try:
            found = decode(data)
        except DECODE_ERRORS:
            raise GoondanError(start_failure("the reader of the bundle", seen.cause, self.log_path)) from None
        if isinstance(found, RevisionRefused):
            raise found.exception()
        return found

    def close(self) -> None:
        """End a look that still runs."""
        if self._child is not None:
            self._child.kill()

    async def _read(self, running: list[Power], result: int) -> Exit:
        task = memory_file("task", msgspec.msgpack.encode(Task(self.options, running)))
        given = [task]
        ended: asyncio.Future[Exit] = self.loop.create_future()
        try:
            log = open_log(self.log_path)
            given.append(log)
            arguments = ["--task-fd", str(task), "--result-fd", str(result), "--parent-pid", str(os.getpid())]
            pid = start_program(
                command("goondan.kernel.restarting.reader", arguments),
                env=os.environ,  # the bundle may name any variable
                output_fd=log,
                pass_fds=[task, result],
            )
        except OSError as error:
            raise fail("E_INTERNAL", f"the reader of the bundle could not be started: {error}") from None
        finally:
            for fd in given:
                os.close(fd)
        child = self._child = self.reaper.watch(pid, ended.set_result, leads_group=True)
        if child is None:
            raise AssertionError(f"the reader, pid {pid}, cannot be watched")
        try:
            async with asyncio.timeout(LOOK_S):  # not wait_for, see Ending.run
                return await asyncio.shield(ended)
        except TimeoutError:
            raise fail("E_KERNEL_SLOW", f"the bundle was not read within {LOOK_S:g} s") from None
        finally:
            if not ended.done():
                child.kill()
            self._child = None
