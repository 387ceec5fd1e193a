"""The sequences of schemas/vectors/sequences.json: the client's machine keeps each of them, frame by frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan_client.errors import GoondanError
from goondan_client.frames import AgentEvent, decode, encode, opened
from goondan_client.machine import Effect, Entry, Machine

VECTORS = Path(__file__).parents[3] / "schemas" / "vectors"
SEQUENCES: list[dict[str, Any]] = json.loads((VECTORS / "sequences.json").read_text())["sequences"]
#: The same of earlier minors of the protocol.
FROZEN: list[dict[str, Any]] = [
    {**sequence, "name": f"{minor.name}: {sequence['name']}"}
    for minor in sorted((VECTORS.parents[1] / "tests" / "frozen").iterdir())
    for sequence in json.loads((minor / "sequences.json").read_text())["sequences"]
]
#: How often the shell looks at times (milliseconds).
TICK_MS = 100


class Player:
    def __init__(self) -> None:
        self.machine = Machine("inc")
        self.machine.connected(0.0)
        self.ms = 0
        self.anew = self.expects_ping = False
        self.told: list[dict[str, Any]] = []
        self.over: str | None = None
        self.names: dict[str, str] = {}

    @property
    def now(self) -> float:
        return self.ms / 1000

    def play(self, step: dict[str, Any], following: dict[str, Any]) -> None:
        self.expects_ping = following.get("client", {}).get("type") == "ping"
        sent = self.machine.outgoing
        if "broker" in step:
            self._hear(encode(self._filled(step["broker"])))
        elif "client" in step:
            assert sent, f"nothing was sent in place of {step['client']}"
            self._match(step["client"], msgspec.msgpack.decode(sent.popleft()))
        elif "passes" in step:
            assert not sent and not self.anew
            for _ in range(step["passes"] // TICK_MS):
                self.ms += TICK_MS
                self._perform(self.machine.tick(self.now))
                if sent and not self.expects_ping and decode(sent[-1]).type == "ping":
                    sent.pop()
                    self._hear(encode({"type": "pong"}))
        elif "lost" in step:
            assert not sent
            self.machine.lost()
        elif "anew" in step:
            assert self.anew
            self.anew = False
        elif "told" in step:
            assert self.told.pop(0) == step["told"]
        elif "over" in step:
            assert self.over == step["over"]
        else:
            self._do(step)

    def _do(self, step: dict[str, Any]) -> None:
        name, deadline = step["eventId"], step.get("deadlineMs")
        if step["do"] == "cancel":
            entry = Entry({"type": "admin", "payload": {"op": "cancel", "eventId": name}}, "cancel")
        else:
            payload = {"id": name, "type": "user.message", "createdAt": "2026-11-24T09:30:00Z", "input": step["text"]}
            frame = {"type": "event", "to": step["to"], "instanceKey": step["instanceKey"], "eventId": name}
            frame |= {"replyTo": {"target": "client", "correlationId": step["correlationId"]}, "payload": payload}
            frame |= {"live": True} if step.get("live") else {}
            entry = Entry(frame, name, None if deadline is None else self.now + deadline / 1000 + 1.0)
        self.machine.submit(entry, self.now)

    def _hear(self, data: bytes) -> None:
        effect = self.machine.receive(decode(data), self.now)
        self._perform([] if effect is None else [effect])

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if effect.what == "greet":
                self.machine.hello("token", self.now)
            elif effect.what == "connect":
                self.anew = True
            elif effect.what == "over" and effect.error is not None:
                self.over = effect.error.code
            elif effect.what == "done":
                self._settle(effect)

    def _settle(self, done: Effect) -> None:
        assert done.entry is not None
        said: dict[str, Any] = {"eventId": done.entry.waiter}
        if done.error is not None:
            said["error"] = done.error.code
        elif done.frame is not None and done.frame.type == "event":
            answer = opened(done.frame.payload, AgentEvent).answer
            assert answer is not None
            said |= {"failed": answer.error.code} if answer.error is not None else {"response": answer.text}
        elif done.frame is not None:
            said["state"] = opened(done.frame.payload, dict)["state"]
        self.told.append(said)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(item) for key, item in value.items()}
        return self.names[value] if isinstance(value, str) and value.startswith("$") else value

    def _match(self, wanted: Any, got: Any) -> None:
        if isinstance(wanted, dict):
            assert isinstance(got, dict)
            for key, value in wanted.items():
                self._match(value, got.get(key))
        elif isinstance(wanted, str) and wanted.startswith("$"):
            assert self.names.setdefault(wanted, got) == got
        else:
            assert wanted == got


@pytest.mark.parametrize("sequence", SEQUENCES + FROZEN, ids=lambda sequence: sequence["name"])
def test_the_machine_keeps_the_sequence(sequence: dict[str, Any]) -> None:
    player = Player()
    steps = sequence["steps"]
    for step, following in zip(steps, [*steps[1:], {}], strict=True):
        player.play(step, following)
    assert (list(player.machine.outgoing), player.told, player.anew) == ([], [], False), "more was sent or said"


def test_a_request_after_the_end_is_refused() -> None:
    machine = Machine("inc")
    machine.close()
    with pytest.raises(GoondanError) as caught:
        machine.submit(Entry({"type": "admin"}, None), 0.0)
    assert caught.value.code == "E_LINK_CLOSED"
