"""The kernel that is played for one scenario: a ROUTER socket in a runtime directory, and the COMMAND beside it.

Steps are those of schemas/vectors/README.md, and a few more (scenarios.yaml). What is seen goes into a trace.

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
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq

from kernel.certify.client.model import Model
from kernel.certify.matching import Names, short
from kernel.certify.program import Program
from kernel.certify.trace import Differs, NotOffered, Played, Scenario, Seen

#: How long one look at the sockets lasts at most (seconds), so that an interrupt is noticed.
LOOK_S: Final = 0.2
#: What is waited for in vain is not as the steps say: after so many seconds.
PATIENCE_S: Final = 10.0
#: After so many seconds a link that says nothing is given up, besides.
ANEW_S: Final = 10.0
#: Of a time that passes in the steps, so much has to pass here: a program's clock is not ours.
PASSES: Final = 0.95
#: A time that passes in the steps is not longer here (seconds): it stands for any.
LONGEST_S: Final = 6.0
#: What comes unasked at the end of a scenario is waited for (seconds).
SETTLE_S: Final = 0.15
#: A frame that arrives has at most so many bytes.
MAX_ARRIVING: Final = 1_114_112
#: A frame that a client sends has at most so many bytes.
MAX_SENT: Final = 1 << 20
#: More lines, or frames, than any scenario has: what goes on beyond that is rubbish without end.
MAX_SEEN: Final = 100_000

#: What client.token holds, as the recorded sequences have it.
TOKEN: Final = "token"  # noqa: S105


class Stage:
    """One scenario: its folder, the socket, the program, and what was seen."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        scenario: Scenario,
        stopping: threading.Event,
        patience: float,
    ) -> None:
        """Raises GoondanError E_CERTIFY when the program cannot be started."""
        self.scenario, self.trace, self.slow = scenario, [], False  # type: ignore[var-annotated]
        self._stopping, self._patience = stopping, patience
        self.folder = tempfile.mkdtemp(prefix="gdn-")
        self._blobs = f"{self.folder}/blobs"
        os.mkdir(self._blobs, 0o700)
        self._links: dict[bytes, int] = {}
        self._link = b""
        self._asked_hello = self._over = False
        self._model: Model | None = None
        self._frames: deque[dict[str, Any]] = deque()
        self._told: dict[str, deque[dict[str, Any]]] = {}
        self._loose: list[dict[str, Any]] = []
        self._refs: dict[str, str] = {}
        self._welcome: dict[str, Any] | None = None
        self._calls = {
            step["eventId"]: step for step in scenario.steps if step.get("do") in ("ask", "stream", "call", "send")
        }
        self.names = Names(
            [*self._calls, *(one["correlationId"] for one in self._calls.values() if "correlationId" in one)]
        )
        self.names.known["$blobs"] = self._blobs
        try:
            self._token(TOKEN)
            self._listen()
            self.program = Program(argv, {**env, "GOONDAN_RUN_DIR": self.folder})
        except BaseException:
            self._close()
            raise

    # --- the shell: what is seen

    def _listen(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
        self._router.bind(f"ipc://{self.folder}/clients.sock")

    def _close(self) -> None:
        if hasattr(self, "_context"):
            self._context.destroy(linger=200)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _token(self, text: str) -> None:
        with open(
            f"{self.folder}/client.token.new", "w", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            file.write(text)
        os.rename(f"{self.folder}/client.token.new", f"{self.folder}/client.token")
        self._see("token", text)

    def _see(self, kind: Any, what: Any = None, link: int | None = None) -> None:
        if len(self.trace) >= MAX_SEEN:
            raise Differs("it sends or writes without end")
        self.trace.append(Seen(time.monotonic(), kind, what, len(self._links) if link is None else link))

    def _look(self, seconds: float) -> None:
        """Take what the program sends and writes within some time; return as soon as there is something."""
        if self._stopping.is_set():
            raise KeyboardInterrupt
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        ended = self.program.ended()
        for fd in () if ended else self.program.pipes():
            poller.register(fd, zmq.POLLIN)
        if not ended and (taking := self.program.input()) is not None:
            poller.register(taking, zmq.POLLOUT)
        poller.poll(int(max(0, min(seconds, LOOK_S)) * 1000))
        self.program.flush()
        with suppress(zmq.Again):
            while True:
                self._receive(self._router.recv_multipart(zmq.NOBLOCK))
        try:
            lines = self.program.lines()
        except ValueError as error:
            raise Differs(f"it wrote {error}") from None
        for line in lines:
            self._hear(line)
        if ended and not lines and seconds > 0:
            time.sleep(min(seconds, 0.02))

    def _receive(self, parts: list[bytes]) -> None:
        ident, *message = parts
        if ident not in self._links:
            self._links[ident] = len(self._links) + 1
            self._link, self._asked_hello = ident, False
            self._see("link", ident.hex() if ident[:1] != b"\0" else None)
        link = self._links[ident]
        if message == [b""]:
            return
        why = f"{len(message)} parts" if len(message) != 1 else ""
        frame = None
        if not why:
            try:
                frame = msgspec.msgpack.decode(message[0])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                why = f"no msgpack ({error})"
        if frame is not None and not (isinstance(frame, dict) and isinstance(frame.get("type"), str)):
            why = "no map with a type"
        if not why and len(message[0]) > MAX_SENT:
            why = f"a frame of {len(message[0])} bytes"
        if why or frame is None:
            self._see("odd", why, link)
            return
        self._see("got", frame, link)
        if isinstance(frame.get("blob"), dict):
            self._see("file", self._found(frame["blob"]), link)
        if ident == self._link:
            self._frames.append(frame)

    def _found(self, blob: dict[str, Any]) -> dict[str, Any]:
        """What lies under the name of a blob that the program sent."""
        try:
            path = os.path.join(self._blobs, os.path.basename(str(blob.get("file"))))
            with open(path, "rb") as file:
                data = file.read()
            return {
                "asked": blob,
                "size": len(data),
                "digest": hashlib.sha256(data).hexdigest(),
                "mode": os.stat(path).st_mode & 0o777,
            }
        except OSError as error:
            return {"asked": blob, "missing": error.strerror}

    def _hear(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            self._see("odd", f"a line that is no JSON object: {short(line.decode('utf-8', 'replace'))}")
            return
        self._see("said", said)
        if isinstance(said.get("ref"), str):
            self._told.setdefault(said["ref"], deque()).append(said)
        else:
            self._loose.append(said)

    def _until(self, there: Callable[[], bool], what: str, patience: float | None = None) -> None:
        """Wait for something. Raises Differs."""
        began = time.monotonic()
        ends = began + (self._patience if patience is None else patience)
        while not there():
            if self.program.ended():
                self._look(0)
                if there():
                    return
                raise Differs(f"it ended by itself, and {what} was due{self.program.why()}")
            left = ends - time.monotonic()
            if left <= 0:
                raise Differs(f"nothing came for {time.monotonic() - began:.1f} s, and {what} was due")
            self._look(left)

    # --- the steps

    def play(self) -> Played:
        """Play the scenario to its end."""
        played = Played(self.scenario, self.trace)
        try:
            for index, step in enumerate(self.scenario.steps):
                following = self.scenario.steps[index + 1] if index + 1 < len(self.scenario.steps) else {}
                self._step(step, following)
            self._pass(SETTLE_S)
            self._rest()
            self._end()
        except Differs as error:
            played.fault = str(error)
        except NotOffered:
            played.offered = False
        finally:
            self.program.stop(0)
            self._close()
        return played

    def _step(self, step: dict[str, Any], following: dict[str, Any]) -> None:
        (name,) = step.keys() & _STEPS.keys()
        _STEPS[name](self, step if name == "do" else step[name])

    def _rest(self) -> None:
        self._drop_noise()
        if self._frames and not self._over:
            raise Differs(f"it sent {short(self._frames[0])}, and nothing was due")
        self._check_rest()

    def _check_rest(self) -> None:
        """Nothing is told twice."""
        refs = {self._refs.get(step["told"]["eventId"], "") for step in self.scenario.steps if "told" in step}
        for ref in refs & self._told.keys():
            for said in self._told[ref]:
                if "event" not in said:
                    raise Differs(f"it told {short(said)} once more")

    def _end(self) -> None:
        self._tell({"do": "close"})
        self.program.end_input()
        status = self.program.stop(self._patience)
        for line in self.program.rest:
            self._hear(line)
        self._check_rest()
        if status is None:
            raise Differs(f"it did not end within {self._patience:g} s of `close`, and was killed")
        if status and not self._over:
            raise Differs(f"it ended with status {status} after `close`{self.program.why()}")

    def _send(self, frame: dict[str, Any]) -> None:
        self._see("sent", frame)
        self._put([msgspec.msgpack.encode(frame)])

    def _put(self, parts: list[bytes]) -> None:
        self._router.send_multipart([self._link, *parts])

    def _broker(self, frame: dict[str, Any]) -> None:
        asks = frame["type"] == "error" and "inReplyTo" not in frame and frame["payload"]["code"] == "E_HELLO_REQUIRED"
        if asks and not self._asked_hello:
            self._until(lambda: bool(self._link), "a connection")
            self._asked_hello = True
            if self._frames and self._frames[0]["type"] == "hello":
                return  # a library without PROBE_ROUTER says hello by itself
        filled = self.names.fill(frame)
        if frame["type"] == "welcome":
            self._welcome = filled
        self._send(filled)

    def _drop_noise(self, wanted: str = "") -> None:
        """Answer pings that no step names, and hellos that came again because this machine is slow."""
        while self._frames:
            frame = self._frames[0]
            if self._model is not None:
                for reply in self._model.hear(frame):
                    self._send(reply)
            elif frame["type"] == "ping" and wanted != "ping":
                self._send({"type": "pong"} | ({"inReplyTo": frame["id"]} if "id" in frame else {}))
            elif frame["type"] == "hello" and wanted != "hello" and self._welcome is not None:
                self.slow = True
                self._send(self._welcome | {"inReplyTo": frame.get("id")})
            elif frame["type"] in ("event", "admin", "ack") and wanted == "hello" and len(self._links) > 1:
                self._send(_too_early(frame))  # it was under way when the connection was lost
            else:
                return
            self._frames.popleft()

    def _client(self, wanted: dict[str, Any]) -> None:
        def there() -> bool:
            self._drop_noise(wanted["type"])
            self._refuse()
            return bool(self._frames)

        self._until(there, f"a frame {short(wanted)}")
        got = self._frames.popleft()
        if wanted["type"] == "hello":
            self.names.known.pop(wanted.get("id", ""), None)  # each hello is one of its own
        if (text := self.names.differs(wanted, got)) is not None:
            raise Differs(f"it sent {short(got)}, and {short(wanted)} was due: {text}")

    def _refuse(self) -> None:
        """Raises NotOffered when the program has said that it cannot do what it was told."""
        for told in self._told.values():
            for said in told:
                error = said.get("error")
                if said.get("unsupported") or (
                    self.scenario.refused and isinstance(error, dict) and error.get("code") == self.scenario.refused
                ):
                    raise NotOffered

    def _do(self, step: dict[str, Any]) -> None:
        if step["do"] == "cancel":
            self._tell({"do": "cancel", "ref": self._refs[step["eventId"]]})
            return
        ref = str(len(self._refs) + 1)
        self._refs[step["eventId"]] = ref
        do = "stream" if step.get("live") else step["do"]
        line = {"do": do, "ref": ref, "deadlineMs": step.get("deadlineMs", 60000)}
        line |= {key: step[key] for key in ("to", "tool", "args") if key in step}
        if "text" in step:
            line |= {"text": self.names.fill(step["text"]), "instance": step.get("instanceKey", "default")}
        self._tell(line)

    def _tell(self, line: dict[str, Any]) -> None:
        self._see("do", line)
        self.program.write(msgspec.json.encode(line) + b"\n")

    def _passes(self, milliseconds: int) -> None:
        self._pass(min(milliseconds / 1000 * PASSES, LONGEST_S))

    def _pass(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        links = len(self._links)
        while (left := ends - time.monotonic()) > 0:
            self._look(left)
            self._drop_noise()
            if self._frames and not self._over:
                raise Differs(f"it sent {short(self._frames[0])}, and nothing was due")
            if len(self._links) > links and not self._over:
                raise Differs("it connected anew, and nothing was lost")

    def _lost(self, _: Any) -> None:
        self._drop_noise()
        if self._frames:
            raise Differs(f"it sent {short(self._frames[0])}, and nothing was due")
        self._lose()

    def _lose(self) -> None:
        self._see("lost")
        self._context.destroy(linger=200)
        self._link, self._asked_hello, self._welcome = b"", False, None
        self._frames.clear()
        self._listen()

    def _anew(self, _: Any) -> None:
        before, links = self._link, len(self._links)

        def there() -> bool:
            self._drop_noise()
            return len(self._links) > links

        self._until(there, "a new connection", ANEW_S + self._patience)
        if self._link == before:
            raise Differs("it used a routing id again")
        self._frames = deque(frame for frame in self._frames if frame["type"] == "hello")
        self._welcome = None

    def _said(self, ref: str, events: bool) -> dict[str, Any] | None:
        told = self._told.get(ref, deque())
        while told and "event" in told[0] and not events:
            told.popleft()
        return told.popleft() if told else None

    def _check_told(self, wanted: dict[str, Any]) -> None:
        ref = self._refs.get(wanted["eventId"])
        if ref is None:
            return  # what came of a cancel has no line of its own
        found: list[dict[str, Any]] = []

        def there() -> bool:
            self._drop_noise("?")
            self._refuse()
            if (said := self._said(ref, "event" in wanted)) is not None:
                found.append(said)
            return bool(found)

        self._until(there, f"a line with {short(wanted)}")
        if (text := self._line_differs(wanted, found[0])) is not None:
            raise Differs(f"it told {short(found[0])}, and {short(wanted)} was due{text}")

    def _line_differs(self, wanted: dict[str, Any], said: dict[str, Any]) -> str | None:
        answer = said.get("answer") if isinstance(said.get("answer"), dict) else {}
        for kind in ("error", "failed"):
            if kind in wanted:
                error = said.get("error") or answer.get("error") or {}  # type: ignore[union-attr]
                codes = wanted[kind] if isinstance(wanted[kind], list) else [wanted[kind]]
                if isinstance(result := said.get("result"), dict) and wanted.get("orResult"):
                    error = result.get("error") or {}
                return None if isinstance(error, dict) and error.get("code") in codes else ""
        if "response" in wanted:
            return self.names.differs({"status": "completed", "response": wanted["response"]}, answer)
        (kind,) = wanted.keys() - {"eventId"}
        return self.names.differs(wanted[kind], said.get(kind))

    def _check_over(self, code: str) -> None:
        self._over = True

        def there() -> bool:
            said = [*self._loose, *(line for told in self._told.values() for line in told)]
            codes = {line["error"].get("code") for line in said if isinstance(line.get("error"), dict)}
            return code in codes or (self.program.ended() and code.encode() in self.program.tail)

        self._until(there, f"a line with the error {code}")
        before = len(self._links)
        self._pass(0.7)
        if len(self._links) > before or any(frame["type"] == "hello" for frame in self._frames):
            raise Differs("it said hello again after it was refused for good")

    def _ready(self, _: Any) -> None:
        self._until(lambda: any(line.get("ready") is True for line in self._loose), 'the line {"ready": true}')

    def _raw(self, parts: list[Any]) -> None:
        """A message that is no frame, or not only one. A part: hex digits, {frame}, or {hex, times, tail?}."""
        made = []
        for part in parts:
            if isinstance(part, str):
                made.append(bytes.fromhex(part))
            elif "frame" in part:
                made.append(msgspec.msgpack.encode(self.names.fill(part["frame"])))
            else:
                made.append(bytes.fromhex(part["hex"]) * part["times"] + bytes.fromhex(part.get("tail", "")))
        self._put(made)

    def _flood(self, flood: dict[str, Any]) -> None:
        """The same frame `times` over; `$n` in it counts."""
        for number in range(flood["times"]):
            self.names.known["$n"] = f"b.n{number}"
            self._broker(flood["frame"])

    def _pongs(self, times: int) -> None:
        for number in range(times):
            self._client({"type": "pong", "inReplyTo": f"b.n{number}"})

    def _blob(self, blob: dict[str, Any]) -> None:
        """A file in the blobs folder, good or bad: `$file`, `$digest` and `$size` are what a frame says of it."""
        data = msgspec.msgpack.encode(self.names.fill(blob["payload"]))
        name, kind = os.urandom(16).hex(), blob.get("kind", "good")
        path = f"{self._blobs}/{name}"
        if kind == "fifo":
            os.mkfifo(path, 0o600)
        elif kind == "symlink":
            with open(f"{self.folder}/elsewhere", "wb") as file:
                file.write(data)
            os.symlink(f"{self.folder}/elsewhere", path)
        elif kind != "missing":
            with open(path, "wb") as file:
                file.write(data + b"\0" * (kind == "long"))
        digest = hashlib.sha256(data).hexdigest()
        if kind == "digest":
            digest = digest[::-1]
        self.names.known |= {"$file": name, "$digest": digest, "$size": len(data)}

    def _stays(self, name: str) -> None:
        if not os.path.lexists(f"{self._blobs}/{self.names.fill(name)}"):
            raise Differs("it deleted the file of an answer, which is the broker's")

    def _storm(self, storm: dict[str, Any]) -> None:
        """A broker that is gone between any two frames: asks, and a connection that is lost at seeded moments."""
        chance, model, asks = random.Random(storm["seed"]), Model(), storm["asks"]
        for number in range(asks):
            self._do(
                {
                    "do": "ask",
                    "eventId": f"s-{number}",
                    "to": "echo",
                    "text": f"t{number}",
                    "instanceKey": f"i{number % 3}",
                }
            )
        told: dict[str, str] = {}
        welcomed: set[bytes] = set()
        ends = time.monotonic() + 3 * self._patience
        while len(told) < asks:
            self._until(lambda: bool(self._link) or bool(self._told), "a connection")
            if self._link and not self._asked_hello:
                self._asked_hello = True
                self._send(model.hello_required())
            self._look(0.05)
            while self._frames and self._link:
                frame = self._frames.popleft()
                welcomed = welcomed | {self._link} if frame["type"] == "hello" else welcomed
                for reply in model.hear(frame) if self._link in welcomed else [_too_early(frame)]:
                    if chance.random() * storm["every"] < 1 and storm["losses"] > 0:
                        storm = storm | {"losses": storm["losses"] - 1}
                        self._lose()
                        break
                    self._send(reply)
            for ref in list(self._told):
                while (said := self._said(ref, events=False)) is not None:
                    told[ref] = said.get("answer", {}).get("response") if ref not in told else "twice"
            if time.monotonic() > ends:
                raise Differs(f"{asks - len(told)} of {asks} questions are unanswered")
        wrong = [ref for ref, text in told.items() if text != f"t{int(ref) - 1}"]
        if wrong:
            raise Differs(f"the answer of question {wrong[0]} was {short(told[wrong[0]])}")
        self._model = model  # it goes on to answer what comes late


def _too_early(frame: dict[str, Any]) -> dict[str, Any]:
    """What a broker says to a frame that comes before its hello."""
    return {
        "type": "error",
        "inReplyTo": frame.get("id"),
        "payload": {"code": "E_HELLO_REQUIRED", "message": "too early"},
    }


_STEPS: Final[dict[str, Callable[[Stage, Any], None]]] = {
    "broker": Stage._broker,
    "client": Stage._client,
    "do": Stage._do,
    "passes": Stage._passes,
    "lost": Stage._lost,
    "anew": Stage._anew,
    "told": Stage._check_told,
    "over": Stage._check_over,
    "ready": Stage._ready,
    "raw": Stage._raw,
    "flood": Stage._flood,
    "pongs": Stage._pongs,
    "blob": Stage._blob,
    "stays": Stage._stays,
    "storm": Stage._storm,
    "token": Stage._token,
}
#: What a step may be.
STEPS: Final = frozenset(_STEPS)
