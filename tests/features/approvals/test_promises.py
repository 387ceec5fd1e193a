"""Sentences of docs/approvals.md that no other test shows, one test for each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from goondan.features.approvals.broker import items as every_item
from goondan.features.approvals.broker.item import digest_of
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, code_of

RM = {"command": "rm -rf build"}
CODER = {"agent": "coder", "instanceKey": "k"}


def working(config: dict[str, Any] = ASK) -> tuple[Bench, Peer, Peer, Peer]:
    """A bench whose agent has a turn: with its client, agent and tool host."""
    bench = Bench(config)
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.take()
    return bench, client, agent, host


def items(client: Peer, **asked: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.admin(op="approve.list", **asked)["items"]
    return found


def decide(client: Peer, decision: str, id: str) -> None:
    told = client.admin(op="approve.answer", id=id, decision=decision)
    assert told.get("state") in ("approved", "denied"), told


def test_an_approval_is_bound_to_tool_working_directory_and_arguments() -> None:
    args = encode_value(RM)
    digest = digest_of("bash__exec", "/work", args)
    assert digest_of("bash__exec", "/work", args) == digest
    assert digest_of("bash__script", "/work", args) != digest
    assert digest_of("bash__exec", "/elsewhere", args) != digest
    assert digest_of("bash__exec", "/work", encode_value({"command": "rm -rf build/"})) != digest


def test_the_item_holds_the_digest_of_what_was_asked() -> None:
    _, client, agent, _ = working()
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    (item,) = items(client)
    assert item["digest"] == digest_of("bash__exec", item["workdir"], encode_value(RM))


def test_a_person_reads_the_reason_of_a_rule_and_so_does_the_model_of_a_denied_call() -> None:
    rules = [
        {"tools": ["bash__*"], "when": {"args.command": {"equals": "deploy"}}, "action": "deny", "reason": "not here"},
        {"tools": ["bash__*"], "action": "ask", "reason": "it may delete"},
    ]
    _, client, agent, _ = working({"rules": rules})
    (refused,) = [frame for frame in agent.call({"command": "deploy"}, "t1/c2") if frame.type == "tool.result"]
    assert "not here" in from_raw(refused.payload, dict)["error"]["message"]
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    assert [item["reason"] for item in items(client)] == ["it may delete"]


@pytest.mark.parametrize(
    ("rule", "code"), [("ask", "E_APPROVAL_DENIED"), ("deny", "E_APPROVAL_DENIED"), ("allow", None)]
)
def test_arguments_that_nobody_is_shown_are_denied_where_a_rule_would_ask(rule: str, code: str | None) -> None:
    _, client, agent, host = working({"rules": [{"tools": ["bash__*"], "action": rule}]})
    assert code_of(agent.call({"command": "x" * (300 << 10)})) == code
    assert len(host.take("tool.call")) == (code is None)
    assert items(client) == []


def test_a_call_that_is_made_once_more_has_an_id_of_its_own_and_is_asked_about_once_more() -> None:
    """What an agent does with an idempotent call whose outcome is unknown (agentproc/calls/caller.py)."""
    _, client, agent, host = working()
    agent.call(RM)
    decide(client, "yes", "t1/c1")
    agent.call(RM)
    assert len(host.take("tool.call")) == 1
    assert code_of(agent.call(RM, "t1/c1~2")) == "E_APPROVAL_WAITS"
    assert host.take("tool.call") == []
    assert [item["id"] for item in items(client)] == ["t1/c1~2"]


def test_the_log_has_a_line_for_what_the_kernel_denied() -> None:
    bench, _, agent, _ = working()
    agent.call(RM)
    bench.later(3601)
    (line,) = bench.router.bus.notices
    assert "denied by the kernel" in line
    assert "coder/k bash__exec t1/c1" in line


def test_a_deleted_instance_takes_its_items_with_it() -> None:
    bench, client, agent, _ = working()
    agent.call(RM)
    agent.ack("park")
    bench.later(RETURN_S)  # a broker that has just started deletes nothing
    agent.ack("park")
    client.say(Frame("admin", payload=to_raw({**CODER, "op": "instance.delete", "force": True})))
    assert items(client, all=True) == []
    assert not [row for row in bench.journal.rows() if row.subject.startswith("approval:")]


def test_a_live_change_does_not_change_the_rules() -> None:
    """Not even an operator's, that takes the extension out of the configuration."""
    bench = Bench()
    resource = {"kind": "Extension", "metadata": {"name": "approval"}, "spec": {}}
    gate = ExtensionSpec(name="approval", entry="/b/@goondan/base/approval", resource=resource, config=ASK)
    coder = structs.replace(bench.plan.agents["coder"], extensions=[gate])
    bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, "coder": coder})
    bench.restart()
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.take()
    patches = [{"op": "remove", "path": "/extensions/0"}]
    told = client.admin(**CODER, op="config.propose", id="o1", patches=patches)
    assert told["status"] == "accepted", told
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    assert host.take("tool.call") == []


def test_a_turn_has_so_many_items_and_decided_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_item, "MAX_OF_EVENT", 3)
    _, client, agent, host = working()
    for at in range(3):
        assert code_of(agent.call(RM, f"t1/c{at}")) == "E_APPROVAL_WAITS"
        decide(client, "no", f"t1/c{at}")
    assert items(client) == []
    assert code_of(agent.call(RM, "t1/c3")) == "E_TOOL_LIMIT"
    assert host.take("tool.call") == []


def test_the_items_of_a_turn_have_so_many_bytes_and_decided_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"command": "x" * 1000}
    monkeypatch.setattr(every_item, "MAX_BYTES_OF_EVENT", 2 * len(encode_value(args)))
    _, client, agent, _ = working()
    for at in range(2):
        assert code_of(agent.call(args, f"t1/c{at}")) == "E_APPROVAL_WAITS"
        decide(client, "no", f"t1/c{at}")
    assert code_of(agent.call(args, "t1/c2")) == "E_TOOL_LIMIT"


@pytest.mark.parametrize(("limit", "value"), [("MAX_ITEMS", 40), ("MAX_ITEM_BYTES", 40 * 1100)])
def test_a_turn_that_has_its_share_of_all_items_gets_no_more_until_one_is_decided(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(every_item, limit, value)
    _, client, agent, _ = working()
    args = {"command": "x" * 1000}
    codes = [code_of(agent.call(args, f"t1/c{at}")) for at in range(41)]
    waiting = codes.count("E_APPROVAL_WAITS")
    assert 5 < waiting < 40
    assert codes == ["E_APPROVAL_WAITS"] * waiting + ["E_TOOL_LIMIT"] * (41 - waiting)
    decide(client, "no", "t1/c0")
    assert code_of(agent.call(args, "t1/more")) == "E_APPROVAL_WAITS"
    assert code_of(agent.call(args, "t1/too-many")) == "E_TOOL_LIMIT"
