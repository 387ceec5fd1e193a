"""Calls of scripts that wait for a person: one decision for some of them, and what is withdrawn with the script."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw, structs

from goondan.features.approvals.broker.decisions import COVERED, MAX_SCRIPT, Group, Item, ScriptDecisions, read_script
from goondan.features.approvals.command import item_lines
from goondan.features.approvals.wire import ApprovalAsk
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.schemas.bundle.launch import CatalogItem, SandboxSpec, ToolSpec
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import Frame, Lease, ToolCallPayload
from goondan.schemas.wire.questions import ToolAsk
from tests.features.approvals.waiting import decide, items, result
from tests.unit.kernel.broker.approving import ASK, Bench, code_of

SCRIPT = "t1/s"
CODE_TOOL = "code__run"
CODE = "for n in range(100):\n    tools.bash__exec(command=f'rm {n}')"
TWO: dict[str, Any] = {
    "rules": [
        {"tools": ["bash__*"], "when": {"args.command": {"startsWith": "rm"}}, "action": "ask"},
        {"tools": ["bash__*"], "when": {"args.command": {"startsWith": "mv"}}, "action": "ask"},
        {"tools": ["bash__*"], "when": {"args.command": {"startsWith": "dd"}}, "action": "deny", "reason": "never"},
    ]
}


class Scripted:
    """An agent in the middle of a script."""

    def __init__(self, config: dict[str, Any] = ASK, code: Any = CODE) -> None:
        self.bench = bench = Bench(config)
        coder = bench.plan.agents["coder"]
        coder = structs.replace(coder, registry=[*coder.registry, CatalogItem(name=CODE_TOOL)], addable=[CODE_TOOL])
        bench.plan.agents["coder"] = coder
        tool = ToolSpec(name="code", entry="/c", root="/c", exports=[], sandbox=SandboxSpec(permissions=["tools"]))
        bench.plan.toolhost.tools.append(tool)
        bench.router = bench._router()
        self.client, self.host = bench.client(), bench.host()
        bench.ask(self.client)
        self.agent = bench.agent()
        self.agent.take()
        self.begin(code)

    def begin(self, code: Any = CODE) -> None:
        payload = ToolCallPayload(args=to_raw({"language": "python", "code": code}), turn_id="t1", tool_call_id="s")
        frame = Frame("tool.call", tool=CODE_TOOL, call_id=SCRIPT, event_id="e1", payload=to_raw(payload))
        frame.epoch = self.bench.instance("coder").epoch
        self.agent.say(frame)
        (call,) = self.host.take("tool.call")
        assert call.tool == CODE_TOOL

    def ask(self, number: int = 1) -> list[Frame]:
        """The script asks its agent; what the tool host is told."""
        frame = Frame("tool.ask", call_id=SCRIPT, payload=to_raw(ToolAsk(number, "tool")))
        return self.host.say(frame)

    def call(self, number: int, command: str = "rm x", within: str | None = SCRIPT) -> str | None:
        """One call of the script: "ran", or the code of its error."""
        code = code_of(self.agent.call({"command": command}, f"{SCRIPT}>{number}", within=within))
        found = self.host.take("tool.call")
        if not found:
            return code
        (call,) = found
        assert call.within == within, "whose question the tool host may answer"
        result(self.host, call)
        self.agent.take()
        return "ran"

    def end(self) -> None:
        payload = to_raw({"status": "ok", "output": {"printed": ""}})
        self.host.say(Frame("tool.result", call_id=SCRIPT, payload=payload))


def test_a_yes_shows_the_script_and_is_for_twenty_calls_then_a_person_is_asked_again() -> None:
    script = Scripted()
    assert script.call(1) == "E_APPROVAL_WAITS"
    (item,) = items(script.client)
    assert (item["script"], item["covers"], item["args"]) == (CODE, COVERED, {"command": "rm x"})
    decide(script.client, id=f"{SCRIPT}>1")
    assert [script.call(number) for number in range(1, COVERED + 1)] == ["ran"] * COVERED
    assert script.call(COVERED + 1) == "E_APPROVAL_WAITS"
    (again,) = [item for item in items(script.client) if item["state"] == "waits"]
    assert again["id"] == f"{SCRIPT}>{COVERED + 1}"
    assert COVERED == 20


def test_a_person_reads_the_script_line_by_line() -> None:
    script = Scripted()
    script.call(1)
    text = "\n".join(item_lines(items(script.client)[0]))
    assert "│ script   ┊ for n in range(100):" in text
    assert "│          ┊     tools.bash__exec(" in text
    assert "│ covers   this call, and up to 19 more of this tool in this script that this rule is about" in text


def test_calls_that_come_while_a_person_is_asked_wait_for_the_same_decision() -> None:
    script = Scripted()
    codes = [script.call(number) for number in range(1, 6)]
    assert codes == ["E_APPROVAL_WAITS"] * 5
    assert len(items(script.client)) == 1
    decide(script.client, id=f"{SCRIPT}>1")
    assert [script.call(number) for number in (3, 2, 1, 5, 4)] == ["ran"] * 5


def test_calls_that_come_before_the_journal_has_the_item_are_told_with_it() -> None:
    script = Scripted()
    bench, epoch = script.bench, script.bench.instance("coder").epoch
    known = bench.router.bus.presence.connections[1][script.agent.ident]
    for number in (1, 2):
        payload = ToolCallPayload(args=to_raw({"command": "rm x"}), turn_id="t1", tool_call_id=f"s>{number}")
        frame = Frame("tool.call", id=f"f{number}", tool="bash__exec", call_id=f"{SCRIPT}>{number}", event_id="e1")
        frame.payload, frame.epoch, frame.within = to_raw(payload), epoch, SCRIPT
        bench.router.receive(known, encode_value(frame), bench.now)
    bench.flush()
    told = script.agent.take("error")
    assert sorted(str(frame.in_reply_to) for frame in told) == ["f1", "f2"]
    assert {from_raw(frame.payload, dict)["code"] for frame in told} == {"E_APPROVAL_WAITS"}


def test_a_no_is_for_all_such_calls_of_the_script() -> None:
    script = Scripted()
    script.call(1)
    decide(script.client, "no", id=f"{SCRIPT}>1", reason="not today")
    assert [script.call(number) for number in (1, 2, 30)] == ["E_APPROVAL_DENIED"] * 3
    assert len(items(script.client, all=True)) <= 1


def test_a_decision_is_for_one_tool_and_one_rule() -> None:
    script = Scripted(TWO)
    assert script.call(1, "rm x") == "E_APPROVAL_WAITS"
    decide(script.client, id=f"{SCRIPT}>1")
    assert script.call(1, "rm x") == "ran"
    assert script.call(2, "mv x y") == "E_APPROVAL_WAITS", "another rule"
    assert script.call(3, "dd x") == "E_APPROVAL_DENIED", "a rule that denies is above every yes"
    assert script.call(4, "rm y") == "ran"
    assert script.call(5, "ls") == "ran", "no rule is about it"


def test_a_yes_for_a_call_of_the_model_is_for_no_script_and_the_other_way_round() -> None:
    script = Scripted()
    assert script.call(1) == "E_APPROVAL_WAITS"
    decide(script.client, id=f"{SCRIPT}>1")
    assert script.call(1) == "ran"
    assert script.call(2, within=None) == "E_APPROVAL_WAITS"
    (item,) = [item for item in items(script.client) if item["state"] == "waits"]
    assert (item.get("script"), item.get("covers", 0)) == (None, 0)


def test_only_an_open_script_of_the_same_turn_may_be_named() -> None:
    script = Scripted(TWO)
    assert script.call(1, within="t1/other") == "E_OVERLOADED", "the broker is new: it may be on its way"
    script.bench.now += RETURN_S
    assert script.call(1, within="t1/other") == "E_FORBIDDEN"
    assert code_of(script.agent.call({"command": "ls"}, "t1/c7")) is None
    script.host.take()
    assert script.call(2, "ls", within="t1/c7") == "E_FORBIDDEN", "a call that is no script"
    other = script.bench
    other.ask(script.client, "e9", "reviewer")
    reviewer = other.agent("reviewer")
    reviewer.take()
    for command in ("ls", "rm x"):
        assert code_of(reviewer.call({"command": command}, "t9/c", "e9", within=SCRIPT)) == "E_FORBIDDEN"


def own_call(script: Scripted, within: str) -> str | None:
    """Ask about a call that is to run in the agent's process."""
    payload = to_raw(ApprovalAsk(args=Raw(encode_value({"command": "rm x"}))))
    frame = Frame("approval.ask", tool="bash__own", call_id="t1/x", event_id="e1", within=within, payload=payload)
    frame.epoch = script.bench.instance("coder").epoch
    return code_of(script.agent.say(frame))


