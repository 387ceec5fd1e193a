"""The sequences of a client in schemas/vectors/sequences.json: our own link keeps each of them, on both transports.

The link is real, and so are its sockets and files; its loop has a clock that the test moves on. What comes of the link
between two steps must be what the steps say, and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from goondan.schemas.transport import TRANSPORTS, VARIABLE
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import decode, encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload, Frame, ReplyTo

SCHEMAS = Path(__file__).parent.parent.parent / "schemas"
RECORDED: dict[str, list[dict[str, Any]]] = json.loads((SCHEMAS / "vectors" / "sequences.json").read_text())
SEQUENCES = RECORDED["sequences"] + RECORDED["socketSequences"]
STEPS = {
    "broker", "raw", "client", "do", "passes", "lost", "anew", "token", "blob", "stays", "gone", "told", "over"
}  # fmt: skip
#: How long a step is waited for (seconds).
PATIENCE_S = 30.0
#: The steps of the moved clock (seconds), and by how much a link may be late: it looks at its times now and then.
TICK_S = 0.1
#: How long other threads have in a pause (seconds), and how often the loop turns then.
PAUSE_S = 0.001
TURNS = 3
#: How many pauses pass before the clock is moved on for what does not come.
PAUSES = 8
LATE_S = 0.5
#: What a deadline may be less than the steps say, for the time that the test itself takes (milliseconds).
DEADLINE_SLACK_MS = 5000


class MovedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still until it is moved on, so a machine that is busy elsewhere makes nothing late."""

    moved = 0.0

    def time(self) -> float:
        return self.moved

    async def pause(self) -> None:
        """Give sockets and other threads a moment, and handle what they have brought."""
        time.sleep(PAUSE_S)
        self.moved += PAUSE_S
        for _ in range(TURNS):
            await asyncio.sleep(0)


class Counted(Link):
    """A link that counts the messages that it has handled, and its pings."""

    handled = pings = 0

    def _queue(self, data: bytes) -> None:
        super()._queue(data)
        self.pings += decode(data).type == "ping"

    def _handle(self, data: bytes) -> None:
        super()._handle(data)
        self.handled += 1


