"""Calls that wait for a person, in the broker: what they are bound to, who decides, how often they run, and how many
there may be: docs/approvals.md, "What happens to a call" and "Who may answer".
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw, structs

from goondan.features.approvals.broker import decisions
from goondan.features.approvals.broker import items as every_item
from goondan.features.approvals.broker.decisions import digest_of
from goondan.features.approvals.wire import MAX_ARGS_BYTES, ApprovalAsk
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import Blob, Frame, ToolCallPayload
from tests.features.approvals.waiting import RM, answered, decide, items, ran, result, waiting, working
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, answer, code_of

CODER = {"agent": "coder", "instanceKey": "k"}

# --- one call


def test_an_approved_call_runs_once_and_is_what_was_shown() -> None:
    bench, client, agent, host = waiting()
    (item,) = items(client)
    assert (item["id"], item["tool"], item["args"], item["agent"]) == ("t1/c1", "bash__exec", RM, "coder")
    assert (item["eventId"], item["rootEvent"], item["state"]) == ("e1", "e1", "waits")
    assert item["digest"] == digest_of("bash__exec", item["workdir"], encode_value(RM))
    assert decide(client, id=item["code"])["state"] == "approved"
    (news,) = agent.take("approval.news")
    assert news.calls == ["t1/c1"]
    agent.call(RM)
    (call,) = host.take("tool.call")
    assert not call.attach
    assert from_raw(from_raw(call.payload, ToolCallPayload).args, dict) == RM
    agent.call(RM)  # the agent reconnected, or speaks for itself
    (again,) = host.take("tool.call")
    assert again.attach, "a host that has forgotten the call must not start it"
    result(host, again)
    agent.ack("result", calls=["t1/c1"])
    agent.call(RM)
    assert host.take("tool.call")[0].attach
    assert items(client) == []
    assert [one["state"] for one in items(client, all=True)] == ["started"]


def test_an_approval_is_bound_to_tool_working_directory_and_arguments() -> None:
    args = encode_value(RM)
    digest = digest_of("bash__exec", "/work", args)
    assert digest_of("bash__exec", "/work", args) == digest
    assert digest_of("bash__script", "/work", args) != digest
    assert digest_of("bash__exec", "/elsewhere", args) != digest
    assert digest_of("bash__exec", "/work", encode_value({"command": "rm -rf build/"})) != digest


#: Calls that are not `RM`.
OTHERS: list[Any] = [
    {"command": "rm -rf /"},
    {"command": "rm -rf build", "cwd": "/"},
    {"command": "rm -rf build "},
    {"command": ["rm -rf build"]},
    {"command": "rm -rf build", "timeoutMs": None},
    {"Command": "rm -rf build"},
    {},
    {"command": "rm -rf buil\u0064\u0301"},
]


@pytest.mark.parametrize("when", ["waiting", "approved", "started"])
def test_another_call_under_the_same_id_is_refused(when: str) -> None:
    _, client, agent, host = waiting()
    if when != "waiting":
        decide(client)
    if when == "started":
        agent.call(RM)
        host.take()
    for other in OTHERS:
        assert code_of(agent.call(other)) == "E_APPROVAL_MISMATCH", other
    assert ran(host) == 0
    if when == "approved":
        agent.call(RM)
        assert ran(host) == 1, "the approved call itself may run still"


def test_numbers_that_python_takes_for_the_same() -> None:
    for approved, made in (({"n": 1}, {"n": True}), ({"n": 0}, {"n": False}), ({"n": "1"}, {"n": 1})):
        _, client, agent, host = waiting(args=approved)
        decide(client)
        assert code_of(agent.call(made)) == "E_APPROVAL_MISMATCH", made
        assert ran(host) == 0


def test_a_denied_call_is_a_result_with_the_reason() -> None:
    bench, client, agent, host = waiting()
    decide(client, "no", reason="use the other folder")
    (refused,) = [frame for frame in agent.call(RM) if frame.type == "tool.result"]
    error = from_raw(refused.payload, dict)["error"]
    assert error["code"] == "E_APPROVAL_DENIED"
    assert "use the other folder" in error["message"]
    assert not host.take("tool.call")
    agent.ack("done", payload=answer())
    assert bench.items == {}


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


def test_what_is_shown_and_what_runs_cannot_differ_by_encoding() -> None:
    """A key twice: one reader takes the first value, another one the last."""
    config = {"rules": [{"tools": ["bash__*"], "action": "ask", "when": {"args.command": {"startsWith": "rm"}}}]}
    bench, client, agent, host = waiting(config)

    def twice(first: str, last: str) -> Raw:
        pairs = b"".join(encode_value(text) for text in ("command", first, "command", last))
        return to_raw(ToolCallPayload(args=Raw(b"\x82" + pairs), turn_id="t1", tool_call_id="c2"))

    agent.call({}, "t1/c2", payload=twice("rm x", "ls"))
    (call,) = host.take("tool.call")
    assert bytes(from_raw(call.payload, ToolCallPayload).args) == encode_value({"command": "ls"})
    assert code_of(agent.call({}, "t1/c3", payload=twice("ls", "rm x"))) == "E_APPROVAL_WAITS"


def test_large_arguments_are_shown_although_the_message_of_their_call_repeats_them() -> None:
    _, client, agent, _ = working()
    args = encode_value({"command": f"rm {'[' * (MAX_ARGS_BYTES - 100)}"})
    call = ToolCallPayload(args=Raw(args), turn_id="t1", tool_call_id="c1", message_id="m1", message=Raw(args))
    assert code_of(agent.call({}, payload=to_raw(call))) == "E_APPROVAL_WAITS"
    (item,) = items(client)
    assert item["digest"] == digest_of("bash__exec", item["workdir"], args)


@pytest.mark.parametrize(
    ("rule", "code"), [("ask", "E_APPROVAL_DENIED"), ("deny", "E_APPROVAL_DENIED"), ("allow", None)]
)
def test_arguments_that_nobody_is_shown_are_denied_where_a_rule_would_ask(rule: str, code: str | None) -> None:
    _, client, agent, host = working({"rules": [{"tools": ["bash__*"], "action": rule}]})
    assert code_of(agent.call({"command": "x" * MAX_ARGS_BYTES})) == code
    blob = Blob("0" * 32, "1" * 64, 2_000_000)
    assert code_of(agent.call({}, "t1/c3", blob=blob, payload=Raw(b"\xc0"))) == code
    assert code_of(agent.call({}, "t1/c4", payload=to_raw({"args": 1}))) == (code and "E_FRAME_INVALID")
    assert ran(host) == (3 if code is None else 0)
    assert items(client) == []


def test_a_call_that_is_made_once_more_has_an_id_of_its_own_and_is_asked_about_once_more() -> None:
    """What an agent does with an idempotent call whose outcome is unknown (agentproc/calls/caller.py)."""
    _, client, agent, host = working()
    agent.call(RM)
    decide(client)
    agent.call(RM)
    assert len(host.take("tool.call")) == 1
    assert code_of(agent.call(RM, "t1/c1~2")) == "E_APPROVAL_WAITS"
    assert host.take("tool.call") == []
    assert [item["id"] for item in items(client)] == ["t1/c1~2"]


# --- who decides


def test_only_operators_decide() -> None:
    bench, client, agent, host = waiting()
    other = bench.client(operator=False)
    for op in ("approve.list", "approve.show", "approve.watch", "approve.answer"):
        assert other.admin(op=op, id="t1/c1", decision="yes")["code"] == "E_FRAME_INVALID"
    for peer in (agent, host):
        for kind in ("admin", "approval.news", "approval.answer"):
            frames = peer.say(Frame(kind, payload=to_raw({"op": "approve.answer", "id": "t1/c1", "decision": "yes"})))
            assert code_of(frames) == "E_FRAME_TYPE"
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    assert [item["state"] for item in items(client)] == ["waits"]


def test_an_approval_is_nobody_elses() -> None:
    """Another agent, and another instance, are each asked about anew, or refused."""
    bench, client, agent, host = waiting()
    decide(client)
    for event, who in (("e2", {"agent": "reviewer", "key": "k"}), ("e3", {"agent": "coder", "key": "other"})):
        bench.ask(client, event, **who)
        other = bench.agent(who["agent"], who["key"])
        other.take()
        assert code_of(other.call(RM, event=event)) in ("E_APPROVAL_WAITS", "E_APPROVAL_MISMATCH")
    assert ran(host) == 0
    agent.call(RM)
    assert ran(host) == 1


@pytest.mark.parametrize(("first", "second"), [("yes", "no"), ("no", "yes"), ("yes", "yes"), ("no", "no")])
def test_the_first_decision_counts_and_stands_in_the_audit(first: str, second: str) -> None:
    bench, client, agent, host = waiting()
    state = {"yes": "approved", "no": "denied"}[first]
    assert decide(client, first)["state"] == state
    told = decide(client, second)
    assert told.get("state", told["code"]) == (state if first == second else "E_APPROVAL_DECIDED")
    (line,) = bench.router.bus.notices
    (item,) = items(client, all=True)
    assert item["code"] in line and f"{state} by uid 1000" in line and item["digest"] in line and "coder/k" in line
    assert item["uid"] == 1000
    agent.call(RM)
    assert ran(host) == (first == "yes")


def test_no_rubbish_is_an_answer() -> None:
    ids: list[Any] = [None, "", "t1", "t1/c2", "T1/C1", "t1/c1 ", "*", "../t1/c1", 5, True, ["t1/c1"], "x" * 100_000]
    decisions: list[Any] = [None, "", "YES", "maybe", "approve", True, 1, [], {"yes": True}, "yes\n"]
    _, client, agent, host = waiting()
    assert decide(client, id="t1/c9")["code"] == "E_APPROVAL_NOT_FOUND"
    for asked in (*({"id": one} for one in ids), *({"decision": one} for one in decisions)):
        assert str(decide(client, **asked).get("code", "")).startswith("E_"), asked
    assert [item["state"] for item in items(client)] == ["waits"]
    agent.call(RM)
    assert ran(host) == 0
    assert decide(client)["state"] == "approved"


@pytest.mark.parametrize("reason", [5, ["x"], {"a": 1}, "x" * 200_000, "a\x00b\x1b[31m", "거절", ""])
def test_reasons_of_every_kind(reason: Any) -> None:
    _, client, agent, host = waiting()
    told = decide(client, "no", reason=reason)
    if "state" not in told:
        assert told["code"].startswith("E_")
        assert decide(client, "no")["state"] == "denied"
    assert [code_of(agent.call(RM)) for _ in range(2)] == ["E_APPROVAL_DENIED"] * 2
    assert ran(host) == 0
    assert len(answered(client)) == 1


def test_who_has_decided_is_kept_after_the_turn_and_is_the_owner_of_the_token() -> None:
    bench, client, agent, _ = waiting()
    (item,) = items(client)
    decide(client, "no", reason="not today", uid=0, by="root")  # what a client says of itself does not count
    agent.call(RM)
    agent.ack("done", payload=answer())
    assert items(client, all=True) == []
    (kept,) = answered(client)
    assert {name: kept[name] for name in ("code", "id", "agent", "instanceKey", "eventId", "tool", "digest")} == {
        name: item[name] for name in ("code", "id", "agent", "instanceKey", "eventId", "tool", "digest")
    }
    assert (kept["how"], kept["uid"], kept["reason"], kept["what"]) == (
        "denied", 1000, "not today", '{"command":"rm -rf build"}',
    )  # fmt: skip
    assert kept["askedMs"] <= kept["decidedMs"]
    bench.restart()
    assert answered(bench.client()) == [kept]


@pytest.mark.parametrize("restarts", [False, True])
def test_what_nobody_answers_in_time_is_denied_by_the_kernel(restarts: bool) -> None:
    bench, client, agent, host = waiting()
    agent.ack("park")
    bench.later(3595)
    assert len(items(client)) == 1
    if restarts:
        bench.restart()
        client, host = bench.client(), bench.host()
    bench.later(10)
    assert items(client) == []
    assert decide(client).get("state") != "approved"
    agent = bench.agent() if restarts else agent
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED"
    assert ran(host) == 0
    (kept,) = answered(client)
    assert (kept["how"], kept.get("uid"), kept["reason"]) == ("denied", None, "nobody answered in time")
    (line,) = bench.router.bus.notices
    assert "denied by the kernel" in line and "coder/k bash__exec t1/c1" in line


def test_the_history_is_bounded_and_has_no_keys_and_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_KEPT", 3)
    bench, client, agent, _ = waiting()
    model = structs.replace(bench.plan.agents["coder"].model, api_key="sk-very-secret-key")
    coder = structs.replace(bench.plan.agents["coder"], model=model)
    bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, "coder": coder})
    bench.restart()
    client, agent = bench.client(), bench.agent()
    agent.take()
    decide(client)
    for number in range(4):
        agent.call({"command": f"curl -H sk-very-secret-key {number}"}, f"t1/s{number}")
        decide(client, "no", f"t1/s{number}", reason="it has sk-very-secret-key in it " + "x" * 3000)
    asked = to_raw(ApprovalAsk(kind="question", args=to_raw({}), message="What is the password?"))
    frame = Frame("approval.ask", event_id="e1", call_id="q", tool="t", payload=asked)
    frame.epoch = bench.instance("coder").epoch
    agent.say(frame)
    decide(client, "answer", "q", answer={"password": "hunter2"})
    kept = answered(client)
    assert [one["id"] for one in kept] == ["t1/s2", "t1/s3", "q"]
    text = str(kept)
    assert "sk-very-secret-key" not in text
    assert "hunter2" not in text
    assert len(text) < 5000
    assert kept[-1]["what"] == "What is the password?"
    bench.restart()
    assert answered(bench.client()) == kept, "what was forgotten is not in the journal"


def test_watchers_hear_that_the_list_has_changed() -> None:
    bench, client, agent, _ = waiting()
    client.admin(op="approve.watch")
    agent.call({"command": "b"}, "t1/c2")
    assert len(client.take("approval.news")) == 1
    decide(client)
    client.take()
    agent.ack("done", payload=answer())
    assert client.take("approval.news"), "withdrawn with its turn"


def test_a_deleted_instance_takes_its_items_with_it() -> None:
    bench, client, agent, _ = working()
    agent.call(RM)
    agent.ack("park")
    bench.later(RETURN_S)  # a broker that has just started deletes nothing
    agent.ack("park")
    client.say(Frame("admin", payload=to_raw({**CODER, "op": "instance.delete", "force": True})))
    assert items(client, all=True) == []
    assert not [row for row in bench.journal.rows() if row.subject.startswith("approval:")]


@pytest.mark.feature("live_config")
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


# --- calls of the agent's own, and questions


def local(agent: Peer, kind: str = "approval", call_id: str = "t1/c7", **more: Any) -> Any:
    epoch = agent.bench.instance(*agent.who).epoch
    ask = Frame("approval.ask", tool="bash__deploy", call_id=call_id, event_id="e1", epoch=epoch)
    ask.payload = to_raw(ApprovalAsk(kind=kind, args=to_raw({"where": "x"}), **more))  # type: ignore[arg-type]
    for frame in agent.say(ask):
        if frame.type in ("reply", "error"):
            return from_raw(frame.payload, dict)
    return None


def test_a_call_that_runs_in_the_agent_is_asked_about_and_used_once() -> None:
    bench, client, agent, _ = waiting()
    assert local(agent) == {"state": "waits"}
    decide(client, id="t1/c7")
    assert agent.take("approval.news")[0].calls == ["t1/c7"]
    assert local(agent) == {"state": "run"}
    assert local(agent) == {"state": "run", "again": True}
    assert local(agent, call_id="t1/c8") == {"state": "waits"}
    decide(client, "no", id="t1/c8", reason="later")
    assert local(agent, call_id="t1/c8") == {"state": "denied", "reason": "later"}


def test_a_question_is_answered_with_a_value() -> None:
    bench, client, agent, _ = waiting()
    question: dict[str, Any] = {"message": "Your name?", "schema": to_raw({"type": "string"})}
    assert local(agent, "question", **question) == {"state": "waits"}
    item = next(one for one in items(client) if one["kind"] == "question")
    assert (item["message"], item["schema"]) == ("Your name?", {"type": "string"})
    assert decide(client, id=item["code"])["code"] == "E_USAGE"
    assert decide(client, "answer", id=item["code"], answer="Kim")["state"] == "answered"
    assert local(agent, "question", **question) == {"state": "answered", "answer": "Kim"}
    other: dict[str, Any] = {**question, "message": "Your password?"}
    assert local(agent, "question", **other)["code"] == "E_APPROVAL_MISMATCH"


FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"type": "string", "enum": ["s", "l"]}, "n": {"type": "integer"}},
    "required": ["size"],
}


def test_an_answer_has_to_fit_the_schema_of_its_question() -> None:
    bench, client, agent, _ = waiting()
    assert local(agent, "question", message="How large?", schema=to_raw(FORM)) == {"state": "waits"}
    code = next(one["code"] for one in items(client) if one["kind"] == "question")
    for wrong, issue in (({"size": "xl"}, "answer.size"), ({}, "answer.size"), ({"size": "s", "n": "1"}, "answer.n")):
        refused = decide(client, "answer", id=code, answer=wrong)
        assert refused["code"] == "E_USAGE"
        assert f"the answer does not fit the question: {issue}" in refused["message"]
    assert decide(client, "answer", id=code, answer="s")["code"] == "E_USAGE"
    assert decide(client, "answer", id=code, answer={"size": "s", "n": 1})["state"] == "answered"


def test_the_schema_of_a_question_is_one_and_costs_little() -> None:
    bench, client, agent, _ = waiting()
    dear: dict[str, Any] = {"$ref": "#/$defs/a0", "$defs": {"a40": {"type": "string"}}}
    for n in range(40):
        dear["$defs"][f"a{n}"] = {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]}
    for schema in ({"type": "strng"}, {"$ref": "http://example.org/x"}, dear, "none"):
        assert local(agent, "question", message="?", schema=to_raw(schema))["code"] == "E_CONFIG_SCHEMA"
    assert [one["kind"] for one in items(client)] == ["approval"]


def test_a_question_that_nobody_waits_for_is_withdrawn() -> None:
    bench, client, agent, _ = waiting()
    question: dict[str, Any] = {"message": "How large?", "schema": to_raw(FORM)}
    local(agent, "question", **question)
    told = {"state": "denied", "reason": "the call that asked has ended"}
    assert local(agent, "question", over=True) == told
    assert [one["kind"] for one in items(client)] == ["approval"]
    assert local(agent, "question", **question) == {**told, "expired": True}
    assert local(agent, "question", call_id="t1/unknown", over=True) == told
    assert local(agent, "approval", call_id="t1/c1", over=True) == told  # which is no question, and stays
    assert [one["kind"] for one in items(client)] == ["approval"]


def test_a_question_of_a_call_stops_the_clock_of_its_tool_host() -> None:
    bench = Bench({"rules": [{"tools": ["file-system__*"], "action": "ask"}]})
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.call({})
    (call,) = host.take("tool.call")
    question: dict[str, Any] = {"message": "How large?", "schema": to_raw(FORM)}
    local(agent, "question", call_id=f"{call.call_id}?1", **question)
    assert [(one.call_id, one.stage) for one in host.take("clock")] == [(call.call_id, "held")]
    local(agent, "question", call_id=f"{call.call_id}?1", **question)  # another process asks the same again
    assert [one.stage for one in host.take("clock")] == ["held"]
    decide(client, "answer", id=items(client)[0]["code"], answer={"size": "s"})
    assert [(one.call_id, one.stage) for one in host.take("clock")] == [(call.call_id, "runs")]


def test_an_agent_that_no_rule_concerns_is_not_looked_at() -> None:
    bench = Bench({"rules": [{"tools": ["file-system__*"], "action": "ask"}]})
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    payload = Raw(msgspec.msgpack.encode("no payload of a call at all"))
    agent.call({}, payload=payload)
    assert [bytes(call.payload) for call in host.take("tool.call")] == [bytes(payload)]
