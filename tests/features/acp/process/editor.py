"""An editor for tests: it speaks JSON-RPC with a `gdn acp`, line by line, and shows what it was told."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

from tests.kernel_fixture import PATIENCE_S, Sandbox

#: Chooses an option of a permission request. None: it is not answered.
Choice = Callable[[dict[str, Any]], str | None]


def first(asked: dict[str, Any]) -> str:
    """Agrees to everything."""
    return str(asked["options"][0]["optionId"])


class Editor:
    """The client of one `gdn acp`."""

    def __init__(self, process: subprocess.Popen[bytes], choose: Choice = first) -> None:
        self.process = process
        self.choose = choose
        #: The updates and the permission requests, as they came.
        self.updates: list[dict[str, Any]] = []
        self.permissions: list[dict[str, Any]] = []
        self._count = 1000
        self._lines: Queue[bytes] = Queue()
        self._answers: dict[Any, dict[str, Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def send(self, line: bytes) -> None:
        """Write one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def say(self, **message: Any) -> None:
        """Write a message."""
        self.send(json.dumps({"jsonrpc": "2.0", **message}).encode())

    def begin(self, method: str, **params: Any) -> int:
        """Send a request; its id."""
        self._count += 1
        self.say(id=self._count, method=method, params=params)
        return self._count

    def next(self, timeout: float = PATIENCE_S) -> dict[str, Any] | None:
        """The next message, which is JSON-RPC; None at the end. What needs an answer is answered."""
        line = self._lines.get(timeout=timeout)
        if not line:
            return None
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0", message
        if message.get("method") == "session/update":
            self.updates.append(message["params"]["update"])
        elif message.get("method") == "session/request_permission":
            self.permissions.append(message["params"])
            chosen = self.choose(message["params"])
            if chosen is not None:
                self.say(id=message["id"], result={"outcome": {"outcome": "selected", "optionId": chosen}})
        else:
            self._answers[message.get("id")] = message
        return message

    def until(self, done: Callable[[], bool]) -> None:
        """Read until something has come."""
        while not done():
            assert self.next() is not None, "it has ended"

    def end_of(self, request: Any) -> dict[str, Any]:
        """The whole answer to a request."""
        self.until(lambda: request in self._answers)
        return self._answers.pop(request)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a request."""
        answer = self.end_of(self.begin(method, **params))
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def refusal(self, method: str, **params: Any) -> dict[str, Any]:
        """The error of a request."""
        error: dict[str, Any] = self.end_of(self.begin(method, **params))["error"]
        assert "Traceback" not in error["message"]
        return error

    def new(self, cwd: str, **more: Any) -> str:
        """A new session."""
        return str(self.call("session/new", cwd=cwd, mcpServers=[], **more)["sessionId"])

    def begin_prompt(self, session: str, text: str) -> int:
        """Send a prompt."""
        return self.begin("session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])

    def prompt(self, session: str, *blocks: str | dict[str, Any]) -> dict[str, Any]:
        """The result of a prompt. What was told of it stands in `updates`, and nothing else."""
        self.updates.clear()
        said = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
        return self.call("session/prompt", sessionId=session, prompt=said)

    @property
    def said(self) -> str:
        """What the agent said."""
        return self.text_of("agent_message_chunk")

    def text_of(self, kind: str) -> str:
        """The texts of one kind of update."""
        return "".join(one["content"]["text"] for one in self.updates if one["sessionUpdate"] == kind)

    def is_silent(self) -> bool:
        """Whether nothing comes for a moment."""
        try:
            self._lines.put(self._lines.get(timeout=0.3))
        except Empty:
            return True
        return False


@contextmanager
def editor(kernel: Sandbox, *words: str, choose: Choice = first) -> Iterator[Editor]:
    """An editor with a `gdn acp` of its own, which ends in order."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = kernel.popen("acp", *words, **pipes)
    made = Editor(process, choose)
    yield made
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
    said = process.stderr.read().decode()
    assert "Traceback" not in said, said
