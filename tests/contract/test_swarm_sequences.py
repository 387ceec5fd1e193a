"""The sequences of a swarm in schemas/vectors/sequences.json: the broker keeps each of them, frame by frame."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.frames import Frame, Lease
from tests.unit.kernel.broker.approving import ASK, Bench, Peer

SCHEMAS = Path(__file__).parent.parent.parent / "schemas"
SEQUENCES: list[dict[str, Any]] = json.loads((SCHEMAS / "vectors" / "sequences.json").read_text())["swarmSequences"]
#: A sequence that needs a feature.
DECIDED = "a person decides about a call, and it runs once"


class Player:
    """A broker, and everybody else as the steps say. Calls of `reviewer` wait for a person."""

    def __init__(self) -> None:
        self.bench = Bench(ASK, agents=("reviewer",))
        self.peers: dict[str, Peer] = {}
        self.names: dict[str, Any] = {}

    def play(self, step: dict[str, Any]) -> None:
        if "joins" in step:
            self._join(step["joins"], self.filled(step.get("leases", [])))
        elif "says" in step:
            peer, data = self.peers[step["says"]], encode_value(self.filled(step["frame"]))
            bench = self.bench
            bench.router.receive(bench.router.bus.presence.connections[peer.cls][peer.ident], data, bench.now)
            bench.flush()
        elif "hears" in step:
            waiting = self.waiting(step["hears"])
            assert waiting, f"nothing came in place of {step['frame']}"
            self.match(step["frame"], plain(waiting[0]))
            self.peers[step["hears"]].got.remove(waiting[0])
        elif "passes" in step:
            self.bench.later(step["passes"] / 1000)
        else:
            assert step == {"restarted": True}
            self.quiet()
            self.bench.restart()
            self.peers.clear()

    def _join(self, who: str, leases: list[dict[str, Any]]) -> None:
        agent, _, key = who.partition("/")
        held = msgspec.convert(leases, list[Lease])
        bench = self.bench
        peer = bench.agent(agent, key, held) if key else bench.client() if who == "client" else bench.host()
        welcome, *_ = peer.take("welcome")
        assert welcome.in_reply_to == "h"
        self.peers[who] = peer

    def waiting(self, who: str) -> list[Frame]:
        return [frame for frame in self.peers[who].got if frame.type != "ping"]

    def quiet(self) -> None:
        for who in self.peers:
            assert [plain(frame) for frame in self.waiting(who)] == [], f"{who} hears more than the sequence has"

    def filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        return self.names[value] if isinstance(value, str) and value.startswith("$") else value

    def match(self, wanted: Any, got: Any) -> None:
        """What comes may have more fields than the step names."""
        if isinstance(wanted, dict):
            assert isinstance(got, dict), got
            for key, value in wanted.items():
                self.match(value, got.get(key))
        elif isinstance(wanted, str) and wanted.startswith("$"):
            assert got is not None and self.names.setdefault(wanted, got) == got
        else:
            assert wanted == got


def plain(frame: Frame) -> Any:
    fields = msgspec.msgpack.decode(encode_value(frame))
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    "name",
    [
        *(sequence["name"] for sequence in SEQUENCES if sequence["name"] != DECIDED),
        pytest.param(DECIDED, marks=pytest.mark.feature("approvals")),
    ],
)
def test_the_broker_keeps_the_sequence(name: str) -> None:
    player = Player()
    (sequence,) = [sequence for sequence in SEQUENCES if sequence["name"] == name]
    for step in sequence["steps"]:
        player.play(step)
    player.quiet()


def test_each_sequence_names_a_section_of_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in SCHEMAS.glob("PROTOCOL*.md"))
    headings = re.findall(r"^##+ (.*)$", pages, re.MULTILINE)
    assert {sequence["section"] for sequence in SEQUENCES} <= set(headings)
