"""What a person types while a turn runs: whole lines, without an echo that would mix into the answer.

The terminal keeps its line editing and its Ctrl-C; only the echo is off. What is not a whole line yet stays in the
terminal, and the next prompt gets it.

Source: docs/design/commands.md section 5.
"""

from __future__ import annotations

import asyncio
import os
import re
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from goondan.kernel.cli.console.lines import CHUNK, Line, LineReader, LineSplitter

#: Keys that are no characters (arrows and the like), as a terminal sends them, and other control characters.
_KEYS: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?|[\x00-\x08\x0b-\x1f\x7f]")
#: The place of the local modes in what tcgetattr gives.
_LOCAL: Final = 3

#: Gets each line.
Take = Callable[[Line], None]


class Ahead(Protocol):
    """Takes the lines that are typed while it is started."""

    def start(self) -> None:
        """Begin, or go on."""

    def stop(self) -> None:
        """Leave the terminal as it was."""


class _Quiet:
    """The terminal `fd` without echo."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[object] | None = None

    def begin(self) -> None:
        """Switch the echo off."""
        with suppress(termios.error, OSError):
            self._before = termios.tcgetattr(self._fd)
            quiet = termios.tcgetattr(self._fd)
            quiet[_LOCAL] &= ~(termios.ECHO | termios.ECHONL)
            termios.tcsetattr(self._fd, termios.TCSANOW, quiet)

    def end(self) -> None:
        """Switch it on again, if it was on."""
        before, self._before = self._before, None
        if before is not None:
            with suppress(termios.error, OSError):
                termios.tcsetattr(self._fd, termios.TCSANOW, before)  # type: ignore[arg-type]


class FromTerminal:
    """Reads the terminal `fd` itself, for a prompt that reads it only while it is shown. A line has at most `limit`
    bytes.
    """

    def __init__(self, fd: int, limit: int, take: Take) -> None:
        self._fd = fd
        self._take = take
        self._splitter = LineSplitter(limit)
        self._quiet = _Quiet(fd)
        #: The person has ended the input.
        self.ended = False

    def start(self) -> None:
        """See Ahead."""
        self._quiet.begin()
        if not self.ended:
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def stop(self) -> None:
        """See Ahead."""
        asyncio.get_running_loop().remove_reader(self._fd)
        self._quiet.end()

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            self.ended = True
            asyncio.get_running_loop().remove_reader(self._fd)
        # What was typed while the prompt was still there has the line ends of its keys.
        for line in self._splitter.feed(chunk.replace(b"\r", b"\n")):
            self._take(_without_keys(line))

    def begun(self) -> str:
        """The beginning of a line that was read and not sent. It is for the next prompt."""
        left = [_without_keys(line).data or b"" for line in self._splitter.finish()]
        return b"".join(left).decode("utf-8", "replace")


class FromReader:
    """Takes lines from a reader that always reads the terminal `fd`."""

    def __init__(self, fd: int, reader: LineReader, take: Take) -> None:
        self._reader = reader
        self._take = take
        self._quiet = _Quiet(fd)
        self._pump: asyncio.Future[None] | None = None

    def start(self) -> None:
        """See Ahead."""
        self._quiet.begin()
        self._pump = asyncio.ensure_future(self._pass_on())

    def stop(self) -> None:
        """See Ahead."""
        if self._pump is not None:
            self._pump.cancel()
        self._quiet.end()

    async def _pass_on(self) -> None:
        async for line in self._reader:
            self._take(_without_keys(line))


class Taking:
    """A context in which `ahead` takes lines, but for the times in which it is `paused`."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._active = False

    def __enter__(self) -> None:
        self._active = True
        self._ahead.start()

    def __exit__(self, *error: object) -> None:
        self._active = False
        self._ahead.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no lines inside this context: a person is asked something else. The question may outlive the turn."""
        if self._active:
            self._ahead.stop()
        try:
            yield
        finally:
            if self._active:
                self._ahead.start()


def _without_keys(line: Line) -> Line:
    """A line without the keys that moved a cursor which was not there."""
    if line.data is None:
        return line
    data = _KEYS.sub("", line.data.decode("utf-8", "replace")).encode()
    return Line(line.number, data, len(data))
