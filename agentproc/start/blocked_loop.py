"""Finds out which code has blocked an agent's event loop, so that the next process of the instance can report it.

While the loop is blocked, nothing in the process can run: no timer, no answer to the broker. The broker ends such a
process after LEASE_S (kernel/broker/state/mailbox.py). Before that, a thread of the interpreter that needs no Python
writes the stack of the loop's thread into a file. When the loop goes on, the file is emptied at once. So if the next
process of the instance finds a stack there, that code ended the last process.

Only agents with extensions do this: nothing else of an agent may block.

Source: docs/design/processes.md section 5.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire import errors, frames

#: A stack is written when the loop was blocked for so long (seconds). A running loop renews its lease every 10 s
#: (RENEW_S), and a process that is silent for 30 s is ended (LEASE_S); this value lies between the two.
BLOCKED_S: Final = 20.0
#: The name of the file in the instance's folder.
BLOCKED_FILE: Final = "blocked"
#: How much of the file is read (bytes). A hundred frames of a hundred threads need less.
_MAX_READ: Final = 1 << 20

_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x0*([0-9a-f]+)\b")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')

log = logging.getLogger("agentproc")


class StackFrame(NamedTuple):
    """One frame of a stack."""

    #: The path as the interpreter writes it, with escapes for characters that are not ASCII.
    file: str
    #: The number of the line, as text.
    line: str
    #: The name of the function.
    function: str


class Blocked(NamedTuple):
    """A loop that was blocked while it worked on an event. `stack` begins with the innermost frame."""

    event_id: str
    stack: list[StackFrame]


def read_story(text: str) -> Blocked | None:
    """Read the text of the file. None when the loop was not blocked, or when the text has another form."""
    header, _, story = text.partition("\n")
    thread, _, event_id = header.partition(" ")
    stack: list[StackFrame] | None = None
    for line in story.splitlines():
        if (found := _THREAD.match(line)) is not None:
            if stack is not None:
                break
            stack = [] if found[1] == thread else None
        elif stack is not None and (frame := _FRAME.fullmatch(line)) is not None:
            stack.append(StackFrame(*frame.groups()))
    return Blocked(event_id, stack) if stack else None


def blocked_error(blocked: Blocked, extensions: Iterable[ExtensionSpec]) -> frames.ErrorPayload:
    """The error of the turn. It names the extension whose code is innermost on the stack, if there is one."""
    owners: dict[str, str] = {}
    for extension in extensions:
        owners[_as_written(extension.entry)] = extension.name
    for extension in extensions:
        folder = os.path.dirname(extension.entry)
        for module in extension.modules or ():
            owners.setdefault(_as_written(f"{folder}/{module}"), extension.name)
    for place in blocked.stack:
        name = owners.get(place.file)
        if name is not None:
            where = f"{os.path.basename(place.file)}, line {place.line}, in {place.function}"
            message = f"extension {name} blocked its agent, which was ended: {where}"
            hint = f"Let extension {name} await what takes long, or run it with asyncio.to_thread."
            return errors.error_payload("E_MIDDLEWARE", message, suggestion=hint)
    innermost = blocked.stack[0]
    message = f"something blocked the agent, which was ended: {innermost.function} in {innermost.file}"
    return errors.error_payload("E_AGENT_FAILED", message)


class LoopWatch:
    """Watches the loop of this process while it works on an event. To be used in the loop's thread.

    `directory` is the folder of the instance. When the file cannot be written there, the agent works without the watch.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, BLOCKED_FILE)
        self._file = -1
        self._header = b""

    def take(self) -> Blocked | None:
        """The reason why the last process of the instance ended, if it is known. The file is emptied."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                text = os.read(descriptor, _MAX_READ).decode("utf-8", "replace")
                os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)
            return read_story(text)
        return None

    def begin(self, event_id: str) -> None:
        """From now on the loop works on this event."""
        self._header = f"{threading.get_ident():x} {event_id}\n".encode("utf-8", "replace")
        self.go_on()

    def go_on(self) -> None:
        """The loop runs, so nothing blocks it now."""
        if not self._header:
            return
        try:
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                self._file = os.open(self._path, flags, 0o600)
            if os.fstat(self._file).st_size > len(self._header):
                log.warning("the event loop was blocked for more than %g s, and goes on", BLOCKED_S)
            os.ftruncate(self._file, 0)
            os.write(self._file, self._header)
        except OSError as error:
            log.warning("%s: %s", self._path, error.strerror)
            return
        # It reads frames that may be running. Seldom that ends the process, which its lease ends soon in any case.
        faulthandler.dump_traceback_later(BLOCKED_S, file=self._file)

    def end(self) -> None:
        """The loop works on no event any more."""
        if self._header:
            self._header = b""
            faulthandler.cancel_dump_traceback_later()
            with suppress(OSError):
                os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Stop watching: the process ends."""
        self.end()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _as_written(path: str) -> str:
    """A path as the interpreter writes it."""
    return path.encode("ascii", "backslashreplace").decode("ascii")