def test_within_names_an_open_script_of_the_same_lease_or_the_call_is_refused() -> None:
    script = Scripted(TWO)
    script.bench.now += RETURN_S
    assert code_of(script.agent.call({"command": "ls"}, "t1/open")) is None
    script.host.take()
    for no_script in ("t1/never", "t1/open", ""):
        assert script.call(1, within=no_script) == "E_FORBIDDEN"
        assert own_call(script, no_script) == "E_FORBIDDEN"
    assert items(script.client) == []
    assert script.call(1) == "E_APPROVAL_WAITS"
    script.end()
    script.agent.take()
    assert script.call(2) == "E_FORBIDDEN", "it has ended"
    assert own_call(script, SCRIPT) == "E_FORBIDDEN"


def test_a_script_whose_tool_host_comes_back_may_be_named_as_soon_as_it_is_open_again() -> None:
    script = Scripted()
    script.bench.now += RETURN_S
    script.host.hello()
    script.agent.take()
    assert script.call(1) == "E_OVERLOADED", "its agent was just told to send it again"
    script.begin()
    assert script.call(1) == "E_APPROVAL_WAITS"


def test_with_the_script_what_it_has_asked_is_withdrawn_and_its_decisions_end() -> None:
    script = Scripted(TWO)
    script.ask()
    script.call(1, "rm x")
    decide(script.client, id=f"{SCRIPT}>1")
    assert script.call(1, "rm x") == "ran"
    script.call(2, "mv x y")
    script.end()
    assert [item["id"] for item in items(script.client) if item["state"] == "waits"] == []
    gone = script.client.admin(op="approve.answer", id=f"{SCRIPT}>2", decision="yes")
    assert gone["code"] == "E_APPROVAL_NOT_FOUND"
    standing = script.bench.instance("coder").leased.standing
    assert (standing.items, standing.inner, standing.holds, standing.unread) == (0, 0, 0, 0)
    script.bench.restart()
    assert not any(item.open for item in script.bench.items.values())


