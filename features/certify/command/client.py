"""The kernel that is played for one scenario of a client: a ROUTER socket in a runtime directory, and the COMMAND
beside it.

The scenarios are the sequences of schemas/vectors and those of client.yaml. Their steps are those of
schemas/vectors/README.md, and a few more.

Source: docs/certify.md; schemas/PROTOCOL.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Final

import msgspec
import yaml
import zmq

from goondan.features.certify.command.playing import Differs, NotOffered, Player, Program
from goondan.features.certify.command.rules import (
    JUDGES,
    Model,
    Names,
    Rule,
    Scenario,
    read,
    scenario,
    short,
    too_early,
)
from goondan.schemas.wire.codec import DECODE_ERRORS, FrameError, decode

#: After so many seconds a link that says nothing is given up, besides.
ANEW_S: Final = 10.0
#: What client.token holds, as the recorded sequences have it.
TOKEN: Final = "token"  # noqa: S105


class Stage(Player):
    """One scenario: its folder, the socket, the program, and what was seen."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], scenario: Scenario, stopping: threading.Event, wait: float
    ) -> None:
        """Raises GoondanError E_CERTIFY when the program cannot be started."""
        asked = [one for one in scenario.steps if "do" in one]
        chosen = [one[key] for one in asked for key in ("eventId", "correlationId") if key in one]
        super().__init__(scenario, stopping, wait, Names(chosen))
        self.folder = tempfile.mkdtemp(prefix="gdn-certify-", dir="/tmp")  # the path of a socket is short
        self._links: dict[bytes, int] = {}
        #: The newest connection, and the one that the steps know of.
        self._ident = self._known = b""
        self._asked_hello = False
        self._model: Model | None = None
        self._welcome: dict[str, Any] | None = None
        self._frames: deque[dict[str, Any]] = deque()
        #: Lines by their ref; "" has those without.
        self._told: dict[str, deque[dict[str, Any]]] = {}
        self._refs: dict[str, str] = {}
        #: The refs that it was told to ask under.
        self._questions: set[str] = set()
        self._listen()
        try:
            self.names.known["$blobs"] = self._blobs = f"{self.folder}/blobs"
            os.mkdir(self._blobs, 0o700)
            self.step_token(TOKEN)
            self.program = Program(argv, {**env, "GOONDAN_RUN_DIR": self.folder})
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(f"ipc://{self.folder}/clients.sock")

    def close(self) -> None:
        """Close the socket and remove the folder."""
        self._context.destroy(linger=200)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what is seen

    def look(self, seconds: float) -> None:
        """Take what the program sends and writes within some time; return as soon as there is something."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for fd, events in self.program.polled():
            poller.register(fd, events)
        poller.poll(int(max(0, seconds) * 1000))
        self.program.flush()
        with suppress(zmq.Again):
            while True:
                self._receive(self._router.recv_multipart(zmq.NOBLOCK))
        try:
            for line in self.program.lines():
                self._hear(line)
        except ValueError as error:
            raise Differs(f"it wrote {error}") from None

    def _receive(self, parts: list[bytes]) -> None:
        ident, *message = parts
        if ident not in self._links:
            self._links[ident] = self.link = len(self._links) + 1
            self._ident, self._asked_hello = ident, False
            self.see("link", ident.hex() if ident[:1] != b"\0" else None)
        link = self._links[ident]
        if message == [b""]:
            return
        if len(message) != 1:
            self.see("odd", f"{len(message)} parts", link)
            return
        try:
            decode(message[0])  # which knows the fields of a header
            frame = msgspec.msgpack.decode(message[0])
        except (FrameError, *DECODE_ERRORS) as error:
            self.see("odd", str(error), link)
            return
        self.see("got", frame, link)
        if frame.get("blob") is not None:
            self.see("file", self._found(frame["blob"]), link)
        if ident == self._ident:
            self._frames.append(frame)

    def _found(self, blob: dict[str, Any]) -> dict[str, Any]:
        """A blob that the program sent, and what lies under its name."""
        path = os.path.join(self._blobs, os.path.basename(blob["file"]))
        try:
            with open(path, "rb") as file:
                data = file.read()
            found = {"file": os.path.basename(path), "digest": hashlib.sha256(data).hexdigest(), "size": len(data)}
            return {"asked": blob, "found": found, "mode": os.stat(path).st_mode & 0o777}
        except (OSError, ValueError) as error:  # ValueError: no path at all
            return {"asked": blob, "found": str(error), "mode": 0}

    def _hear(self, line: bytes) -> None:
        said = None
        with suppress(ValueError, RecursionError):
            said = json.loads(line)
        if not isinstance(said, dict) or not isinstance(said.get("ref", ""), str):
            what = "whose ref is no text" if isinstance(said, dict) else "that is no JSON object"
            self.see("odd", f"a line {what}: {short(line.decode('utf-8', 'replace'))}")
            return
        self.see("said", said)
        self._told.setdefault(said.get("ref", ""), deque()).append(said)

    def undue(self) -> str | None:
        """A frame that is not due, a connection that nobody took away, or an answer told twice."""
        self._drop_noise()
        if self._frames:
            return f"it sent {short(self._frames[0])}, and nothing was due"
        if self._known and self._ident != self._known:
            return "it connected anew, and nothing was lost"
        return None

    def end(self) -> None:
        """Tell it to end, and look that it does, with nothing told twice."""
        self._tell({"do": "close"})
        self.program.end_input()
        self.until(self.program.ended, "its end after `close`")
        self.look(0)
        status = self.program.stop()
        for ref in {self._refs.get(step["told"]["eventId"]) for step in self.scenario.steps if "told" in step}:
            if (said := self._line(ref or "?", events=False)) is not None:
                raise Differs(f"it told {short(said)} once more")
        if status and not self.over:
            raise Differs(f"it ended with status {status} after `close`{self.program.why()}")

    # --- frames

    def _send(self, frame: dict[str, Any]) -> None:
        self.see("sent", frame)
        self._router.send_multipart([self._ident, msgspec.msgpack.encode(frame)])

    def step_broker(self, frame: dict[str, Any]) -> None:
        """It is sent a frame. A connection that it should have comes first."""
        asks = frame["type"] == "error" and "inReplyTo" not in frame and frame["payload"]["code"] == "E_HELLO_REQUIRED"
        if asks and not self._asked_hello:
            self.until(lambda: bool(self._ident), "a connection")
            self._asked_hello, self._known = True, self._ident
            if self._frames and self._frames[0]["type"] == "hello":
                return  # a library without PROBE_ROUTER says hello by itself
        filled = self.names.fill(frame)
        if frame["type"] == "welcome":
            self._welcome = filled
        self._send(filled)

    def _drop_noise(self, wanted: str = "") -> None:
        """Answer pings that no step names, hellos that came again because this machine is slow, frames that were on
        their way when the connection was lost, and all that comes late of a storm.
        """
        while self._frames:
            frame, kind = self._frames[0], self._frames[0]["type"]
            if self._model is not None:
                replies = self._model.hear(frame)
            elif kind == "ping" and wanted != "ping":
                replies = [{"type": "pong"} | ({"inReplyTo": frame["id"]} if "id" in frame else {})]
            elif kind == "hello" and wanted != "hello" and self._welcome is not None:
                self.slow = True
                replies = [self._welcome | {"inReplyTo": frame.get("id")}]
            elif kind in ("event", "admin", "ack") and wanted == "hello" and self.link > 1:
                replies = too_early(frame)
            else:
                return
            self._frames.popleft()
            for reply in replies:
                self._send(reply)

    def step_client(self, wanted: dict[str, Any]) -> None:
        """The next frame is this one."""

        def there() -> bool:
            self._drop_noise(wanted["type"])
            self._refuse()
            return bool(self._frames)

        self.until(there, f"a frame {short(wanted)}")
        got = self._frames.popleft()
        if wanted["type"] == "hello":
            self.names.known.pop(wanted.get("id", ""), None)  # each hello is one of its own
        if (text := self.names.differs(wanted, got)) is not None:
            raise Differs(f"it sent {short(got)}, and {short(wanted)} was due: {text}")

    def step_maybe(self, wanted: dict[str, Any]) -> None:
        """It may send this frame now, and need not."""
        with suppress(Differs):
            self.wait(0.3)
        if self._frames:
            self.step_client(wanted)

    def step_lost(self, _: Any) -> None:
        """Its connection is taken away."""
        if (text := self.undue()) is not None:
            raise Differs(text)
        self._lose()

    def _lose(self) -> None:
        self.see("lost")
        self._context.destroy(linger=200)
        self._ident = self._known = b""
        self._asked_hello, self._welcome = False, None
        self._frames.clear()
        self._listen()

    def step_anew(self, _: Any) -> None:
        """It connects anew by itself."""

        def there() -> bool:
            self._drop_noise()
            return self._ident != self._known

        self.until(there, "a new connection", ANEW_S)
        self._frames = deque(frame for frame in self._frames if frame["type"] == "hello")
        self._known, self._welcome = self._ident, None

    def step_raw(self, parts: list[Any]) -> None:
        """It is sent a message that is no frame, or not only one. A part: hex, {frame}, or {hex, times, tail?}."""
        made = [self._ident]
        for part in parts:
            if isinstance(part, str):
                made.append(bytes.fromhex(part))
            elif "frame" in part:
                made.append(msgspec.msgpack.encode(self.names.fill(part["frame"])))
            else:
                made.append(bytes.fromhex(part["hex"]) * part["times"] + bytes.fromhex(part.get("tail", "")))
        self._router.send_multipart(made)

    def step_flood(self, flood: dict[str, Any]) -> None:
        """It is sent a frame, and answers it, `times` over; `$n` in it counts."""
        for kind, step in (("broker", self.step_broker), ("client", self.step_client)):
            for number in range(flood["times"] if kind in flood else 0):
                self.names.known["$n"] = f"b.n{number}"
                step(flood[kind])

    # --- lines

    def _tell(self, line: dict[str, Any]) -> None:
        self.see("do", line)
        self.program.write(msgspec.json.encode(line) + b"\n")

    def step_do(self, step: dict[str, Any]) -> None:
        """It is told to do something, when it has read what it was sent before."""
        if self._welcome is not None and self.trace[-1].kind == "sent" and self.trace[-1].what != self._welcome:
            mark = f"b.{len(self.trace)}"
            self._send({"type": "ping", "id": mark})
            read = {"type": "pong", "inReplyTo": mark}
            self.until(lambda: any(read.items() <= frame.items() for frame in self._frames), f"a frame {short(read)}")
            self._frames = deque(frame for frame in self._frames if not read.items() <= frame.items())
        if step["do"] == "cancel":
            self._tell({"do": "cancel", "ref": self._refs[step["eventId"]]})
            return
        ref = self._refs.setdefault(step["eventId"], str(len(self._refs) + 1))
        do = "stream" if step.get("live") else step["do"]
        self._questions |= {ref} if do == "ask" else set()
        line = {"do": do, "ref": ref, "deadlineMs": step.get("deadlineMs", 60000)}
        line |= {key: step[key] for key in ("to", "tool", "args") if key in step}
        if "text" in step:
            line |= {"text": self.names.fill(step["text"]), "instance": step.get("instanceKey", "default")}
        self._tell(line)

    def _refuse(self) -> None:
        """Raises NotOffered when it has said that it cannot do what it was told. To ask is what every client can."""
        for ref, said in ((ref, said) for ref, told in self._told.items() for said in told):
            if said.get("unsupported") and ref in self._questions:
                raise Differs("it cannot ask, and a client that asks nothing is none")
            refused = self.scenario.refused is not None and _code(said) == self.scenario.refused
            if said.get("unsupported") or refused:
                raise NotOffered

    def _line(self, ref: str, events: bool) -> dict[str, Any] | None:
        told = self._told.get(ref, deque())
        while told and "event" in told[0] and not events:
            told.popleft()
        return told.popleft() if told else None

    def step_told(self, wanted: dict[str, Any]) -> None:
        """It writes this of what it was told to do. What came of a cancel has no line of its own."""
        if (ref := self._refs.get(wanted["eventId"])) is None:
            return
        found: list[dict[str, Any]] = []

        def there() -> bool:
            self._drop_noise("?")
            self._refuse()
            if (said := self._line(ref, "event" in wanted)) is not None:
                found.append(said)
            return bool(found)

        self.until(there, f"a line with {short(wanted)}")
        if (text := self._told_differs(wanted, found[0])) is not None:
            raise Differs(f"it told {short(found[0])}, and {short(wanted)} was due: {text}")

    def _told_differs(self, wanted: dict[str, Any], said: dict[str, Any]) -> str | None:
        (kind,) = wanted.keys() - {"eventId"}
        if kind in ("error", "failed"):
            codes = wanted[kind] if isinstance(wanted[kind], list) else [wanted[kind]]
            return None if _code(said) in codes else f"the code is {short(_code(said))}"
        if kind == "response":
            return self.names.differs({"status": "completed", "response": wanted[kind]}, said.get("answer"))
        return self.names.differs(wanted[kind], said.get(kind))

    def step_over(self, code: str) -> None:
        """It gives up with this code, and for good."""
        self.over = True

        def there() -> bool:
            codes = [_code(said) for told in self._told.values() for said in told]
            return code in codes or (self.program.ended() and code.encode() in self.program.tail)

        self.until(there, f"a line with the error {code}")
        before = self.link
        self.wait(0.7)
        if self.link > before or any(frame["type"] == "hello" for frame in self._frames):
            raise Differs("it said hello again after it was refused for good")

    def step_ready(self, _: Any) -> None:
        """It says that it is ready."""
        self.until(
            lambda: any(said.get("ready") is True for said in self._told.get("", ())), 'the line {"ready": true}'
        )

    # --- files

    def step_token(self, text: str) -> None:
        """The token's file is written anew."""
        with open(f"{self.folder}/new", "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text)
        os.rename(f"{self.folder}/new", f"{self.folder}/client.token")
        self.see("token", text)

    def step_blob(self, blob: dict[str, Any]) -> None:
        """A large payload, good or bad: `$file`, `$digest` and `$size` are what a frame says of it."""
        data, kind = msgspec.msgpack.encode(self.names.fill(blob["payload"])), blob.get("kind", "good")
        name, digest = os.urandom(16).hex(), hashlib.sha256(data).hexdigest()
        path = f"{self._blobs}/{name}"
        if kind == "fifo":
            os.mkfifo(path, 0o600)
        elif kind == "symlink":
            os.symlink(f"{self.folder}/elsewhere", path)
            path = f"{self.folder}/elsewhere"
        if kind not in ("fifo", "missing"):
            with open(path, "wb") as file:
                file.write(data + b"\0" * (kind == "long"))
        self.names.known |= {"$file": name, "$digest": digest[:: -1 if kind == "digest" else 1], "$size": len(data)}

    def step_stays(self, name: str) -> None:
        """A file of the broker's is still there."""
        if not os.path.lexists(f"{self._blobs}/{self.names.fill(name)}"):
            raise Differs("it deleted the file of an answer, which is the broker's")

    def step_gone(self, name: str) -> None:
        """A file of its own is not there any more."""
        path = f"{self._blobs}/{self.names.fill(name)}"
        self.until(lambda: not os.path.lexists(path), "the end of the file of a refused frame")

    def step_storm(self, storm: dict[str, Any]) -> None:
        """A broker that is gone between any two frames: asks, and a connection that is lost at seeded moments."""
        chance, model, left = random.Random(storm["seed"]), Model(), storm["losses"]
        texts = {str(number + 1): f"t{number}" for number in range(storm["asks"])}
        for number, text in enumerate(texts.values()):
            self.step_do({"do": "ask", "eventId": text, "to": "echo", "text": text, "instanceKey": f"i{number % 3}"})
        welcomed: set[bytes] = set()

        def all_told() -> bool:
            nonlocal left
            if self._ident and not self._asked_hello:
                self._asked_hello = True
                self._send(model.hello_required())
            while self._frames:
                frame = self._frames.popleft()
                welcomed.update([self._ident] if frame["type"] == "hello" else [])
                for reply in model.hear(frame) if self._ident in welcomed else too_early(frame):
                    if left and chance.random() * storm["every"] < 1:
                        left -= 1
                        self._lose()
                        break
                    self._send(reply)
            return texts.keys() <= self._told.keys()

        self.until(all_told, f"an answer to each of {len(texts)} questions", 2 * self.patience)
        for ref, text in texts.items():
            said = self._line(ref, events=False) or {}
            if self.names.differs({"status": "completed", "response": text}, said.get("answer")) is not None:
                raise Differs(f"the answer to {text} was {short(said)}")
        self._model, self._known = model, b""  # it goes on to answer what comes late


def _code(said: dict[str, Any]) -> Any:
    """The code of the error that a line says: of a refusal, of a failed answer, or of a tool's result."""
    for holder in (said, said.get("answer"), said.get("result")):
        if isinstance(holder, dict) and isinstance(holder.get("error"), dict):
            return holder["error"].get("code")
    return None


def scenarios() -> tuple[list[Scenario], list[Rule]]:
    """All of them. The first one is what every client has to be able to."""
    ours, rules = read(yaml.safe_load(files(__package__).joinpath("client.yaml").read_bytes()), JUDGES)
    recorded = json.loads(files("goondan.schemas").joinpath("vectors/sequences.json").read_bytes())["sequences"]
    return [ours[0], *(scenario(one) for one in recorded if playable(one["steps"])), *ours[1:]], rules


def playable(steps: list[dict[str, Any]]) -> bool:
    """Whether a program can be told what is to be done: it can give up what it has asked, and nothing else."""
    asked = {step["eventId"] for step in steps if step.get("do") == "ask"}
    cancelled = {step["eventId"] for step in steps if step.get("do") == "cancel"}
    waits = {step["told"]["eventId"] for step in steps if "response" in step.get("told", {})}
    known = all(any(hasattr(Stage, f"step_{name}") for name in step) for step in steps)
    return known and cancelled <= asked and not cancelled & waits
