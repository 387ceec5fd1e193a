"""Runs of `gdn`, forked from a process that has imported it (gdn_forks.py). Each worker has one such process."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("gdn_forks.py")
#: What a forked kernel shows as its command line, and as its environment, may be as long (bytes).
_ROOM = 4096
#: Variables that an interpreter obeys while it starts: who changes one needs an interpreter.
_OF_A_START = ("LANG", "LC_", "PYTHON")


class ReadyGdn:
    """The process, started with the first run."""

    def __init__(self) -> None:
        self._asking: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: What it says itself: why it has ended, if it has. A test's own stderr is gone by then.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the tests run
        #: What it has started with.
        self._began: dict[str, str] | None = None
        self._one_at_a_time = threading.Lock()
        atexit.register(self._said.close)
        atexit.register(self.close)  # first

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether it would start as a process with this environment does."""
        return self._began is None or _of_a_start(environment) == self._began

    def ask(self, wanted: Mapping[str, Any], streams: list[int]) -> None:
        """Have `gdn` run with these streams and this pipe for the answer."""
        environment = wanted["environment"]
        request = {**wanted, "umask": _umask()}
        body = json.dumps(request).encode()
        with self._one_at_a_time:
            if self._process is not None and (status := self._process.poll()) is not None:
                # One test is told; without another process every later one would fail as well.
                self._asking = self._process = None
                self._said.seek(0)
                said = self._said.read().decode(errors="replace")
                warnings.warn(f"the process that gdn is forked from has ended: {status}\n{said}", stacklevel=2)
            asking = self._asking or self._start(_of_a_start(environment))
            socket.send_fds(asking, [len(body).to_bytes(4, "little")], streams)
            asking.sendall(body)

    def _start(self, began: dict[str, str]) -> socket.socket:
        self._began = began
        self._asking, theirs = socket.socketpair()
        room = " " * _ROOM  # for what processes show in /proc
        command = [sys.executable, "-I", str(_PROGRAM), str(theirs.fileno()), room]
        environment = {"PATH": os.environ["PATH"], **began, "ROOM": room}
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], cwd="/", stdin=null, stdout=null, stderr=self._said
        )
        theirs.close()
        return self._asking

    def close(self) -> None:
        """End it. The next run starts another one."""
        if self._asking is not None and self._process is not None:
            self._asking.close()
            self._process.wait()
        self._asking = self._process = None


class ForkedGdn(subprocess.Popen[bytes]):
    """A `gdn` that was forked there, as if it were a child of this process.

    `terminal`: its stderr is its controlling terminal. `streams`: stdin, stdout and stderr as of a Popen.
    """

    def __init__(
        self,
        ready: ReadyGdn,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        terminal: bool = False,
        **streams: Any,
    ) -> None:
        self._ready = ready
        self._wanted = {
            "arguments": arguments,
            "environment": dict(environment),
            "folder": str(folder),
            "terminal": terminal,
        }
        super().__init__(["gdn", *arguments], **streams)

    def _execute_child(self, *arguments: Any) -> None:
        """Instead of an exec: what is of interest here are the descriptors, ours and those of the child, in pairs."""
        ends = arguments[10:16]
        answer, theirs = os.pipe()
        self._answer = os.fdopen(answer, "rb", buffering=0)
        try:
            self._ready.ask(self._wanted, [ends[0], ends[3], ends[5], theirs])
        finally:
            os.close(theirs)
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
        self.pid = int(self._answer.readline())
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As os.waitpid: its number and its status, or zeros."""
        if flags & os.WNOHANG and not select.select([self._answer], [], [], 0)[0]:
            return 0, 0
        with self._answer:
            return self.pid, int(self._answer.readline())


def _umask() -> int:
    """Of this process; os.umask would change it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)


def _of_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_OF_A_START)}