def test_the_turn_of_a_script_is_handed_over_and_its_question_withdrawn_when_it_is_given_up() -> None:
    script = Scripted()
    script.ask()
    script.call(1)
    instance = script.bench.instance("coder")
    event = instance.leased
    assert event.standing.items == 1
    script.agent.ack("release")
    assert instance.has_queued, "it need not wait for the person"
    script.bench.router.unreachable(1, script.agent.ident, script.bench.now)
    again = script.bench.agent()
    assert [frame.event_id for frame in again.take("event")] == ["e1"]
    again.say(Frame("tool.cancel", call_id=SCRIPT, event_id="e1"))
    assert items(script.client) == []
    assert event.standing.items == 0


def test_a_call_of_the_model_still_waits_for_its_person_without_a_process() -> None:
    script = Scripted()
    script.call(1, within=None)
    script.agent.ack("release")
    assert not script.bench.instance("coder").has_queued, "a person decides first"


def test_a_new_broker_keeps_the_question_and_asks_again_for_later_calls() -> None:
    script = Scripted()
    script.call(1)
    epoch = script.bench.instance("coder").epoch
    script.bench.restart()
    script.client, script.host = script.bench.client(), script.bench.host()
    script.agent = script.bench.agent(leases=[Lease("e1", epoch, "k")])
    script.agent.take()
    script.begin()
    (item,) = items(script.client)
    assert (item["id"], item["script"]) == (f"{SCRIPT}>1", CODE)
    decide(script.client, id=f"{SCRIPT}>1")
    assert script.call(1) == "ran"
    assert script.call(2) == "E_APPROVAL_WAITS", "what a yes covered was in the memory of the other one"


