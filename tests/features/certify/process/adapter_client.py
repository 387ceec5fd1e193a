"""A small client that speaks the certificate's line protocol: right as it stands, wrong in one way for each FAULT.

`python -I adapter_client.py [FAULT]`: see FAULTS. It is written from PROTOCOL.md, and has nothing of the kernel.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import secrets
import select
import stat
import sys
import time
from typing import Any

import msgspec
import zmq

#: What is broken on purpose.
FAULTS = {
    "says-hello-once": "a new connection is not greeted",
    "no-ack": "answers are not acknowledged",
    "one-ack": "an answer that comes again is not acknowledged again",
    "new-ids": "what goes out again has new ids",
    "longer": "each repeat has the whole deadline",
    "impatient": "what was refused for a while goes out at once",
    "forgets": "what was refused for a while never goes out again",
    "no-credit": "everything goes out at once",
    "strict": "a type that it does not know is its end",
    "twice": "an answer that comes twice is told twice",
    "waits": "a silent link is waited for without end",
    "trusts": "the file of an answer is read as it is",
    "old-token": "the token is read once",
    "no-pong": "pings are not answered",
    "first-part": "the first part of a message is taken for a frame",
    "reorders": "what is unanswered goes out again, the newest first",
    "no-deadline": "an answer that never comes is waited for without end",
    "stays": "it does not end",
}
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
RUN_DIR = os.environ["GOONDAN_RUN_DIR"]
FINAL = {"E_TOKEN_INVALID", "E_CLASS_MISMATCH", "E_VERSION", "E_AGENT_NOT_FOUND", "E_OVERLOADED"}
MAX_BLOB = 67_371_008

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class Bad(Exception):
    """An answer that cannot be had; its text is the code."""


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def depth(value: Any, left: int = 64) -> None:
    if left == 0:
        raise Bad("E_FRAME_INVALID")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        depth(item, left - 1)


class Asked:
    """A request that is not answered."""

    def __init__(self, ref: str, frame: dict[str, Any], deadline_ms: int, wants: str) -> None:
        self.ref, self.frame, self.wants = ref, frame, wants
        self.deadline_ms, self.began = deadline_ms, time.monotonic()
        self.out = self.accepted = self.sent = self.held = False
        self.again_at = 0.0
        self.cancelled = ""


class Client:
    """One connection at a time, and what is unanswered, oldest first."""

    def __init__(self) -> None:
        self.me = secrets.token_hex(6)
        self.number = 0
        self.asked: list[Asked] = []
        self.admins: dict[str, dict[str, Any]] = {}
        self.admins_at: dict[str, float] = {}
        self.blobs, self.token, self.credit = "", "", 0
        self.acked: set[str] = set()
        self.hellos = 0
        self.closing = False
        self.socket: Any = None
        self.connect()

    def connect(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.PROBE_ROUTER, 1),
            (zmq.RECONNECT_IVL, 20),
            (zmq.MAXMSGSIZE, 17 << 16),
        ):
            self.socket.setsockopt(option, value)
        self.socket.connect(f"ipc://{RUN_DIR}/clients.sock")
        self.welcomed, self.hello_at, self.heard_at, self.pinged = False, 0.0, time.monotonic(), False

    def id(self) -> str:
        self.number += 1
        return f"{self.me}.{self.number}"

    def put(self, frame: dict[str, Any]) -> None:
        if self.socket.poll(0, zmq.POLLOUT):
            self.socket.send(pack(frame), zmq.NOBLOCK)

    def hello(self) -> None:
        self.hellos += 1
        if FAULT == "says-hello-once" and self.hellos > 1:
            return
        if FAULT != "old-token" or not self.token:
            with open(f"{RUN_DIR}/client.token") as file:
                self.token = file.read().strip()
        waits = [one.frame["replyTo"]["correlationId"] for one in self.asked if "replyTo" in one.frame]
        payload = {"token": self.token, "incarnation": self.me, "versions": [1], "awaiting": waits}
        self.welcomed, self.hello_at, self.hello_id = False, time.monotonic(), self.id()
        self.put({"type": "hello", "id": self.hello_id, "payload": payload})

    # --- what it is told to do

    def do(self, line: dict[str, Any]) -> None:
        if line["do"] == "close":
            self.closing = FAULT != "stays"
        elif line["do"] == "cancel":
            for one in self.asked:
                if one.ref == line["ref"]:
                    admin: dict[str, Any] = {
                        "type": "admin",
                        "id": self.id(),
                        "payload": {"op": "cancel", "eventId": one.frame["eventId"]},
                    }
                    self.admins[admin["id"]], self.admins_at[admin["id"]] = admin, 0.0
        else:
            event = secrets.token_hex(8)
            now = datetime.datetime.now(datetime.UTC).isoformat()
            payload = {"id": event, "type": "user.message", "createdAt": now, "input": line.get("text")}
            frame = {"type": "event", "id": self.id(), "to": line.get("to", "_operator"), "eventId": event}
            frame |= {"instanceKey": line.get("instance", "default"), "payload": payload}
            if line["do"] == "call":
                payload |= {"type": "operator.call", "input": {"tool": line["tool"], "args": line["args"]}}
            if line["do"] != "send":
                frame["replyTo"] = {"target": "client", "correlationId": secrets.token_hex(8)}
            if line["do"] == "stream":
                frame["live"] = True
            wants = {"send": "accepted", "call": "result"}.get(line["do"], "answer")
            if len(pack(payload)) > 1 << 19:
                if not self.blobs:
                    say({"ref": line["ref"], "error": {"code": "E_FRAME_TOO_LARGE", "message": "too large"}})
                    return
                frame["blob"] = self.written(pack(frame.pop("payload")))
            self.asked.append(Asked(line["ref"], frame, line["deadlineMs"], wants))

    def written(self, data: bytes) -> dict[str, Any]:
        name = secrets.token_hex(16)
        fd = os.open(f"{self.blobs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
        return {"file": name, "digest": hashlib.sha256(data).hexdigest(), "size": len(data)}

    # --- what goes out

    def flush(self) -> None:
        now = time.monotonic()
        for one in list(self.asked):
            if not one.held and now > one.began + one.deadline_ms / 1000 + 1 and FAULT != "no-deadline":
                self.settle(one, {"error": {"code": "E_AGENT_TIMEOUT", "message": "no answer in time"}})
        if not self.welcomed:
            if self.hello_at and now - self.hello_at > 0.5:
                self.hello()
            return
        out = sum(one.out and not one.accepted for one in self.asked)
        held = set()
        for one in reversed(self.asked) if FAULT == "reorders" else self.asked:
            whose = (one.frame["to"], one.frame["instanceKey"])
            if one.out or whose in held:
                continue
            if one.again_at > now:
                held.add(whose)
                continue
            if out >= self.credit and FAULT != "no-credit":
                break
            again, one.sent = one.sent, True
            left = one.deadline_ms - (0 if FAULT == "longer" else int((now - one.began) * 1000))
            if again and FAULT == "new-ids":
                one.frame |= {"id": self.id()}
            one.out, one.accepted = True, False
            out += 1
            self.put(one.frame | {"deadlineMs": max(1, left)})
            if one.again_at:
                held.add(whose)  # until it is accepted
        for one in self.asked:
            if one.out and not one.accepted and one.again_at:
                held.add((one.frame["to"], one.frame["instanceKey"]))
        for key, at in self.admins_at.items():
            if at <= now:
                self.admins_at[key] = float("inf")
                self.put(self.admins[key])

    def settle(self, one: Asked, line: dict[str, Any]) -> None:
        self.asked.remove(one)
        say({"ref": one.ref, **line})

    def over(self, error: dict[str, Any]) -> None:
        for one in list(self.asked):
            self.settle(one, {"error": error})
        say({"error": error})
        sys.exit(1)

    # --- what comes in

    def hear(self, frame: dict[str, Any]) -> None:
        kind: str = frame["type"]
        answers: Any = frame.get("inReplyTo")
        payload: Any = frame.get("payload")
        if kind == "error":
            self.error(answers, payload)
        elif kind == "welcome" and not self.welcomed:  # a second one starts nothing again
            if payload["version"] != 1:
                self.over({"code": "E_VERSION", "message": f"the broker speaks version {payload['version']}"})
            self.welcomed, self.credit, self.blobs = True, payload["credit"], payload.get("blobs", "")
            for one in self.asked:
                one.out = one.accepted = False
                if one.held:  # a new welcome starts every clock
                    one.held, one.began = False, time.monotonic()
            self.admins_at = dict.fromkeys(self.admins, 0.0)
        elif kind == "ping" and FAULT != "no-pong":
            self.put({"type": "pong", "inReplyTo": frame["id"]})
        elif kind == "credit":
            self.credit = payload["window"]
        elif kind == "ack":
            for one in [one for one in self.asked if one.frame["id"] == answers]:
                one.accepted, one.again_at = True, 0.0
                if one.wants == "accepted":
                    self.settle(one, {"accepted": True})
        elif kind == "reply":
            self.admins.pop(answers, None)
            self.admins_at.pop(answers, None)
        elif kind == "runtime.event":
            for one in self.asked:
                if one.frame.get("live") and one.frame["replyTo"]["correlationId"] == answers:
                    say({"ref": one.ref, "event": payload})
        elif kind == "event":
            self.answer(frame)
        elif FAULT == "strict" and kind not in ("welcome", "pong", "clock", "shutdown", "approval.news"):
            sys.exit(f"what is {kind}?")
        if kind == "clock":
            for one in self.asked:
                if "replyTo" in one.frame and one.frame["replyTo"]["correlationId"] == answers:
                    one.held = frame.get("stage") == "held"
                    one.began, one.deadline_ms = time.monotonic(), frame["deadlineMs"]

    def error(self, answers: Any, payload: dict[str, Any]) -> None:
        code = payload["code"]
        if code == "E_HELLO_REQUIRED":
            if answers is None:
                self.hello()
            return
        if answers == getattr(self, "hello_id", "") and code in FINAL:
            self.over(payload)
        again = 0.0 if FAULT == "impatient" else time.monotonic() + payload.get("retryAfterMs", 0) / 1000
        if FAULT == "forgets":
            again = float("inf")
        for one in list(self.asked):
            if one.frame["id"] == answers:
                if code == "E_OVERLOADED":
                    one.out, one.again_at = False, again or 1e-9
                else:
                    if "blob" in one.frame:
                        os.unlink(f"{self.blobs}/{one.frame['blob']['file']}")
                    self.settle(one, {"error": payload})
        if answers in self.admins and code == "E_OVERLOADED":
            self.admins_at[answers] = again

    def answer(self, frame: dict[str, Any]) -> None:
        known = frame["eventId"] in self.acked
        if FAULT != "no-ack" and not (FAULT == "one-ack" and known):
            self.put({"type": "ack", "stage": "done", "eventId": frame["eventId"], "inReplyTo": frame["id"]})
        self.acked.add(frame["eventId"])
        for one in list(self.asked):
            if "replyTo" not in one.frame or one.frame["replyTo"]["correlationId"] != frame.get("inReplyTo"):
                continue
            try:
                line = self.line(one, self.opened(frame))
            except Bad as error:
                line = {"error": {"code": str(error), "message": "the answer cannot be had"}}
            self.settle(one, line)
            if FAULT == "twice":
                self.asked.append(one)
                one.out = one.accepted = True

    def line(self, one: Asked, payload: Any) -> dict[str, Any]:
        answer = payload.get("answer") if isinstance(payload, dict) else None
        if not isinstance(answer, dict) or answer.get("status") not in ("completed", "failed"):
            raise Bad("E_FRAME_INVALID")
        depth(payload)
        if answer["status"] == "failed":
            return {"error": answer["error"]}
        return {"result": answer["output"]} if one.wants == "result" else {"answer": answer}

    def opened(self, frame: dict[str, Any]) -> Any:
        blob = frame.get("blob")
        if blob is None:
            return frame.get("payload")
        if not self.blobs:
            raise Bad("E_BLOB_UNAVAILABLE")
        name, size = blob["file"], blob["size"]
        if FAULT == "trusts":
            with open(f"{self.blobs}/{name}", "rb") as file:
                return unpack(file.read())
        if len(name) != 32 or set(name) - set("0123456789abcdef") or not 0 < size <= MAX_BLOB:
            raise Bad("E_BLOB_INVALID")
        try:
            fd = os.open(f"{self.blobs}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            raise Bad("E_BLOB_MISSING") from None
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Bad("E_BLOB_MISSING")
            data = file.read(size + 1)
        if (len(data), hashlib.sha256(data).hexdigest()) != (size, blob["digest"]):
            raise Bad("E_BLOB_MISMATCH")
        return unpack(data)

    # --- the loop

    def received(self, parts: list[bytes]) -> None:
        if len(parts) != 1 and FAULT != "first-part":
            return
        self.heard_at, self.pinged = time.monotonic(), False
        try:
            frame = unpack(parts[0]) if parts[0] else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # A frame is too deep or no frame; whoever waits for it is told, if it can be said who that is.
            frame = self.shallow(parts[0])
        if isinstance(frame, dict) and isinstance(frame.get("type"), str):
            self.hear(frame)

    def shallow(self, data: bytes) -> Any:
        try:
            frame = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
            header = {key: unpack(raw) for key, raw in frame.items() if key != "payload"}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return header if header.get("type") == "event" else None

    def silence(self) -> None:
        now = time.monotonic()
        waits = bool(self.asked or self.admins or (self.hello_at and not self.welcomed))
        if not waits or FAULT == "waits":
            self.heard_at, self.pinged = (now, False) if not waits else (self.heard_at, self.pinged)
        elif not self.pinged and now - self.heard_at > 5:
            self.pinged, self.heard_at = True, now
            self.put({"type": "ping"})
        elif self.pinged and now - self.heard_at > 5:
            self.connect()

    def run(self) -> None:
        say({"ready": True})
        os.set_blocking(0, False)
        rest = b""
        while not self.closing:
            self.flush()
            self.silence()
            poller = zmq.Poller()
            poller.register(self.socket, zmq.POLLIN)
            poller.register(0, zmq.POLLIN)
            poller.poll(20)
            while self.socket.poll(0):
                self.received(self.socket.recv_multipart())
            if select.select([0], [], [], 0)[0]:
                data = os.read(0, 1 << 20)
                if not data and FAULT != "stays":
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.do(json.loads(line))
        self.socket.close(linger=200)


if __name__ == "__main__":
    Client().run()
