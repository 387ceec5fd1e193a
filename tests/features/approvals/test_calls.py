"""Calls that wait for a person, in the broker: what they are bound to, who decides, how often they run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw, structs

from goondan.features.approvals.broker import decisions
from goondan.features.approvals.broker.items import MAX_ITEMS
from goondan.features.approvals.wire import MAX_ARGS_BYTES, ApprovalAsk
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Blob, Frame, Lease, ReplyTo, ToolCallPayload
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, answer, code_of

RM = {"command": "rm -rf build"}


def waiting(config: dict[str, Any] = ASK, **fields: Any) -> tuple[Bench, Peer, Peer, Peer]:
    """A bench whose call waits for a person: with its client, agent and tool host."""
    bench = Bench(config)
    client, host = bench.client(), bench.host()
    bench.ask(client, **fields)
    agent = bench.agent()
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    assert not host.take("tool.call"), "nothing runs before a person has said yes"
    return bench, client, agent, host


def items(client: Peer, **asked: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.admin(op="approve.list", **asked)["items"]
    return found


def decide(client: Peer, decision: str = "yes", id: str = "t1/c1", **more: Any) -> Any:
    return client.admin(op="approve.answer", id=id, decision=decision, **more)


def result(host: Peer, call: Frame) -> None:
    payload = to_raw({"status": "ok", "output": "ran"})
    host.say(Frame("tool.result", call_id=call.call_id, payload=payload))


# --- one call


def test_an_approved_call_runs_once_and_is_what_was_shown() -> None:
    bench, client, agent, host = waiting()
    (item,) = items(client)
    assert (item["id"], item["tool"], item["args"], item["agent"]) == ("t1/c1", "bash__exec", RM, "coder")
    assert (item["eventId"], item["rootEvent"], item["state"]) == ("e1", "e1", "waits")
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


@pytest.mark.parametrize("when", ["waiting", "approved", "started"])
@pytest.mark.parametrize("other", [{"command": "rm -rf /"}, {"command": "rm -rf build", "cwd": "/"}])
def test_another_call_under_the_same_id_is_refused(when: str, other: dict[str, Any]) -> None:
    _, client, agent, host = waiting()
    if when != "waiting":
        decide(client)
    if when == "started":
        agent.call(RM)
        host.take()
    assert code_of(agent.call(other)) == "E_APPROVAL_MISMATCH"
    assert not host.take("tool.call")
    if when == "approved":
        agent.call(RM)
        assert len(host.take("tool.call")) == 1, "the approved call itself may run still"


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


def test_arguments_decide_and_the_first_rule_that_fits() -> None:
    config = {
        "rules": [
            {"tools": ["bash__*"], "action": "allow", "when": {"args.command": {"equals": "ls"}}},
            {
                "tools": ["bash__*"],
                "action": "deny",
                "when": {"args.command": {"contains": "sudo"}},
                "reason": "no root",
            },
            {"tools": ["bash__*"], "action": "ask"},
        ]
    }
    bench, client, agent, host = waiting(config)
    agent.call({"command": "ls"}, "t1/c2")
    assert [call.call_id for call in host.take("tool.call")] == ["t1/c2"]
    assert code_of(agent.call({"command": "sudo ls"}, "t1/c3")) == "E_APPROVAL_DENIED"
    assert code_of(agent.call({"command": "ls -l"}, "t1/c4")) == "E_APPROVAL_WAITS"
    assert [item["id"] for item in items(client)] == ["t1/c1", "t1/c4"]


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


def test_what_nobody_can_be_shown_does_not_run() -> None:
    _, client, agent, host = waiting()
    assert code_of(agent.call({"command": "x" * MAX_ARGS_BYTES}, "t1/c2")) == "E_APPROVAL_DENIED"
    blob = Blob("0" * 32, "1" * 64, 2_000_000)
    assert code_of(agent.call({}, "t1/c3", blob=blob, payload=Raw(b"\xc0"))) == "E_APPROVAL_DENIED"
    assert code_of(agent.call({}, "t1/c4", payload=to_raw({"args": 1}))) == "E_FRAME_INVALID"
    assert not host.take("tool.call")
    assert len(items(client)) == 1


# --- who decides


def test_only_operators_decide() -> None:
    bench, client, agent, host = waiting()
    other = bench.client(operator=False)
    for op in ("approve.list", "approve.show", "approve.watch", "approve.answer"):
        assert other.admin(op=op, id="t1/c1", decision="yes")["code"] == "E_FRAME_INVALID"
    for peer in (agent, host):
        frames = peer.say(Frame("admin", payload=to_raw({"op": "approve.answer", "id": "t1/c1", "decision": "yes"})))
        assert code_of(frames) == "E_FRAME_TYPE"
    news = Frame("approval.news", event_id="e1", calls=["t1/c1"])
    assert code_of(agent.say(news)) == "E_FRAME_TYPE"
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    assert [item["state"] for item in items(client)] == ["waits"]


def test_the_first_decision_counts_and_stands_in_the_audit() -> None:
    bench, client, _, _ = waiting()
    assert decide(client)["state"] == decide(client)["state"] == "approved"
    assert decide(client, "no")["code"] == "E_APPROVAL_DECIDED"
    assert decide(client, id="t1/c9")["code"] == "E_APPROVAL_NOT_FOUND"
    (line,) = bench.router.bus.notices
    (item,) = items(client, all=True)
    assert item["code"] in line and "approved by uid 1000" in line and item["digest"] in line and "coder/k" in line
    assert item["uid"] == 1000


def answered(client: Peer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.admin(op="approve.list", answered=True)["answered"]
    return found


def test_who_has_decided_is_kept_after_the_turn_and_is_the_owner_of_the_token() -> None:
    bench, client, agent, _ = waiting()
    (item,) = items(client)
    decide(client, "no", reason="not today", uid=0)  # what a client says of itself does not count
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


def test_what_nobody_answered_was_decided_by_the_kernel() -> None:
    bench, _, _, _ = waiting()
    bench.later(3601)
    (kept,) = answered(bench.client())
    assert (kept["how"], kept.get("uid"), kept["reason"]) == ("denied", None, "nobody answered in time")


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


def test_what_has_expired_is_denied() -> None:
    bench, client, agent, _ = waiting()
    agent.ack("park")
    bench.later(3599)
    assert items(client)
    bench.later(2)
    assert items(client) == []
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED"


def test_watchers_hear_that_the_list_has_changed() -> None:
    bench, client, agent, _ = waiting()
    client.admin(op="approve.watch")
    agent.call({"command": "b"}, "t1/c2")
    assert len(client.take("approval.news")) == 1
    decide(client)
    client.take()
    agent.ack("done", payload=answer())
    assert client.take("approval.news"), "withdrawn with its turn"


# --- parked turns


def test_a_parked_turn_needs_no_process_and_comes_back_when_decided() -> None:
    bench, client, agent, host = waiting()
    places = bench.router.bus.mailbox.places
    agent.ack("park")
    assert not places.pool.held
    bench.ask(client, "e2")
    assert not agent.take("event"), "newer messages wait behind it"
    (why,) = client.admin(op="why")["waits"]
    assert (why["kind"], why["agent"], why["messages"], why["tools"]) == ("approval", "coder", 1, ["bash__exec"])
    asked = f"(gdn approve: {why['items'][0]})"
    assert why["text"] == f"waits for a person to approve 1 call of bash__exec {asked}; 1 message behind it"
    assert [frame.type for frame in agent.say(Frame("bye"))] == ["reply"], "its process may leave"
    decide(client)
    agent = bench.agent()
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    agent.call(RM)
    (call,) = host.take("tool.call")
    result(host, call)
    assert [frame.event_id for frame in agent.ack("done", payload=answer()) if frame.type == "event"] == ["e2"]


def test_a_decision_that_crosses_the_parking_is_not_lost() -> None:
    _, client, agent, _ = waiting()
    decide(client)
    agent.take()
    agent.ack("park")
    agent.say(Frame("ping"))
    assert bench_event(agent) is not None


def bench_event(agent: Peer) -> str | None:
    leased = agent.bench.instance(*agent.who).leased
    return None if leased is None else str(leased.id)


def test_each_decision_brings_the_turn_further_and_none_makes_it_spin() -> None:
    bench, client, agent, host = waiting()
    agent.call({"command": "b"}, "t1/c2")
    agent.ack("park")
    decide(client, "no")
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED"
    assert code_of(agent.call({"command": "b"}, "t1/c2")) == "E_APPROVAL_WAITS"
    agent.ack("park")
    for _ in range(5):
        bench.later(1)
    assert not agent.take("event"), "what it was told already does not bring it back"
    decide(client, id="t1/c2")
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]


def test_a_holder_that_dies_while_a_person_is_asked_costs_no_attempt() -> None:
    bench, client, agent, _ = waiting()
    instance = bench.instance("coder")
    for _ in range(7):
        bench.router.unreachable(1, agent.ident, bench.now)
        bench.flush()
        assert instance.leased is None
    assert instance.queue[0].work.attempts == 0
    decide(client)
    agent = bench.agent()
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]


def test_a_cancelled_turn_withdraws_what_it_waits_for() -> None:
    bench, client, agent, _ = waiting()
    agent.ack("park")
    assert client.admin(op="cancel", eventId="e1")["state"] == "cancelled"
    assert bench.items == {}
    assert items(client) == []
    assert decide(client)["code"] == "E_APPROVAL_NOT_FOUND"
    assert not [row for row in bench.journal.rows() if row.subject.startswith("approval:")]
    bench.ask(client, "e2")
    assert [frame.event_id for frame in agent.take("event")] == ["e2"]


def test_no_turn_can_bury_a_person_in_items() -> None:
    _, client, agent, _ = waiting()
    codes = [code_of(agent.call({"command": str(at)}, f"t1/x{at}")) for at in range(MAX_ITEMS)]
    assert codes[0] == "E_APPROVAL_WAITS"
    assert codes[-1] == "E_TOOL_LIMIT"
    assert codes.count("E_APPROVAL_WAITS") < MAX_ITEMS * 2 / 3


def test_a_full_disk_asks_nobody() -> None:
    bench, client, agent, _ = waiting()
    bench.full = True
    assert code_of(agent.call({"command": "b"}, "t1/c2")) == "E_DISK_FULL"
    assert len(items(client)) == 1
    decide(client)  # ends of what is there are always written
    assert items(client) == []


# --- restarts


@pytest.mark.parametrize("dies", ["asked", "approved", "started"])
def test_what_a_broker_knew_the_next_one_knows(dies: str) -> None:
    bench, client, agent, host = waiting()
    agent.ack("park")
    if dies != "asked":
        decide(client)
    if dies == "started":
        agent.take()
        agent.call(RM)
        assert len(host.take("tool.call")) == 1
    bench.restart()
    client, host = bench.client(), bench.host()
    if dies == "asked":
        agent = bench.agent()
        assert not agent.take("event"), "it waits for a person, not for a process"
        assert [item["id"] for item in items(client)] == ["t1/c1"]
        decide(client)
    else:
        agent = bench.agent()
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    agent.call(RM, first_sent_ms=5)
    (call,) = host.take("tool.call") or (None,)
    if dies == "started":
        assert call is None, "it was passed on before: nobody knows what came of it"
    else:
        assert call is not None and not call.attach
        assert (call.first_sent_ms or 0) > 5, "it begins now, however old its message is"


def test_a_use_that_was_not_written_is_no_use() -> None:
    bench, client, agent, host = waiting()
    decide(client)
    bench.lost_writes = True
    agent.call(RM)
    assert not host.take("tool.call"), "the call waits for the journal"
    bench.lost_writes = False
    bench.restart()
    client, host = bench.client(), bench.host()
    agent = bench.agent()
    agent.take()
    agent.call(RM)
    assert [call.attach for call in host.take("tool.call")] == [False]


def test_a_started_call_attaches_to_the_host_that_lives() -> None:
    bench, client, agent, host = waiting()
    decide(client)
    agent.call(RM)
    assert len(host.take("tool.call")) == 1
    epoch = bench.instance("coder").epoch
    bench.restart()
    host.hello()
    agent.hello([Lease("e1", epoch, "k", "e1")])
    agent.call(RM, first_sent_ms=5)
    # the host of this test says that it began when it says hello, so its start is after the use: unknown, not run twice
    assert not [call for call in host.take("tool.call") if not call.attach]


# --- clocks


def swarm_of_two() -> tuple[Bench, Peer, Peer, Peer, Peer]:
    """`coder` has asked `reviewer` with 60 s, in a turn of 100 s; the reviewer's call waits for a person."""
    bench = Bench()
    client, host = bench.client(), bench.host()
    bench.ask(client, deadline_ms=100_000)
    coder, reviewer = bench.agent(), bench.agent("reviewer")
    coder.take()
    payload = to_raw(AgentEvent(id="q1", type="agent.request", created_at="now", input="x"))
    asked = Frame("event", to="reviewer", instance_key="k", event_id="q1", payload=payload, deadline_ms=60_000)
    asked.reply_to = ReplyTo("coder", "corr:q1")
    coder.say(asked)
    assert [frame.event_id for frame in reviewer.take("event")] == ["q1"]
    bench.later(10)
    client.take(), coder.take()
    assert code_of(reviewer.call(RM, event="q1")) == "E_APPROVAL_WAITS"
    return bench, client, coder, reviewer, host


