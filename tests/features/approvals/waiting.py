"""Calls that wait for a person, in the broker: a turn that makes one, its items, and the answers of people."""

from __future__ import annotations

from typing import Any

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, code_of

RM = {"command": "rm -rf build"}


def working(config: dict[str, Any] = ASK, **fields: Any) -> tuple[Bench, Peer, Peer, Peer]:
    """A bench whose agent has a turn: with its client, agent and tool host."""
    bench = Bench(config)
    client, host = bench.client(), bench.host()
    bench.ask(client, **fields)
    agent = bench.agent()
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    return bench, client, agent, host


def waiting(config: dict[str, Any] = ASK, args: Any = RM, **fields: Any) -> tuple[Bench, Peer, Peer, Peer]:
    """A bench whose call waits for a person."""
    bench, client, agent, host = working(config, **fields)
    assert code_of(agent.call(args)) == "E_APPROVAL_WAITS"
    assert not host.take("tool.call"), "nothing runs before a person has said yes"
    return bench, client, agent, host


def items(client: Peer, **asked: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.admin(op="approve.list", **asked)["items"]
    return found


def answered(client: Peer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.admin(op="approve.list", answered=True)["answered"]
    return found


def decide(client: Peer, decision: Any = "yes", id: Any = "t1/c1", **more: Any) -> Any:
    return client.admin(op="approve.answer", id=id, decision=decision, **more)


def result(host: Peer, call: Frame) -> None:
    payload = to_raw({"status": "ok", "output": "ran"})
    host.say(Frame("tool.result", call_id=call.call_id, payload=payload))


def ran(host: Peer) -> int:
    """How many calls have come to the tool host."""
    return len(host.take("tool.call"))
