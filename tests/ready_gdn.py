"""Runs of `gdn`, forked from a process that has imported it (gdn_forks.py). Each worker has one such process."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PROGRAM = Path(__file__).with_name("gdn_forks.py")
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
        atexit.register(self.close)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether it would start as a process with this environment does."""
        return self._began is None or _of_a_start(environment) == self._began

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, data: bytes | None, seconds: float
    ) -> tuple[int, bytes, bytes]:
        """Run `gdn` to its end: its exit status, and what it wrote. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + seconds
        pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "answer")}
        if data is None:
            os.close(pipes["stdin"][1])
        ours = {name: ends[name == "stdin"] for name, ends in pipes.items() if name != "stdin" or data is not None}
        theirs = [ends[name != "stdin"] for name, ends in pipes.items()]
        try:
            self._ask(arguments, environment, folder, theirs)
            for fd in theirs:
                os.close(fd)
            theirs.clear()
            heard = _exchange(ours, data or b"", until)
        finally:
            for fd in (*theirs, *ours.values()):
                os.close(fd)
        pid, _, status = heard["answer"].decode().partition("\n")
        if not status:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            raise subprocess.TimeoutExpired(["gdn", *arguments], seconds, heard["stdout"], heard["stderr"])
        return int(status), heard["stdout"], heard["stderr"]

    def _ask(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, streams: list[int]) -> None:
        request = {"arguments": arguments, "environment": dict(environment), "folder": str(folder), "umask": _umask()}
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
        command = [sys.executable, "-I", str(_PROGRAM), str(theirs.fileno())]
        environment = {"PATH": os.environ["PATH"], **began}
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


def _umask() -> int:
    """Of this process; os.umask would change it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)


def _of_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_OF_A_START)}


def _exchange(ours: dict[str, int], data: bytes, until: float) -> dict[str, bytes]:
    """Write `data`, and read everything; less when the time is over. Closes what is through, and takes it out."""
    heard = {name: b"" for name in ours if name != "stdin"}
    with selectors.DefaultSelector() as waiting:
        for name, fd in ours.items():
            os.set_blocking(fd, False)
            waiting.register(fd, selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ, name)
        while ours and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                name, fd = key.data, key.fd
                if name == "stdin":
                    with suppress(BrokenPipeError):
                        data = data[os.write(fd, data[:65536]) :]
                        if data:
                            continue
                elif chunk := os.read(fd, 65536):
                    heard[name] += chunk
                    continue
                waiting.unregister(fd)
                os.close(ours.pop(name))
    return heard