class Player:
    """A broker's socket, a link, and what is asked of the link."""

    def __init__(self, folder: Path, loop: MovedLoop) -> None:
        self.folder, self.loop = folder, loop
        self.blobs = folder / "blobs"
        self.blobs.mkdir(mode=0o700)
        self.token = "token"
        self.endpoint = f"ipc://{folder}/r.sock"
        self.router = self._listen()
        #: The connections of the router's, in order; the last one is spoken to.
        self.idents: list[bytes] = []
        self.frames: deque[dict[str, Any]] = deque()
        self.told: deque[dict[str, Any]] = deque()
        #: Live events, which may be lost.
        self.news: deque[dict[str, Any]] = deque()
        self.over: str | None = None
        self.names: dict[str, Any] = {"$blobs": str(self.blobs)}
        self.expected = 0
        self.link = Counted(self.endpoint, "token", on_frame=self._news, renew_token=lambda: self.token)
        self.started = asyncio.ensure_future(self._start())
        self.greeted, self.question = False, b""

    async def _start(self) -> None:
        try:
            await self.link.start(1e6)
            await self.link.closed
        except GoondanError as error:
            self.over = error.info.code

    def _listen(self) -> zmq.Socket[bytes]:
        self.context = zmq.Context()
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.endpoint)
        return router

    async def close(self) -> None:
        await self.link.close(0)
        self.started.cancel()
        self.context.destroy(linger=0)

    # --- what comes

    def look(self) -> None:
        """Take what the link has sent."""
        with suppress(zmq.Again):
            while True:
                ident, *parts = self.router.recv_multipart(zmq.NOBLOCK)
                (data,) = parts
                if ident not in self.idents:
                    self.idents.append(ident)
                    self.greeted, self.question = False, b""
                    self.expected = self.link.handled
                assert ident == self.idents[-1]
                if data:
                    frame = {key: item for key, item in msgspec.msgpack.decode(data).items() if item is not None}
                    assert self.greeted or frame["type"] == "hello", "sent before the hello of its connection"
                    self.greeted = True
                    self.frames.append(frame)
                elif self.question and not self.greeted:  # it asks to be asked again
                    self.router.send_multipart([ident, self.question])

    async def until(self, holds: Callable[[], Any], what: object, late_s: float = 0.0) -> None:
        """Wait, and move the clock on by at most `late_s` (seconds) meanwhile."""
        end, pauses = time.monotonic() + PATIENCE_S, 0
        while not holds():
            assert time.monotonic() < end, f"{what} did not come; there is {list(self.frames)}, {list(self.told)}"
            self.look()
            pauses += 1
            await (asyncio.sleep(0) if self.frames else self.loop.pause())
            if late_s > 0 and not pauses % PAUSES and not holds():
                self.loop.moved += TICK_S
                late_s -= TICK_S

    def _news(self, frame: Frame) -> None:
        if frame.type == "runtime.event":
            self.news.append({"eventId": frame.event_id, "event": from_raw(frame.payload, dict)})

    # --- the steps

    async def play(self, step: dict[str, Any], following: dict[str, Any]) -> None:
        (kind,) = step.keys() & STEPS
        await getattr(self, f"_{kind}")(step, following)

    async def _send(self, parts: list[bytes]) -> None:
        """One message to the link, which is here when the link has handled it."""
        await self.until(lambda: self.idents, "a connection")
        await self.until(lambda: self.link.handled >= self.expected, "what was sent before")
        self.router.send_multipart([self.idents[-1], *parts])
        if len(parts) == 1 and parts[0]:
            self.expected = self.link.handled + 1
            await self.until(lambda: self.link.handled >= self.expected or self.over, "the link")
        await asyncio.sleep(0)

    async def _broker(self, step: dict[str, Any], _: Any) -> None:
        data = msgspec.msgpack.encode(self.filled(step["broker"]))
        if step["broker"]["type"] == "error" and not self.greeted:
            self.question = data
        await self._send([data])

    async def _raw(self, step: dict[str, Any], _: Any) -> None:
        parts = [part and msgspec.msgpack.encode(self.filled(part["frame"])) for part in step["raw"]]
        await self._send([part or b"" for part in parts])

    async def _client(self, step: dict[str, Any], _: Any) -> None:
        await self.until(lambda: self.frames, step["client"], LATE_S)
        self.match(step["client"], self.frames.popleft())

    async def _passes(self, step: dict[str, Any], following: dict[str, Any]) -> None:
        self.look()
        assert not self.frames
        asks, self.link.pings = following.get("client", {}).get("type"), 0
        left = round(step["passes"] / 1000 / TICK_S)
        while left > 0:
            ticks = 10 if left > 70 else 1  # a long time passes faster
            self.loop.moved += TICK_S * ticks
            left -= ticks
            await self.loop.pause()
            self.look()
            if self.link.pings and asks != "ping":
                self.link.pings = 0
                await self._client({"client": {"type": "ping"}}, {})
                await self._send([msgspec.msgpack.encode({"type": "pong"})])
            assert left <= 2 or not self.frames, f"{self.frames[0]} is too early"
            assert left <= 2 or len(self.idents) == 1, "it connects anew too early"

    async def _lost(self, *_: Any) -> None:
        self.look()
        assert not self.frames
        self.context.destroy(linger=0)  # which waits until the socket's file has gone
        self.router = self._listen()
        self.idents.clear()  # libzmq keeps its routing id
        await self.until(lambda: self.idents, "a connection")

    async def _anew(self, *_: Any) -> None:
        await self.until(lambda: len(self.idents) > 1, "a connection", LATE_S)
        del self.idents[:-1]

    async def _token(self, step: dict[str, Any], _: Any) -> None:
        self.token = step["token"]

    async def _blob(self, step: dict[str, Any], _: Any) -> None:
        """A file for the next frame, and the names `$file`, `$digest` and `$size`."""
        data = msgspec.msgpack.encode(self.filled(step["blob"]["payload"]))
        name = os.urandom(16).hex()
        path, kind = self.blobs / name, step["blob"].get("kind")
        if kind == "symlink":
            (self.folder / "elsewhere").write_bytes(data)
            path.symlink_to(self.folder / "elsewhere")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind != "missing":
            path.write_bytes(data + (b"\0" if kind == "long" else b""))
        digest = hashlib.sha256(data + (b"\0" if kind == "digest" else b"")).hexdigest()
        self.names |= {"$file": name, "$digest": digest, "$size": len(data)}

    async def _stays(self, step: dict[str, Any], _: Any) -> None:
        assert (self.blobs / self.names[step["stays"]]).exists()

    async def _gone(self, step: dict[str, Any], _: Any) -> None:
        await self.until(lambda: not (self.blobs / self.names[step["gone"]]).exists(), step)

    async def _told(self, step: dict[str, Any], _: Any) -> None:
        said = self.news if "event" in step["told"] else self.told
        await self.until(lambda: said, step["told"], LATE_S)
        self.match(step["told"], said.popleft())

    async def _over(self, step: dict[str, Any], _: Any) -> None:
        await self.until(lambda: self.over, step)
        assert self.over == step["over"]

    async def _do(self, step: dict[str, Any], _: Any) -> None:
        name = step["eventId"]
        if step["do"] == "cancel":
            name, answer = "cancel", self.link.post(Frame("admin", payload=to_raw({"op": "cancel", "eventId": name})))
        else:
            event = AgentEvent(id=name, type="user.message", created_at="2026-11-24T09:30:00Z")
            event.input = self.filled(step["text"])
            frame = Frame("event", to=step["to"], instance_key=step["instanceKey"], event_id=name)
            frame.reply_to, frame.live = ReplyTo("client", step["correlationId"]), step.get("live", False)
            frame.deadline_ms, frame.payload = step.get("deadlineMs"), to_raw(event)
            answer = self.link.ask(frame)
        answer.add_done_callback(lambda done: self._answered(name, done))
        await asyncio.sleep(0)

    def _answered(self, name: str, done: asyncio.Future[Frame]) -> None:
        if done.cancelled():
            return
        said: dict[str, Any] = {"eventId": name}
        try:
            frame = done.result()
            if frame.type == "event":
                answer = from_raw(frame.payload, AgentEvent).answer
                assert answer is not None
                said |= {"failed": answer.error.code} if answer.error is not None else {"response": answer.response}
            else:
                said["state"] = from_raw(frame.payload, dict)["state"]
        except GoondanError as error:
            if error.info.code == "E_LINK_CLOSED":
                return
            said["error"] = error.info.code
        self.told.append(said)

    # --- values

    def filled(self, value: Any) -> Any:
        """A value of a step, with its names, long texts and nested lists."""
        if isinstance(value, dict):
            if value.keys() == {"repeat", "times"}:
                return value["repeat"] * value["times"]
            if value.keys() == {"nest"}:
                return msgspec.Raw(b"\x91" * (value["nest"] - 1) + b"\x90")
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        return self.names[value] if isinstance(value, str) and value.startswith("$") else value

    def match(self, wanted: Any, got: Any) -> None:
        """What is sent may have more fields than the step names. `$name` is the client's choice, the same each time."""
        if isinstance(wanted, dict) and not wanted.keys() & {"repeat", "nest"}:
            assert isinstance(got, dict)
            for key, value in wanted.items():
                if key == "deadlineMs" and value is not None:
                    assert value - DEADLINE_SLACK_MS <= got[key] <= value and got[key] >= 1
                else:
                    self.match(value, got.get(key))
        elif isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
            for one, other in zip(wanted, got, strict=True):
                self.match(one, other)
        elif isinstance(wanted, str) and wanted.startswith("$"):
            assert got is not None and self.names.setdefault(wanted, got) == got
        else:
            assert self.filled(wanted) == got

    async def end(self) -> None:
        """Nothing else was sent or said: the answer to a last ping is the next that comes."""
        if self.over is None and self.link.ready:
            await self._send([msgspec.msgpack.encode({"type": "ping", "id": "the end"})])
            await self._client({"client": {"type": "pong", "inReplyTo": "the end"}}, {})
        self.look()
        assert len(self.idents) == 1
        assert (list(self.frames), list(self.told)) == ([], []), "more was sent or said than the sequence has"


