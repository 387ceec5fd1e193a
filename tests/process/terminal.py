"""A person at a terminal: a program on a pty that is its controlling terminal, what it shows, what is typed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from types import TracebackType
from typing import Any, Self

from tests.kernel_fixture import PATIENCE_S, Sandbox

#: The line about what goes on, and escape sequences as terminals take them.
STATUS = re.compile(r"working(, [^,\n]+)*, \d+ s")
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """`gdn` on a terminal of 100 columns. `streams` says which of its streams are the terminal."""

    def __init__(
        self, kernel: Sandbox, *arguments: str, term: str = "xterm", env: dict[str, str] | None = None, **streams: Any
    ) -> None:
        self.leader, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        before = dict(kernel.env)
        kernel.env |= {"TERM": term, **(env or {})}
        streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal, **streams}
        self.process = kernel.popen(*arguments, terminal=True, **streams)
        kernel.env = before
        os.close(terminal)
        #: Everything that was shown.
        self.shown = b""
        #: How much of it, without escape sequences, was looked at.
        self._looked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.leader)

    def read_until(self, text: str, seconds: float = PATIENCE_S) -> str:
        """What is shown from where the last look ended through `text`, without escape sequences."""
        until = time.monotonic() + seconds
        while (at := self._plain().find(text, self._looked)) < 0:
            assert time.monotonic() < until, self.shown
            self._read()
        start, self._looked = self._looked, at + len(text)
        return self._plain()[start : self._looked]

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.leader, text.encode())

    def wait(self) -> int:
        """The exit status, when everything shown has been read."""
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < until, self.shown
            self._read()
        while self._read():
            pass
        return int(self.process.returncode)

    def rest(self) -> str:
        """What was shown since the last look, without lines of status."""
        return STATUS.sub("", self._plain()[self._looked :])

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        self.process.send_signal(number)

    def _plain(self) -> str:
        return CONTROL.sub(b"", self.shown).decode(errors="replace")

    def _read(self) -> bool:
        if not select.select([self.leader], [], [], 0.05)[0]:
            return False
        try:
            data = os.read(self.leader, 65536)
        except OSError:  # nobody has the other end open any more
            return False
        self.shown += data
        return bool(data)


def finished(process: subprocess.Popen[bytes], seconds: float = PATIENCE_S) -> tuple[int, str]:
    """The status and the output of a program whose output is a pipe."""
    out, _ = process.communicate(timeout=seconds)
    return process.returncode, out.decode()
