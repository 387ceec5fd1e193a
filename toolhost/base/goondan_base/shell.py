"""A shell that a bundled tool runs in its jail, until it ends or its time is over.

goondan_tool/processes.py waits for it and ends it; the printed output is returned in every case.

Source: docs/design/tools.md section 9; requirements BASH-01 to BASH-09, SKILL-14, SKILL-15.
"""

from __future__ import annotations

import errno
import posix
from time import monotonic

from goondan_tool import ToolContext, processes
from goondan_tool.processes import Process

from goondan_base.reasons import name_of, reason_of

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

#: The most of each stream that is returned (bytes). The rest is read and counted.
STREAM_BYTES = 1 << 20
#: How long before the call's deadline the shell is stopped (milliseconds). At the deadline the host ends the whole
#: jail, and there would be no result.
DEADLINE_MARGIN_MS = 1000
#: The host handles deadlines that are closer than this: stopping before them would leave no time for the shell.
SHORT_DEADLINE_MS = 3000
#: The size of the output's other fields besides command and paths, at most (bytes).
FIELDS_BYTES = 1024
SHELL = "/bin/sh"


class ShellError(Exception):
    """The shell could not be started. `code` is the operating system's name of the reason."""

    def __init__(self, number: int, operation: str, suggestion: str | None = None, *, text: str | None = None) -> None:
        self.code = name_of(number)
        super().__init__(text or f"{self.code}: {reason_of(number)}, {operation}")
        self.suggestion = suggestion


def encode(text: str) -> bytes:
    """Arguments in the form that the operating system takes."""
    return text.encode("utf-8", "replace")


class Stream(processes.Stream):
    """The output that came through one pipe."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd)
        self.name = name
        self.total = 0
        self._kept = bytearray()

    def take(self, data: bytes) -> None:
        """Count it, and keep what may be returned."""
        self.total += len(data)
        if len(self._kept) < STREAM_BYTES:
            self._kept += data[: STREAM_BYTES - len(self._kept)]

    def text(self, limit: int) -> str:
        """The first `limit` bytes as text, with a marker when there was more. Bad UTF-8 becomes U+FFFD."""
        text = self._kept.decode("utf-8", "replace")
        raw = text.encode()
        if self.total <= len(self._kept) and len(raw) <= limit:
            return text
        shown = raw[: min(limit, STREAM_BYTES)].decode("utf-8", "ignore")
        return f"{shown}\n[{self.name} was cut: {self.total} bytes in all]\n"


class Ended:
    """How a shell ended."""

    def __init__(
        self, status: int, timed_out: bool, seconds: float, streams: list[Stream], left: list[str] | None = None
    ) -> None:
        self.status = status
        #: The command lines of the processes that it left behind with its pipes. They have been killed.
        self.left = left or []
        self.timed_out = timed_out
        self.duration_ms = int(seconds * 1000)
        self.stdout, self.stderr = streams


class Shell:
    """One shell with its pipes, from start to end."""

    def __init__(
        self,
        ctx: ToolContext,
        argv: list[str],
        cwd: str,
        environment: dict[bytes, bytes],
        timeout_ms: float,
        *,
        program: str | None = None,
    ) -> None:
        self._ctx = ctx
        self._program = program or argv[0]
        self._shown = argv[0]
        self._argv = argv
        self._cwd = cwd
        self._environment = environment
        self._timeout_ms = timeout_ms

    def run(self) -> Ended:
        """Run the shell until it has exited or was stopped. Raises ShellError, Cancelled."""
        began = monotonic()
        argv, program = self._argv, self._program
        if self._cwd != posix.getcwd():
            # posix_spawn cannot change the folder, and this process has other threads. So a shell in between does it.
            # The variable that `cd` adds to the environment was not given by the caller, so it is removed.
            line = 'cd -P -- "$1" && shift && unset OLDPWD && exec "$@"'
            argv = [SHELL, "-c", line, "sh", self._cwd, program, *argv[1:]]
            program = SHELL
        streams = [Stream(-1, "stdout"), Stream(-1, "stderr")]
        process = Process(self._ctx, streams, deadline=self._deadline(began))
        try:
            status = process.run(encode(program), [encode(argument) for argument in argv], self._environment)
        except OSError as error:
            raise ShellError(error.errno or errno.EIO, f"posix_spawn '{self._shown}'") from None
        return Ended(status, process.timed_out, monotonic() - began, streams, process.left)

    def _deadline(self, began: float) -> float | None:
        """The time when the shell is stopped: at the end of its own time, or just before the host ends the whole
        jail.
        """
        milliseconds = self._timeout_ms if self._timeout_ms > 0 else None
        remaining = self._ctx.remaining_ms
        if remaining is not None and remaining > SHORT_DEADLINE_MS:
            limit = float(remaining - DEADLINE_MARGIN_MS)
            milliseconds = limit if milliseconds is None else min(milliseconds, limit)
        return None if milliseconds is None else began + milliseconds / 1000


def fitting_texts(ctx: ToolContext, first: dict[str, Any], ended: Ended) -> tuple[str, str]:
    """The texts of stdout and stderr, cut further when both do not fit the call's output together with `first`."""
    texts = [*(value for value in first.values() if isinstance(value, str)), *first.get("args", []), *ended.left]
    room = ctx.output_limit - FIELDS_BYTES - sum(len(encode(text)) + 8 for text in texts)
    half = max(0, room // 2)
    stderr = ended.stderr.text(max(half, room - min(ended.stdout.total * 3, room)))
    stdout = ended.stdout.text(max(half, room - len(stderr.encode())))
    return stdout, stderr
