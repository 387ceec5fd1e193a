"""The client that PROTOCOL.md shows works as it stands there, without any code of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.kernel_fixture import ROOT, Sandbox

ASK_FOR_HELLO = {"type": "error", "payload": {"code": "E_HELLO_REQUIRED", "message": "say hello"}}
WELCOME = {"type": "welcome", "payload": {"version": 1, "credit": 4}}


@pytest.fixture
def program(short_tmp: Path) -> Path:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "schemas" / "PROTOCOL.md").read_text(), re.DOTALL | re.MULTILINE
    )
    path = short_tmp / "client.py"
    path.write_text(code)
    return path


def test_the_smallest_client(kernel: Sandbox, program: Path) -> None:
    started = kernel.gdn("run", "--detach", "--json")
    run_dir = started.json["runDir"]

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    answered = ask(run_dir, "main", '/bash__exec {"command": "echo $((6*7))"}')
    assert (answered.returncode, answered.stderr) == (0, "")
    assert "42" in answered.stdout
    refused = ask(run_dir, "nobody", "hi")
    assert refused.returncode == 1
    assert refused.stderr.startswith("E_AGENT_NOT_FOUND")
    assert kernel.gdn("stop").status == 0


class Played:
    """A broker that is played, and the client beside it with a deadline of three seconds."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._router: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 500)
        self._router.setsockopt(zmq.RCVTIMEO, 10_000)
        self._router.bind(f"ipc://{folder}/clients.sock")
        code = program.read_text()
        assert code.count("time.monotonic() + 60") == 1
        program.write_text(code.replace("time.monotonic() + 60", "time.monotonic() + 3"))
        command = [sys.executable, "-I", str(program), str(folder), "main", "hi"]
        self.client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        parts: list[bytes] = self._router.recv_multipart()
        self._ident = parts[0]
        assert parts[1:] == [b""]

    def send(self, frame: dict[str, Any]) -> None:
        self._router.send_multipart([self._ident, msgspec.msgpack.encode(frame)])

    def next(self, kind: str) -> dict[str, Any]:
        frame: dict[str, Any] = msgspec.msgpack.decode(self._router.recv_multipart()[1])
        assert frame["type"] == kind
        return frame

    def overload(self, event: dict[str, Any], **more: Any) -> None:
        payload = {"code": "E_OVERLOADED", "message": "later", **more}
        self.send({"type": "error", "inReplyTo": event["id"], "payload": payload})

    def gone(self) -> None:
        self._router.close()

    def timed_out(self) -> bool:
        return self.client.communicate(timeout=30)[1].startswith("E_AGENT_TIMEOUT")


@pytest.fixture
def played(short_tmp: Path, program: Path) -> Iterator[Played]:
    made = Played(short_tmp, program)
    yield made
    made.client.kill()
    made.client.communicate()
    made.gone()


def test_hello_is_said_again_and_overload_is_waited_for(short_tmp: Path, played: Played) -> None:
    played.send(ASK_FOR_HELLO)
    played.send({"type": "ping", "id": "b.1"})
    played.next("pong")  # the token cannot be read yet
    (short_tmp / "client.token").write_text("token")
    hello = played.next("hello")
    assert hello["payload"]["token"] == "token"
    assert played.next("hello")["id"] == hello["id"]
    played.send(WELCOME)
    played.send(WELCOME)
    event = played.next("event")
    played.overload(event)
    again = played.next("event")
    assert again | {"deadlineMs": 0} == event | {"deadlineMs": 0}
    assert again["deadlineMs"] <= event["deadlineMs"] - 1000
    played.overload(event, retryAfterMs=600_000)
    assert played.timed_out()


def test_a_broker_that_is_gone_does_not_hold_up_the_deadline(short_tmp: Path, played: Played) -> None:
    """It is gone between its request for hello and the hello, which waits for the token here."""
    os.mkfifo(short_tmp / "client.token")
    played.send(ASK_FOR_HELLO)
    with (short_tmp / "client.token").open("w") as token:
        played.gone()
        token.write("token")
    (short_tmp / "client.token").unlink()
    assert played.timed_out()
