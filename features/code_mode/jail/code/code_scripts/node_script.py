"""Scripts in JavaScript: Node runs them beside this process, and asks for calls over a socket pair.

Each line of the socket is one JSON value. From Node: {id, op, value}, a question; {error}, the script failed; {done}.
To Node: {id, value} or {id, error}.

Source: docs/code-mode.md.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from contextlib import suppress

from goondan_tool import ToolContext, ToolError

from code_scripts.calls import Calls, Printed
from code_scripts.python_script import failed

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

RUNNER = f"{__file__.rpartition('/')[0]}/runner.mjs"
#: One question of a script (bytes). The host refuses more than 256 KiB anyway.
MAX_LINE = 1 << 20
#: How long Node may take to end after its script (seconds). What still runs then is killed.
LEAVE_S = 1.0
#: How often a waiting call looks whether it was cancelled (seconds).
LOOK_S = 0.1
READ_BYTES = 1 << 16


def run(source: str, calls: Calls, printed: Printed, ctx: ToolContext) -> None:
    """Run a script. Raises ToolError E_SCRIPT_LANGUAGE when there is no Node, E_SCRIPT_FAILED when it fails."""
    node = shutil.which("node")
    if node is None:
        suggestion = "Write the script in Python."
        raise ToolError("there is no Node in this jail", code="E_SCRIPT_LANGUAGE", suggestion=suggestion)
    ours, theirs = socket.socketpair()
    with (
        ours,
        subprocess.Popen(
            [node, "--no-warnings", "--stack-trace-limit=12", RUNNER, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            cwd=ctx.workdir,
        ) as process,
    ):
        theirs.close()
        reading = threading.Thread(target=_copy, args=(process.stdout, printed), daemon=True)
        reading.start()
        script = _Script(ours, calls)
        script.tell({"code": source})
        try:
            problem = script.serve(ctx)
            try:
                status = process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                status = 0
        finally:
            process.kill()
        reading.join(LEAVE_S)
    if problem is None and not script.done:
        problem = f"Node ended with status {status} before the script was done"
    if problem is not None:
        raise failed(problem, printed)


class _Script:
    """The conversation with Node."""

    def __init__(self, channel: socket.socket, calls: Calls) -> None:
        self._channel = channel
        self._calls = calls
        self._lock = threading.Lock()
        #: Whether the script ran to its end.
        self.done = False

    def tell(self, message: dict[str, Any]) -> None:
        """Send one line. Nothing happens when Node is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock, suppress(OSError):  # Node is gone, and `serve` notices
            self._channel.sendall(data)

    def serve(self, ctx: ToolContext) -> str | None:
        """Make the calls that the script asks for, until it has ended. Returns why it failed, None when it did not."""
        self._channel.settimeout(None)
        rest = b""
        while data := self._read(ctx):
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            if len(rest) > MAX_LINE:
                return "the script asked for more than a line can hold"
            questions = []
            for line in lines:
                message = json.loads(line)
                if "error" in message:
                    return str(message["error"])
                if "done" in message:
                    self.done = True
                    return None
                questions.append((message["op"], message["value"], self._answering(message["id"])))
            if questions:
                self._calls.start(questions)
        return None

    def _read(self, ctx: ToolContext) -> bytes:
        while True:
            self._channel.settimeout(None if ctx.cancelled else LOOK_S)
            try:
                return self._channel.recv(READ_BYTES)
            except TimeoutError:
                if ctx.cancelled:
                    raise ToolError("the script was cancelled", code="E_CANCELLED") from None
            except OSError:
                return b""

    def _answering(self, number: int) -> Any:
        def take(frame: dict[str, Any]) -> None:
            error = frame.get("error")
            self.tell({"id": number, "value": frame.get("value")} if error is None else {"id": number, "error": error})

        return take


def _copy(pipe: Any, printed: Printed) -> None:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(pipe.fileno(), READ_BYTES):
        printed.write(decoder.decode(data))
