"""The sequences of a client in schemas/vectors/sequences.json: our own link keeps each of them, frame by frame."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from schemas import peer
from schemas.codec import decode, encode_value, from_raw, to_raw
from schemas.frames import AgentEvent, ErrorPayload, Frame, ReplyTo, Welcome
from schemas.link import Link
from schemas.peer import Greet, Late, LinkRefused, Peer, Reply, Settled, Welcomed
from schemas.transport import TRANSPORTS, VARIABLE

SCHEMAS = Path(__file__).parent.parent.parent / "schemas"
SEQUENCES: list[dict[str, Any]] = json.loads((SCHEMAS / "vectors" / "sequences.json").read_text())["sequences"]
STEPS = {"broker", "client", "do", "passes", "lost", "anew", "told", "over"}
#: How often the link looks at its times. What the sequences say of times are multiples of it.
TICK_MS = 100


class Player:
    """A link that is played a sequence: what it sends and says must be what the steps say, and nothing else."""

    def __init__(self) -> None:
        self.peer = Peer("token", "inc")
        self.ms = 0
        self.heard_at = 0.0
        self.anew = self.expects_ping = False
        self.sent: list[bytes] = []
        self.told: list[dict[str, Any]] = []
        self.over: str | None = None
        self.names: dict[str, str] = {}

    @property
    def now(self) -> float:
        return self.ms / 1000

    def play(self, step: dict[str, Any], following: dict[str, Any]) -> None:
        self.expects_ping = following.get("client", {}).get("type") == "ping"
        if "broker" in step:
            self._hear(decode(encode_value(self._filled(step["broker"]))))
        elif "client" in step:
            assert self.sent, f"nothing was sent in place of {step['client']}"
            self._match(step["client"], _plain(decode(self.sent.pop(0))))
        elif "passes" in step:
            assert not self.sent and not self.anew
            for _ in range(step["passes"] // TICK_MS):
                self.ms += TICK_MS
                self._tick()
        elif "lost" in step:
            assert not self.sent
            self.peer.lost()
        elif "anew" in step:
            assert self.anew
            self.anew = False
            self.peer.lost()
        elif "told" in step:
            assert self.told.pop(0) == step["told"]
        elif "over" in step:
            assert self.over == step["over"]
        else:
            self._do(step)

    def _do(self, step: dict[str, Any]) -> None:
        name = step["eventId"]
        if step["do"] == "cancel":
            frame = Frame("admin", payload=to_raw({"op": "cancel", "eventId": name}))
            data = self.peer.submit("post", frame, "cancel", self.now)
        else:
            event = AgentEvent(id=name, type="user.message", created_at="2026-11-24T09:30:00Z", input=step["text"])
            frame = Frame("event", to=step["to"], instance_key=step["instanceKey"], event_id=name)
            frame.reply_to, frame.live = ReplyTo("client", step["correlationId"]), step.get("live", False)
            frame.deadline_ms, frame.payload = step.get("deadlineMs"), to_raw(event)
            data = self.peer.submit("ask", frame, name, self.now)
        if data is not None:
            self.sent.append(data)
        self._tick()

    def _tick(self) -> None:
        settled, greets = self.peer.tick(self.now)
        for one in settled:
            self._settle(one)
        if greets:
            self.sent.append(self.peer.hello([], [], self.now))
        self._flush()
        silence = self.peer.silence(self.heard_at, self.now)
        self.anew = self.anew or silence == "connect"
        if silence == "ping" and self.peer.phase == "ready":
            if self.expects_ping:
                self.sent.append(encode_value(Frame("ping")))
            else:
                self._hear(Frame("pong"))

    def _hear(self, frame: Frame) -> None:
        self.heard_at = self.now
        outcome = self.peer.receive(frame, self.now)
        if isinstance(outcome, Greet):
            self.sent.append(self.peer.hello([], [], self.now))
        elif isinstance(outcome, Settled):
            self._settle(outcome)
        elif isinstance(outcome, Reply | Late):
            self.sent.append(outcome.data)
        elif isinstance(outcome, LinkRefused):
            self.over = outcome.error.code
        if isinstance(outcome, Welcomed) or not isinstance(outcome, Greet):
            self._flush()

    def _settle(self, settled: Settled) -> None:
        said: dict[str, Any] = {"eventId": settled.entry.waiter}
        if settled.reply is not None:
            self.sent.append(settled.reply)
        if settled.error is not None:
            said["error"] = settled.error.code
        elif settled.frame is not None and settled.frame.type == "event":
            answer = from_raw(settled.frame.payload, AgentEvent).answer
            assert answer is not None
            said |= {"failed": answer.error.code} if answer.error is not None else {"response": answer.response}
        elif settled.frame is not None:
            said["state"] = from_raw(settled.frame.payload, dict)["state"]
        self.told.append(said)

    def _flush(self) -> None:
        while (entry := self.peer.sendable(self.now)) is not None:
            self.sent.append(entry.data)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(item) for key, item in value.items()}
        return self.names[value] if isinstance(value, str) and value.startswith("$") else value

    def _match(self, wanted: Any, got: Any) -> None:
        """What is sent may have more fields than the step names. `$name` is the client's choice, the same each time."""
        if isinstance(wanted, dict):
            assert isinstance(got, dict)
            for key, value in wanted.items():
                self._match(value, got.get(key))
        elif isinstance(wanted, str) and wanted.startswith("$"):
            assert self.names.setdefault(wanted, got) == got
        else:
            assert wanted == got


