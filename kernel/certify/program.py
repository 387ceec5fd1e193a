"""The program that is certified: started in a session of its own, heard without waiting, ended with all of its group.

Source: docs/certify.md.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from goondan.schemas.errors import fail

#: What is read of its output at a time (bytes). A pipe holds less, so this takes several reads.
READ_BYTES: Final = 1 << 18
#: What is kept of its standard error (bytes): the end, which says why it ended.
KEPT: Final = 2000
#: A line of its output (bytes). A longer one is no line of the protocol.
MAX_LINE: Final = 4 << 20


class Program:
    """A started COMMAND. `out` and `err` are its pipes, for a poller."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, channel: int | None = None) -> None:
        """Start it. `channel`: a socket that becomes its descriptor 3; then it has no input, and one output.

        Raises GoondanError E_CERTIFY.
        """
        worker = channel is not None
        # A shell moves the descriptor: nothing of ours has to run between fork and exec.
        words = ["/bin/sh", "-c", 'exec "$@" 3<&0 0</dev/null', "sh", *argv] if worker else list(argv)
        try:
            self._process = subprocess.Popen(
                words,
                env=env,
                stdin=channel if worker else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if worker else subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise fail("E_CERTIFY", f"{argv[0]} cannot be started: {error.strerror}") from None
        self.pid = self._process.pid
        self.out = self._process.stdout
        self.err = self._process.stderr
        self.tail = b""
        self._waiting = bytearray()
        self._line = bytearray()
        for pipe in (self._process.stdin, self.out, self.err):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def polled(self) -> list[tuple[int, int]]:
        """What to poll: descriptors, and the events of each."""
        pipes = [
            (pipe.fileno(), select.POLLIN) for pipe in (self.out, self.err) if pipe is not None and not self.ended()
        ]
        pipe = self._process.stdin
        takes = self._waiting and pipe is not None and not pipe.closed and not self.ended()
        return [*pipes, (pipe.fileno(), select.POLLOUT)] if takes and pipe is not None else pipes

    def write(self, line: bytes) -> None:
        """Put a line into its standard input, as soon as it reads."""
        self._waiting += line
        self.flush()

    def flush(self) -> None:
        """Write what its input takes now."""
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        with suppress(BlockingIOError, BrokenPipeError):
            while self._waiting:
                del self._waiting[: os.write(pipe.fileno(), self._waiting[:READ_BYTES])]

    def lines(self) -> list[bytes]:
        """The lines that it has written since. Raises ValueError for one that is too long."""
        if self.err is not None:
            self.tail = (self.tail + self._read(self.err.fileno()))[-KEPT:]
        if self.out is None:
            return []
        self._line += self._read(self.out.fileno())
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        if len(rest) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE} bytes")
        return [bytes(line) for line in lines]

    def _read(self, fd: int) -> bytes:
        read = bytearray()
        with suppress(BlockingIOError):
            while len(read) < READ_BYTES and (data := os.read(fd, READ_BYTES)):
                read += data
        return bytes(read)

    def ended(self) -> bool:
        """Whether it has ended. It is not reaped, so its group cannot become another's."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end_input(self) -> None:
        """Close its standard input."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self) -> int:
        """Kill it and all that it has started, if anything of it runs. Its exit status."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self.out, self.err):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        return self._process.returncode

    def why(self) -> str:
        """The last line of its standard error, for a report."""
        lines = self.tail.decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""
