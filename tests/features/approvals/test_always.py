"""Lasting yeses, in the broker: which later calls they are for, what wins over them, and how they end:
docs/approvals.md, "Always".
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from goondan.features.approvals.broker import always as lasting
from goondan.features.approvals.broker import items as every_item
from goondan.features.approvals.wire import ApprovalAsk
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from tests.features.approvals.waiting import RM, answered, decide, items, ran, result, waiting, working
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, answer, code_of, rules

TOUCH = {"command": "touch a", "cwd": "src"}
TOUCHES = {"command": "touch "}


def listed(client: Peer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.admin(op="approve.list", always=True)["always"]
    return found


def agreed(args: Any = RM, pattern: dict[str, str] | None = None) -> tuple[Bench, Peer, Peer, Peer, str]:
    """A bench with a call that a person has agreed to for always, and has run; the code of the yes."""
    bench, client, agent, host = waiting(args=args)
    assert decide(client, always=pattern or {})["state"] == "approved"
    agent.call(args)
    (call,) = host.take("tool.call")
    result(host, call)
    agent.take()
    (yes,) = listed(client)
    return bench, client, agent, host, yes["code"]


def ruled(bench: Bench, config: dict[str, Any]) -> None:
    """The bundle has other rules now."""
    coder = structs.replace(bench.plan.agents["coder"], parts=rules(config))
    bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, "coder": coder})


def test_a_later_call_with_the_same_arguments_runs_and_its_record_says_by_which_yes() -> None:
    bench, client, agent, host, code = agreed()
    assert code_of(agent.call(RM, "t1/c2")) is None
    (call,) = host.take("tool.call")
    assert (call.call_id, call.attach) == ("t1/c2", False)
    (item,) = [one for one in items(client, all=True) if one["id"] == "t1/c2"]
    assert (item["state"], item["always"], item["uid"]) == ("started", code, 1000)
    assert f"approved by uid 1000, always ({code}): coder/k bash__exec t1/c2 sha256:" in bench.router.bus.notices[-1]
    agent.call(RM, "t1/c2")
    assert host.take("tool.call")[0].attach, "it runs once, as each approved call does"
    assert items(client) == [], "nobody is asked"
    (kept,) = answered(client)
    assert (kept["id"], kept["always"]) == ("t1/c1", code)


def test_it_needs_no_room_among_what_waits_and_its_turn_is_told_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_item, "MAX_ITEMS", 8)
    _, client, agent, host, _ = agreed()
    codes = [code_of(agent.call({"command": f"other {at}"}, f"t1/o{at}")) for at in range(8)]
    assert codes[-1] == "E_TOOL_LIMIT"
    agent.call(RM, "t1/c2")
    assert ran(host) == 1
    agent.take()
    decide(client, "no", "t1/o0")
    assert [news.calls for news in agent.take("approval.news")] == [["t1/o0"]]


OTHERS: list[tuple[Any, dict[str, str] | None, Any]] = [
    (RM, None, {"command": "rm -rf build "}),
    (RM, None, {"command": "rm -rf build", "cwd": "/"}),
    (RM, None, {}),
    ({"n": 1}, None, {"n": True}),
    (TOUCH, TOUCHES, {"command": "touch b"}),
    (TOUCH, TOUCHES, {"command": "touch b", "cwd": "/"}),
    (TOUCH, TOUCHES, {"command": "touch", "cwd": "src"}),
    (TOUCH, TOUCHES, {"command": ["touch b"], "cwd": "src"}),
    (TOUCH, TOUCHES, {"cwd": "src"}),
]


@pytest.mark.parametrize(("first", "pattern", "other"), OTHERS)
def test_another_call_asks(first: Any, pattern: dict[str, str] | None, other: Any) -> None:
    _, client, agent, host, _ = agreed(first, pattern)
    assert code_of(agent.call(other, "t1/c2")) == "E_APPROVAL_WAITS"
    assert ran(host) == 0
    assert [item["id"] for item in items(client)] == ["t1/c2"]


def test_a_pattern_leaves_the_end_of_one_text_open() -> None:
    _, client, agent, host, _ = agreed(TOUCH, TOUCHES)
    for at, command in enumerate(("touch b", "touch ", "touch b; rm -rf .")):  # what the document warns of
        agent.call({"command": command, "cwd": "src"}, f"t1/p{at}")
    assert ran(host) == 3
    (yes,) = listed(client)
    assert (yes["argument"], yes["prefix"]) == ("command", "touch ")


@pytest.mark.parametrize(
    "pattern",
    [
        {"command": ""},
        {"": "touch"},
        {"command": "rm"},
        {"n": "1"},
        {"none": "x"},
        {"command": "touch ", "cwd": "s"},
        {"command": 1},
    ],
)
def test_a_pattern_that_does_not_fit_the_call_is_refused_and_nothing_is_decided(pattern: Any) -> None:
    _, client, _, _ = waiting(args={**TOUCH, "n": 1})
    assert decide(client, always=pattern)["code"] in ("E_USAGE", "E_FRAME_INVALID")
    assert ([item["state"] for item in items(client)], listed(client)) == (["waits"], [])


def test_it_is_for_one_agent_one_tool_and_no_question() -> None:
    bench, client, agent, host, _ = agreed()
    bench.ask(client, "e2", agent="reviewer", key="k")
    reviewer = bench.agent("reviewer")
    reviewer.take()
    assert code_of(reviewer.call(RM, event="e2")) == "E_APPROVAL_WAITS"
    asks = [
        ("bash__script", "approval", "waits"),
        ("bash__exec", "question", "waits"),
        ("bash__exec", "approval", "run"),
    ]
    for at, (tool, kind, state) in enumerate(asks):
        more = {"message": "?", "schema": to_raw({})} if kind == "question" else {}
        asked = ApprovalAsk(kind=kind, args=to_raw(RM), **more)  # type: ignore[arg-type]
        frame = Frame("approval.ask", tool=tool, call_id=f"t1/q{at}", event_id="e1", payload=to_raw(asked))
        frame.epoch = bench.instance("coder").epoch
        said = [one for one in agent.say(frame) if one.type == "reply"]
        assert [state in bytes(one.payload).decode("latin-1") for one in said] == [True], (tool, kind)
    question = next(item for item in items(client) if item["kind"] == "question")
    assert decide(client, "answer", question["code"], answer=1, always={})["code"] == "E_USAGE"
    assert decide(client, "no", "t1/q0", always={})["code"] == "E_USAGE"
    assert ran(host) == 0


def test_other_instances_of_the_agent_have_it_and_their_items_end_with_their_turns() -> None:
    bench, client, _, host, _ = agreed()
    bench.ask(client, "e2", key="other")
    other = bench.agent("coder", "other")
    other.take()
    other.call(RM, event="e2")
    assert ran(host) == 1
    other.ack("done", "e2", payload=answer())
    assert [item["instanceKey"] for item in items(client, all=True)] == ["k"]


DENY = {"tools": ["bash__*"], "when": {"args.command": {"startsWith": "rm"}}, "action": "deny"}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"rules": [DENY, *ASK["rules"]]}, "E_APPROVAL_DENIED"),
        ({"rules": [{**ASK["rules"][0], "action": "deny", "expiresAfter": None}]}, "E_APPROVAL_DENIED"),
        ({"rules": [{**ASK["rules"][0], "reason": "it is dangerous"}]}, "E_APPROVAL_WAITS"),
        ({"default": "ask"}, "E_APPROVAL_WAITS"),
        ({"rules": [{"tools": ["file-system__*"], "action": "allow"}, *ASK["rules"]]}, None),
    ],
)
def test_a_changed_rule_wins(config: dict[str, Any], code: str | None) -> None:
    bench, client, _, _, _ = agreed()
    cleaned = [{key: value for key, value in rule.items() if value is not None} for rule in config.get("rules", [])]
    ruled(bench, {**config, "rules": cleaned})
    bench.restart()
    client, agent, host = bench.client(), bench.agent(), bench.host()
    agent.take()
    assert code_of(agent.call(RM, "t1/c2")) == code
    assert ran(host) == (code is None)
    assert [yes.get("stale", False) for yes in listed(client)] == [config.get("rules", [])[-1:] != ASK["rules"]]


def test_a_yes_to_one_policy_is_none_to_another_that_asks_too() -> None:
    bench, client, _, _, _ = agreed()
    (part,) = from_raw(rules(ASK)["approvals"], list[Any])
    coder = structs.replace(
        bench.plan.agents["coder"], parts={"approvals": to_raw([part, {**part, "name": "stricter"}])}
    )
    bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, "coder": coder})
    bench.restart()
    client, agent, host = bench.client(), bench.agent(), bench.host()
    agent.take()
    assert code_of(agent.call(RM, "t1/c2")) == "E_APPROVAL_WAITS"
    assert decide(client, id="t1/c2", always={})["state"] == "approved"
    agent.call(RM, "t1/c2")
    agent.call(RM, "t1/c3")
    assert ran(host) == 2, "the second yes is for both"
    assert [yes.get("stale", False) for yes in listed(client)] == [False, False]


def test_a_call_cannot_pass_for_a_lasting_yes_by_its_id() -> None:
    bench, client, agent, _, code = agreed()
    agent.call({"command": "other"}, code)
    said = client.admin(op="approve.show", id=code)
    assert (said["code"], "agent" in said) == ("E_USAGE", False), "whose token it takes is judged by this answer"
    assert decide(client, "revoke", code)["state"] == "revoked"
    assert client.admin(op="approve.show", id=code)["id"] == code


def test_no_lasting_yes_is_made_when_the_rules_do_not_ask_any_more() -> None:
    bench, client, _, _ = waiting()
    ruled(bench, {"rules": [DENY]})
    bench.restart()
    client = bench.client()
    assert decide(client, always={})["code"] == "E_STATE_CONFLICT"
    assert listed(client) == []


def test_taken_back_it_is_gone_and_the_next_call_asks() -> None:
    bench, client, agent, host, code = agreed()
    assert bench.client(operator=False).admin(op="approve.answer", id=code, decision="revoke")["code"].startswith("E_")
    assert client.admin(op="approve.show", id=code)["agent"] == "coder"
    client.admin(op="approve.watch")
    told = decide(client, "revoke", code)
    assert told["state"] == "revoked"
    assert f"always ({code}) revoked by uid 1000: coder bash__exec" in bench.router.bus.notices[-1]
    assert decide(client, "revoke", code)["code"] == "E_APPROVAL_NOT_FOUND"
    assert code_of(agent.call(RM, "t1/c2")) == "E_APPROVAL_WAITS"
    bench.restart()
    client = bench.client()
    assert listed(client) == []
    decide(client, id="t1/c2", always={})
    assert [yes["code"] for yes in listed(client)] == [code], "agreed to anew"
    bench.restart()
    assert [yes["code"] for yes in listed(bench.client())] == [code]


def test_it_survives_a_kill_and_is_made_once() -> None:
    bench, client, _, _, code = agreed()
    assert decide(client, always={})["state"] == "approved", "the answer was lost, and it is said again"
    assert decide(client)["code"] == "E_APPROVAL_DECIDED", "another decision"
    before = listed(client)
    bench.restart()
    client, agent, host = bench.client(), bench.agent(), bench.host()
    agent.take()
    assert listed(client) == before
    agent.call(RM, "t1/c2")
    assert ran(host) == 1
    bench.restart()
    assert [item["always"] for item in items(bench.client(), all=True)] == [code, code]


def test_a_kill_before_the_journal_has_it_leaves_the_question_and_no_yes() -> None:
    bench, client, agent, host = waiting()
    bench.lost_writes = True
    client.say(Frame("admin", payload=to_raw({"op": "approve.answer", "id": "t1/c1", "decision": "yes", "always": {}})))
    bench.lost_writes = False
    bench.restart()
    client = bench.client()
    assert (listed(client), [item["state"] for item in items(client)]) == ([], ["waits"])


def test_without_room_on_the_disk_the_call_does_not_run() -> None:
    bench, client, agent, host, _ = agreed()
    bench.full = True
    assert code_of(agent.call(RM, "t1/c2")) == "E_DISK_FULL"
    bench.full = False
    assert ran(host) == 0
    agent.call(RM, "t1/c2")
    assert ran(host) == 1


def test_there_are_so_many_and_their_texts_have_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "MAX_ALWAYS", 2)
    bench, client, agent, _ = working()
    model = structs.replace(bench.plan.agents["coder"].model, api_key="sk-very-secret-key")
    coder = structs.replace(bench.plan.agents["coder"], model=model)
    bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, "coder": coder})
    bench.restart()
    client, agent = bench.client(), bench.agent()
    agent.take()
    for at in range(3):
        agent.call({"command": f"curl -H sk-very-secret-key {at}"}, f"t1/s{at}")
    said = [decide(client, id=f"t1/s{at}", always={}).get("state") for at in range(2)]
    assert said == ["approved", "approved"]
    assert decide(client, id="t1/s2", always={})["code"] == "E_TOOL_LIMIT"
    assert [item["state"] for item in items(client)] == ["waits"]
    assert len(listed(client)) == 2
    assert "sk-very-secret-key" not in str(listed(client))
    assert "curl -H" in listed(client)[0]["what"]