def _plain(frame: Frame) -> Any:
    plain = from_raw(encode_value(frame), dict)
    return {key: value for key, value in plain.items() if value is not None}


@pytest.mark.parametrize("sequence", SEQUENCES, ids=[sequence["name"] for sequence in SEQUENCES])
def test_our_link_keeps_the_sequence(sequence: dict[str, Any]) -> None:
    player = Player()
    for step, following in zip(sequence["steps"], [*sequence["steps"][1:], {}], strict=True):
        assert len(step.keys() & STEPS) == 1
        player.play(step, following)
    assert (player.sent, player.told, player.anew) == ([], [], False), "more was sent or said than the sequence has"


def test_each_sequence_names_a_section_of_the_document() -> None:
    headings = re.findall(r"^##+ (.*)$", (SCHEMAS / "PROTOCOL.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {sequence["section"] for sequence in SEQUENCES} <= set(headings)
    assert len({sequence["name"] for sequence in SEQUENCES}) == len(SEQUENCES)


def test_what_the_broker_says_in_them_is_what_the_structs_take() -> None:
    kinds: dict[str, type[Any]] = {"error": ErrorPayload, "event": AgentEvent}
    for sequence in SEQUENCES:
        for said in (step["broker"] for step in sequence["steps"] if "broker" in step):
            frame = decode(encode_value(said))
            if (kind := kinds.get(frame.type)) is not None:
                from_raw(frame.payload, kind)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_silent_link_is_connected_anew_on_each_transport(
    transport: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of silence, with sockets: five seconds are half a second here."""
    monkeypatch.setenv(VARIABLE, transport)
    monkeypatch.setattr(peer, "SILENCE_S", 0.5)
    hello = Frame("error", payload=to_raw(ErrorPayload("E_HELLO_REQUIRED", "say hello")))
    welcome = Welcome(version=1, principal="client/1", broker="b", credit=4, max_frame=1 << 20)
    endpoint = f"ipc://{short_tmp}/r.sock"
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER, socket_class=zmq.asyncio.Socket) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoint)
        link = Link(endpoint, "token", on_frame=lambda _: None)
        starting = asyncio.ensure_future(link.start())
        asked: asyncio.Future[Frame] | None = None
        connections: list[bytes] = []
        events: list[str] = []
        pings, ident = 0, b""
        async with asyncio.timeout(30):
            while len(events) < 3:
                ident, data = await router.recv_multipart()
                frame = decode(data) if data else None
                if frame is None:  # the probe of a new connection
                    connections.append(ident)
                    await router.send_multipart([ident, encode_value(hello)])
                elif frame.type == "hello":
                    said = Frame("welcome", in_reply_to=frame.id, payload=to_raw(welcome))
                    await router.send_multipart([ident, encode_value(said)])
                    await asyncio.wait_for(asyncio.shield(starting), 10)
                    if asked is None:
                        await asyncio.sleep(1.2)  # nothing is unanswered
                        assert not await router.poll(0)
                        asked = link.ask(
                            Frame("event", to="a", instance_key="k", event_id="e", reply_to=ReplyTo("client", "q"))
                        )
                elif frame.type == "ping":
                    assert frame.id == ""
                    pings += 1
                    if pings == 1:
                        await router.send_multipart([ident, encode_value(Frame("pong"))])
                    if pings == 3:  # as a broker that has lost the connection
                        await router.send_multipart([ident, encode_value(hello)])
                else:
                    events.append(frame.id)
            answer = Frame("event", id="b.1", event_id="e:answer", in_reply_to="q")
            await router.send_multipart([ident, encode_value(answer)])
            assert asked is not None and (await asked).event_id == "e:answer"
        # Pinged and answered; pinged and connected anew; pinged and asked for hello on the same connection.
        assert len(connections) == 2 and len(set(connections)) == 2 and len(set(events)) == 1
        assert pings == 3
        await link.close(0)