def test_calls_that_run_in_the_agent_are_covered_too() -> None:
    script = Scripted()

    def ask(number: int) -> Any:
        payload = to_raw(ApprovalAsk(args=Raw(encode_value({"command": "rm x"}))))
        frame = Frame("approval.ask", tool="bash__own", call_id=f"{SCRIPT}>{number}", event_id="e1", within=SCRIPT)
        frame.payload, frame.epoch = payload, script.bench.instance("coder").epoch
        (reply,) = [told for told in script.agent.say(frame) if told.type == "reply"]
        return from_raw(reply.payload, dict)["state"]

    assert [ask(1), ask(2)] == ["waits", "waits"]
    decide(script.client, id=f"{SCRIPT}>1")
    script.agent.take()
    assert [ask(1), ask(2), ask(3)] == ["run", "run", "run"]


@pytest.mark.parametrize("code", ["x" * (MAX_SCRIPT + 1), 7, None])
def test_a_script_that_no_person_can_be_shown_is_decided_call_by_call(code: Any) -> None:
    script = Scripted(code=code)
    script.call(1)
    (item,) = items(script.client)
    assert (item.get("script"), item.get("covers", 0)) == (None, 0)
    decide(script.client, id=f"{SCRIPT}>1")
    assert script.call(1) == "ran"
    assert script.call(2) == "E_APPROVAL_WAITS"


def test_the_time_of_a_script_stands_still_while_a_person_is_asked() -> None:
    script = Scripted()
    assert [(frame.type, frame.stage, frame.call_id) for frame in script.ask()] == [("clock", "runs", SCRIPT)]
    assert script.ask(2) == [], "it is said once"
    script.agent.call({"command": "rm x"}, f"{SCRIPT}>1", within=SCRIPT)
    assert [(frame.stage, frame.call_id) for frame in script.host.take("clock")] == [("held", SCRIPT)]
    decide(script.client, id=f"{SCRIPT}>1")
    assert [(frame.stage, frame.call_id) for frame in script.host.take("clock")] == [("runs", SCRIPT)]


# --- the decisions alone


def made(group: Group) -> Item:
    item = Item("s", "c", "code", None, "approval", group.tool, "d", 0.0, None, 1)  # type: ignore[arg-type]
    item.group = group
    return item


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["look", "yes", "no", "over"]), st.sampled_from("ab")), max_size=120))
def test_no_yes_is_for_more_calls_than_it_says(steps: list[tuple[str, str]]) -> None:
    decisions = ScriptDecisions()
    scripts = {name: ("agent", "k", name) for name in "ab"}
    open_: dict[str, Item] = {}
    left = dict.fromkeys("ab", 0)
    denied: set[str] = set()
    for step, name in steps:
        group = Group(scripts[name], "t", "r")
        if step == "look":
            found = decisions.look(group)
            if name in denied:
                assert found is not None
                assert found.state == "denied"
            elif left[name]:
                assert found is not None
                assert found.state == "approved"
                left[name] -= 1
            elif name in open_:
                assert found is open_[name]
            else:
                assert found is None
                open_[name] = made(group)
                decisions.asked(open_[name])
        elif step in ("yes", "no") and name in open_:
            item = open_.pop(name)
            item.state = "approved" if step == "yes" else "denied"
            if step == "yes":
                left[name] = COVERED - 1
            else:
                denied.add(name)
        elif step == "over":
            decisions.over(scripts[name])
            open_.pop(name, None)
            left[name] = 0
            denied.discard(name)


@given(st.binary(max_size=200))
def test_any_payload_is_a_script_or_none(payload: bytes) -> None:
    assert read_script(payload) is None or isinstance(read_script(payload), str)


def test_nothing_is_kept_of_a_script_whose_turn_has_ended() -> None:
    decisions = ScriptDecisions()
    item = made(Group(("agent", "k", "script"), "t", "r"))
    decisions.asked(item)
    item.state = "approved"
    assert item.group is not None
    assert decisions.look(item.group) is item
    decisions.forget(item)  # the end of a turn withdraws its items, and ends its scripts then
    decisions.over(item.group.script)
    assert not any(vars(decisions).values())