def test_time_stands_still_for_the_turn_and_for_all_that_wait_for_it() -> None:
    bench, client, coder, reviewer, _ = swarm_of_two()
    told = {(frame.event_id, frame.in_reply_to, frame.stage) for frame in coder.take("clock")}
    assert told == {("q1", "corr:q1", "held"), ("e1", None, "held")}
    (heard,) = client.take("clock")
    assert (heard.event_id, heard.in_reply_to, heard.stage) == ("e1", "e1", "held")
    reviewer.ack("park", event="q1")
    said: list[Frame] = []
    for _ in range(243):  # more than the hour after which the item expires; a holder renews
        assert client.admin(op="events", agent="coder", instanceKey="k")["events"] == [
            {"eventId": "e1", "state": "leased"}
        ]
        bench.later(15)
        said += coder.ack("renew")
    assert items(client) == [], "decided by the kernel"
    left = {frame.in_reply_to: frame.deadline_ms for frame in said if frame.type == "clock"}
    assert left == {"corr:q1": 50_000, None: 90_000}, "the deadlines go on where they stood"


def test_a_short_pause_moves_the_deadline_too() -> None:
    bench, client, _, reviewer, _ = swarm_of_two()
    reviewer.ack("park", event="q1")
    bench.later(20)
    bench.router.bus.presence.drop(bench.instance("reviewer").conn)
    bench.instance("reviewer").conn = None
    decide(client)
    bench.later(49)
    assert client.admin(op="events", agent="reviewer", instanceKey="k")["events"], "its first deadline has passed"
    bench.later(2)
    assert client.admin(op="events", agent="reviewer", instanceKey="k")["events"] == []


def test_the_new_deadline_survives_the_broker() -> None:
    bench, client, coder, reviewer, _ = swarm_of_two()
    reviewer.ack("park", event="q1")
    bench.later(1000)
    decide(client)
    bench.restart()
    bench.later(30)
    client = bench.client()
    assert client.admin(op="events", agent="reviewer", instanceKey="k")["events"]
    bench.later(30)
    assert client.admin(op="events", agent="reviewer", instanceKey="k")["events"] == [], "50 s were left"


def test_a_deadline_that_passed_while_no_broker_ran_is_held_by_the_item() -> None:
    bench, client, _, reviewer, _ = swarm_of_two()
    reviewer.ack("park", event="q1")
    bench.now += 2000
    bench.restart()
    bench.later(5)
    client = bench.client()
    assert len(items(client)) == 1
    decide(client)
    bench.agent("reviewer")
    event = bench.instance("reviewer").leased
    assert 40 < event.deadline - bench.now <= 51


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
