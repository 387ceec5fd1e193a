"""The sequences of a client in schemas/vectors/sequences.json: our own link keeps each of them, frame by frame."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from schemas.codec import decode, encode_value, from_raw, to_raw
from schemas.frames import AgentEvent, ErrorPayload, Frame, ReplyTo
from schemas.peer import Greet, Late, LinkRefused, Peer, Reply, Settled, Welcomed

SCHEMAS = Path(__file__).parent.parent.parent / "schemas"
SEQUENCES: list[dict[str, Any]] = json.loads((SCHEMAS / "vectors" / "sequences.json").read_text())["sequences"]
STEPS = {"broker", "client", "do", "passes", "lost", "told", "over"}


class Player:
    """A link that is played a sequence: what it sends and says must be what the steps say, and nothing else."""

    def __init__(self) -> None:
        self.peer = Peer("token", "inc")
        self.now = 0.0
        self.sent: list[bytes] = []
        self.told: list[dict[str, Any]] = []
        self.over: str | None = None
        self.names: dict[str, str] = {}

    def play(self, step: dict[str, Any]) -> None:
        if "broker" in step:
            self._hear(decode(encode_value(self._filled(step["broker"]))))
        elif "client" in step:
            assert self.sent, f"nothing was sent in place of {step['client']}"
            self._match(step["client"], _plain(decode(self.sent.pop(0))))
        elif "passes" in step:
            assert not self.sent
            self.now += step["passes"] / 1000
            settled, greets = self.peer.tick(self.now)
            for one in settled:
                self._settle(one)
            if greets:
                self.sent.append(self.peer.hello([], [], self.now))
            self._flush()
        elif "lost" in step:
            assert not self.sent
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
        self._flush()

    def _hear(self, frame: Frame) -> None:
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
    for step in sequence["steps"]:
        assert len(step.keys() & STEPS) == 1
        player.play(step)
    assert (player.sent, player.told) == ([], []), "more was sent or said than the sequence has"


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
