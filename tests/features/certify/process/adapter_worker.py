"""A small worker whose tool is built in: right as it stands, wrong in one way for each FAULT.

`python -I adapter_worker.py [FAULT]`: see FAULTS. It is written from WORKER.md, and has nothing of the kernel. Of the
sample tool it has what the test of the certificate plays.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from typing import Any

import msgspec

#: What is broken on purpose.
FAULTS = {
    "two-results": "each call has two results",
    "drops-early": "calls that come before the module is loaded are lost",
    "serial": "a slow handler holds up the others",
    "forgets": "only the newest message is kept",
    "deaf": "a handler is not told that it was cancelled",
    "no-limit": "an output may have any size",
    "not-json": "a NaN is sent as it is",
    "wrong-code": "an export that is none is an error without a code",
    "asks-freely": "questions are asked without the permission",
    "any-answer": "the first answer is taken, whatever its number",
    "floods": "log lines have no bound",
    "strict": "a frame that it does not know is its end",
    "loads-anything": "what cannot be loaded is loaded",
    "one-result": "what goes on is never told",
    "stays": "it does not end with its socket",
    "inherited": "descriptor 3 is inherited by programs",
    "rubbish": "it sends what is no frame",
}
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class Failure(Exception):
    """An error result."""

    def __init__(self, message: str, code: str | None, **more: str) -> None:
        super().__init__(message)
        self.fields = {"name": "Failure", "message": message} | ({"code": code} if code else {}) | more


class Worker:
    """Each call is a thread."""

    def __init__(self) -> None:
        os.set_inheritable(3, FAULT == "inherited")
        self.socket = socket.socket(fileno=3)
        self.lock = threading.Lock()
        self.limit, self.asked = 1 << 20, 0
        self.permissions: list[str] = []
        self.messages: dict[str, Any] = {}
        self.cancelled: set[str] = set()
        self.answers: dict[int, Any] = {}
        self.logged = 0

    def send(self, frame: dict[str, Any]) -> None:
        body = pack(frame)
        with self.lock:
            self.socket.sendall(len(body).to_bytes(4, "little") + body)

    def frames(self) -> Any:
        buffer = b""
        while data := self.socket.recv(1 << 20):
            buffer += data
            while len(buffer) >= 4 and len(buffer) >= (size := 4 + int.from_bytes(buffer[:4], "little")):
                body, buffer = buffer[4:size], buffer[size:]
                yield unpack(body)

    def run(self) -> None:
        early = False
        for frame in self.frames():
            kind = frame["type"]
            if kind == "init":
                self.limit, self.permissions = frame.get("outputLimit", self.limit), frame.get("permissions", [])
                good = frame["protocol"] == 1 and os.path.isfile(frame["entry"])
                if not good and FAULT != "loads-anything":
                    self.send({"type": "load_failed", "message": "it cannot be loaded"})
                    return
                early = FAULT == "drops-early"
                self.send({"type": "ready", "protocol": 1, "exports": list(EXPORTS)})
            elif kind == "call" and not early:
                call = threading.Thread(target=self.call, args=(frame,), daemon=True)
                call.start()
                if FAULT == "serial":
                    call.join()
            elif kind == "message":
                self.messages = self.messages if FAULT != "forgets" else {}
                self.messages[frame["messageId"]] = frame["message"]
                while len(self.messages) > 8:
                    del self.messages[next(iter(self.messages))]
            elif kind == "cancel" and FAULT != "deaf":
                self.cancelled.add(frame["callId"])
            elif kind == "answer":
                self.answers[frame["askId"]] = frame
            elif kind == "exit":
                return
            elif FAULT == "strict" and kind not in ("cancel", "call"):
                sys.exit(f"what is {kind}?")

    def call(self, frame: dict[str, Any]) -> None:
        call = frame["callId"]
        try:
            if frame["export"] not in EXPORTS:
                raise Failure("there is no such handler", None if FAULT == "wrong-code" else "E_TOOL_NOT_FOUND")
            output = EXPORTS[frame["export"]](self, frame, frame["input"])
            if isinstance(output, float) and not math.isfinite(output) and FAULT != "not-json":
                raise Failure("it is not JSON", "E_TOOL_BAD_OUTPUT")
            if len(pack(output)) > self.limit and FAULT != "no-limit":
                raise Failure("it is too large", "E_TOOL_LIMIT")
            result = {"status": "ok", "output": output}
        except Failure as error:
            result = {"status": "error", "error": error.fields}
        if FAULT == "rubbish":
            self.send({"type": "result", "callId": 7})
        if not (frame["export"] == "pending" and FAULT == "one-result"):
            self.send({"type": "result", "callId": call, **result})
        if FAULT == "two-results":
            self.send({"type": "result", "callId": call, **result})

    # --- the tool

    def repeat(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        return args["text"] * args["times"]

    def wait(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        time.sleep(args["ms"] / 1000)
        return "waited"

    def bad(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        return float("nan")

    def log(self, frame: dict[str, Any], args: dict[str, Any]) -> None:
        for _ in range(args["times"] if FAULT == "floods" else min(args["times"], 1000)):
            self.send({"type": "log", "level": "info", "message": args["text"], "callId": frame["callId"]})

    def message(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        found = self.messages.get(frame.get("messageId", ""))
        return None if found is None else {"id": found["id"], "data": found["data"]}

    def ask(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        if "agents" not in self.permissions and FAULT != "asks-freely":
            raise Failure("it may not ask", None)
        self.asked += 1
        number = self.asked
        asked = {"askId": number, "op": "request", "target": args["target"], "input": "hi"}
        self.send({"type": "ask", "callId": frame["callId"], **asked})
        while number not in self.answers:
            time.sleep(0.01)
        number = next(iter(self.answers)) if FAULT == "any-answer" else number
        return self.answers[number]["value"]["response"]

    def stopped(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        while frame["callId"] not in self.cancelled:
            time.sleep(0.01)
        return "stopped"

    def pending(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        told = {"type": "result", "callId": frame["callId"], "status": "pending"}
        self.send({**told, "handle": "a-handle", "continues": True})
        time.sleep(args["ms"] / 1000)
        return "done"

    def echo(self, frame: dict[str, Any], args: dict[str, Any]) -> Any:
        return args.get("value")


EXPORTS = {
    one.__name__: one
    for one in (
        Worker.echo,
        Worker.repeat,
        Worker.wait,
        Worker.bad,
        Worker.log,
        Worker.message,
        Worker.ask,
        Worker.stopped,
        Worker.pending,
    )
}

if __name__ == "__main__":
    Worker().run()
    if FAULT == "stays":
        time.sleep(300)
    sys.stdout.flush()
    os._exit(0)
