"""A JavaScript worker without a jail: the runtime, worker.mjs, and the other end of its socket."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.javascript_runtimes import ROOT, runtime

WORKER: Final = ROOT / "toolhost" / "inside" / "javascript" / "worker.mjs"
#: How long a frame or an end may take (seconds): a loaded machine starts a runtime in two.
PATIENCE_S: Final = 30.0


class Worker:
    """One worker. `load` starts its tool; `call` makes a call and gives its result."""

    def __init__(self, name: str, cwd: Path) -> None:
        program = runtime(name)  # first, because it may skip the test
        self.socket, theirs = socket.socketpair()
        self.logs: list[dict[str, Any]] = []
        self.status: int | None = None
        self._buffer = b""
        self._calls = 0
        read, write = os.pipe()
        self.output = read
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write, 1),
            (os.POSIX_SPAWN_DUP2, write, 2),
        ]
        environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        self.pid = os.posix_spawn(program, [program, str(WORKER)], environment, file_actions=actions)
        theirs.close()
        os.close(write)

    def load(self, entry: Path, **more: Any) -> dict[str, Any]:
        """Send `init`, and wait for `ready` or `load_failed`."""
        self.init(entry, **more)
        return self.next("ready", "load_failed")

    def init(self, entry: Path, **more: Any) -> None:
        """Send `init`."""
        self.send({"type": "init", "protocol": 1, "tool": "t", "entry": str(entry), "env": {}, **more})

    def begin(self, export: str, input: dict[str, Any] | None = None, **more: Any) -> str:
        """Send a call, and give its id."""
        self._calls += 1
        call_id = str(self._calls)
        call = {"type": "call", "callId": call_id, "export": export, "input": input or {}, "agentName": "coder"}
        self.send({**call, "instanceKey": "u1", "turnId": "t-1", "toolCallId": "c-1", "workdir": "/tmp", **more})
        return call_id

    def call(self, export: str, input: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Make a call, and give its result."""
        return self.result(self.begin(export, input, **more))

    def result(self, call_id: str) -> dict[str, Any]:
        """The next result, which has to be of this call."""
        found = self.next("result")
        assert found.pop("callId") == call_id
        del found["type"]
        return found

    def value(self, export: str, input: dict[str, Any] | None = None, **more: Any) -> Any:
        """The output of a call that works."""
        result = self.call(export, input, **more)
        assert result["status"] == "ok", result
        return result.get("output")

    def error(self, export: str, input: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """The error of a call that does not."""
        result = self.call(export, input, **more)
        assert result["status"] == "error", result
        return dict(result["error"])

    def send(self, *frames: dict[str, Any]) -> None:
        """Send frames at once."""
        self.write(b"".join(map(packed, frames)))

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.settimeout(PATIENCE_S)
        self.socket.sendall(data)

    def next(self, *kinds: str) -> dict[str, Any]:
        """The next frame of these types; log lines before it are kept. Raises EOFError when the worker is gone."""
        while True:
            frame = self.frame()
            if frame["type"] in kinds:
                return frame
            assert frame["type"] == "log", frame
            self.logs.append(frame)

    def frame(self) -> dict[str, Any]:
        """The next frame."""
        size = 4 + int.from_bytes(self._take(4), "little")
        body = self._take(size)[4:]
        self._buffer = self._buffer[size:]
        return dict(msgspec.msgpack.decode(body))

    def _take(self, size: int) -> bytes:
        self.socket.settimeout(PATIENCE_S)
        while len(self._buffer) < size:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError(self.said())
            self._buffer += data
        return self._buffer[:size]

    def logged(self) -> list[tuple[str, str]]:
        """Levels and lines so far, without the debug lines of failures."""
        return [(log["level"], log["message"]) for log in self.logs if log["level"] != "debug"]

    def said(self) -> str:
        """What is in the pipe of its standard output and error."""
        parts = []
        while select.select([self.output], [], [], 0)[0] and (data := os.read(self.output, 65536)):
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")

    def ended(self) -> int:
        """Wait for its end: the exit status."""
        ends = time.monotonic() + PATIENCE_S
        fd = os.pidfd_open(self.pid) if self.status is None else -1
        if fd >= 0:
            ready = select.select([fd], [], [], max(0.0, ends - time.monotonic()))[0]
            os.close(fd)
            assert ready, "the worker does not end"
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert self.status is not None
        return self.status

    def close(self) -> None:
        """Close the channel: the worker ends."""
        self.socket.close()
        if self.status is None:
            self.ended()
        os.close(self.output)


def packed(frame: dict[str, Any]) -> bytes:
    """A frame with its length."""
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(4, "little") + body