def run(scene: Callable[[MovedLoop], Coroutine[Any, Any, None]]) -> None:
    loop = MovedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scene(loop))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=[sequence["name"] for sequence in SEQUENCES])
def test_our_link_keeps_the_sequence(
    sequence: dict[str, Any], transport: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, transport)

    async def scene(loop: MovedLoop) -> None:
        player = Player(short_tmp, loop)
        try:
            await player.until(lambda: player.idents, "a connection")
            for step, following in zip(sequence["steps"], [*sequence["steps"][1:], {}], strict=True):
                await player.play(step, following)
            await player.end()
        finally:
            await player.close()

    run(scene)


def test_each_sequence_names_a_section_of_the_document() -> None:
    headings = re.findall(r"^##+ (.*)$", (SCHEMAS / "PROTOCOL.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {sequence["section"] for sequence in SEQUENCES} <= set(headings)
    assert len({sequence["name"] for sequence in SEQUENCES}) == len(SEQUENCES)


def test_what_the_broker_says_in_them_is_what_the_structs_take() -> None:
    kinds: dict[str, type[Any]] = {"error": ErrorPayload, "event": AgentEvent}
    for sequence in RECORDED["sequences"]:
        for said in (step["broker"] for step in sequence["steps"] if "broker" in step):
            frame = decode(encode_value(said))
            if (kind := kinds.get(frame.type)) is not None:
                from_raw(frame.payload, kind)
