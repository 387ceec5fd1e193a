"""Twists of calls that wait for a person: docs/approvals.md, "What happens to a call" and "Who may answer".

The broker's router, with peers that say what a case wants (tests/unit/kernel/broker/approving.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame, Lease
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, answer, code_of

RM = {"command": "rm -rf build"}
HOUR_S = 3600


def waiting(config: dict[str, Any] = ASK, args: Any = RM) -> tuple[Bench, Peer, Peer, Peer]:
    """A call that waits for a person: the bench, a client, the agent, the tool host."""
    bench = Bench(config)
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.take()
    assert code_of(agent.call(args)) == "E_APPROVAL_WAITS"
    return bench, client, agent, host


def decide(client: Peer, decision: Any = "yes", id: Any = "t1/c1", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.admin(op="approve.answer", id=id, decision=decision, **more)
    return found


def state(client: Peer) -> list[str]:
    return [item["state"] for item in client.admin(op="approve.list", all=True)["items"]]


def ran(host: Peer) -> int:
    return len(host.take("tool.call"))


@pytest.mark.parametrize(("first", "second"), [("yes", "no"), ("no", "yes"), ("yes", "yes"), ("no", "no")])
def test_answered_twice(first: str, second: str) -> None:
    """The first answer counts, and the second is told that it is too late, or the same."""
    _, client, agent, host = waiting()
    told = decide(client, first)
    again = decide(client, second)
    wanted = {"yes": "approved", "no": "denied"}[first]
    assert told["state"] == wanted
    assert again.get("state", wanted) == wanted
    if first != second:
        assert str(again.get("code", "")).startswith("E_"), again
    agent.call(RM)
    assert ran(host) == (first == "yes")


@pytest.mark.parametrize(
    "wrong",
    [None, "", "t1", "t1/c2", "T1/C1", "t1/c1 ", "*", "../t1/c1", 5, True, ["t1/c1"], {"id": "t1/c1"}, "x" * 100_000],
)
def test_an_answer_to_nothing(wrong: Any) -> None:
    _, client, agent, host = waiting()
    told = decide(client, id=wrong)
    assert str(told.get("code", "")).startswith("E_"), told
    assert state(client) == ["waits"]
    agent.call(RM)
    assert ran(host) == 0


@pytest.mark.parametrize("wrong", [None, "", "YES", "maybe", "approve", True, 1, [], {"yes": True}, "yes\n"])
def test_an_answer_that_is_none(wrong: Any) -> None:
    """No rubbish is a yes."""
    _, client, agent, host = waiting()
    told = decide(client, wrong)
    assert str(told.get("code", "")).startswith("E_"), told
    assert state(client) == ["waits"]
    agent.call(RM)
    assert ran(host) == 0
    assert decide(client)["state"] == "approved"


@pytest.mark.parametrize("reason", [5, ["x"], {"a": 1}, "x" * 200_000, "\ud83d", "a\x00b\x1b[31m", "거절", ""])
def test_reasons_of_every_kind(reason: Any) -> None:
    _, client, agent, host = waiting()
    try:
        told = decide(client, "no", reason=reason)
    except UnicodeEncodeError:
        return  # such a text has no bytes, and never leaves the command
    if "code" in told and "state" not in told:
        assert told["code"].startswith("E_")
        assert decide(client, "no")["state"] == "denied"
    assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED"
    assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED", "asked again"
    assert ran(host) == 0
    client.admin(op="approve.list", answered=True)


OTHERS: list[Any] = [
    {"command": "rm -rf build "},
    {"command": ["rm -rf build"]},
    {"command": "rm -rf build", "timeoutMs": None},
    {"command": "rm -rf build", "timeoutMs": 1},
    {"Command": "rm -rf build"},
    {},
    {"command": None},
    {"command": "rm -rf buil\u0064\u0301"},
]


@pytest.mark.parametrize("other", OTHERS)
def test_approved_and_then_another_call(other: Any) -> None:
    """What was approved are these arguments, to the last character; the approval is still there for them."""
    _, client, agent, host = waiting()
    decide(client)
    assert code_of(agent.call(other)) == "E_APPROVAL_MISMATCH"
    assert ran(host) == 0
    agent.call(RM)
    assert ran(host) == 1


def test_numbers_that_python_takes_for_the_same() -> None:
    for approved, made in (({"n": 1}, {"n": True}), ({"n": 0}, {"n": False}), ({"n": "1"}, {"n": 1})):
        _, client, agent, host = waiting(args=approved)
        decide(client)
        assert code_of(agent.call(made)) == "E_APPROVAL_MISMATCH", made
        assert ran(host) == 0


@pytest.mark.parametrize("step", ["asked", "answered", "made"])
@pytest.mark.parametrize("decision", ["yes", "no"])
def test_the_broker_dies_at_each_step(step: str, decision: str) -> None:
    bench, client, agent, host = waiting()

    def dies() -> None:
        nonlocal client, agent, host
        lease = bench.instance("coder").epoch
        bench.restart()
        client, host = bench.client(), bench.host()
        agent = bench.agent(leases=[Lease("e1", lease, "k")])

    if step == "asked":
        dies()
    assert decide(client, decision)["state"] in ("approved", "denied")
    if step == "answered":
        dies()
    told = agent.call(RM)
    runs = ran(host)
    if step == "made":
        dies()
        again = agent.call(RM)
        if decision == "yes":
            assert [call.attach for call in host.take("tool.call")] in ([], [True]), "it has been started once"
            assert code_of(again) in (None, "E_TOOL_OUTCOME_UNKNOWN"), "another host knows nothing of it"
        else:
            assert code_of(again) == "E_APPROVAL_DENIED"
    assert runs == (decision == "yes")
    if decision == "no":
        assert code_of(told) == "E_APPROVAL_DENIED"


def test_an_expiry_to_the_second_and_over_a_death() -> None:
    for late in (False, True):
        bench, client, agent, host = waiting()
        bench.later(HOUR_S - 5)
        assert state(client) == ["waits"]
        if late:
            bench.restart()
            client, host = bench.client(), bench.host()
        bench.later(10)
        assert decide(client).get("state") != "approved"
        agent = bench.agent()
        assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED"
        assert ran(host) == 0
        (answered,) = client.admin(op="approve.list", answered=True)["answered"]
        assert answered.get("uid") is None, "nobody has decided it"


def test_two_calls_of_a_turn_are_two_items() -> None:
    _, client, agent, host = waiting()
    other = {"command": "rm -rf dist"}
    assert code_of(agent.call(other, "t1/c2")) == "E_APPROVAL_WAITS"
    assert state(client) == ["waits", "waits"]
    decide(client, "yes", "t1/c2")
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    agent.call(other, "t1/c2")
    (call,) = host.take("tool.call")
    assert call.call_id == "t1/c2"
    decide(client, "no", "t1/c1")
    assert code_of(agent.call(RM)) == "E_APPROVAL_DENIED"
    assert ran(host) == 0


def test_an_approval_is_nobody_elses() -> None:
    """Another agent, another instance, the same agent in its next turn: each is asked about anew, or refused."""
    bench, client, agent, host = waiting()
    decide(client)
    bench.ask(client, "e2", "reviewer")
    other = bench.agent("reviewer")
    other.take()
    assert code_of(other.call(RM, event="e2")) in (
        "E_APPROVAL_WAITS",
        "E_FORBIDDEN",
        "E_CALL_ID",
        "E_APPROVAL_MISMATCH",
    )
    bench.ask(client, "e3", key="other")
    twin = bench.agent(key="other")
    twin.take()
    assert code_of(twin.call(RM, event="e3")) is not None
    assert ran(host) == 0
    agent.call(RM)
    assert ran(host) == 1


@pytest.mark.parametrize("operator", [True, False])
def test_only_the_operators_token_answers(operator: bool) -> None:
    bench, client, agent, host = waiting()
    peer = bench.client(operator=operator)
    told = decide(peer)
    assert (told.get("state") == "approved") is operator, told
    agent.take()
    for kind in ("admin", "approval.news", "approval.answer"):
        frames = agent.say(Frame(kind, payload=to_raw({"op": "approve.answer", "id": "t1/c1", "decision": "yes"})))
        assert [frame.type for frame in frames] == ["error"], kind
    assert state(client) == (["approved"] if operator else ["waits"])
    agent.call(RM)
    assert ran(host) == operator


def test_a_uid_in_the_answer_counts_for_nothing() -> None:
    _, client, _, _ = waiting()
    decide(client, "yes", uid=0, by="root")
    (answered,) = client.admin(op="approve.list", answered=True)["answered"]
    assert answered["uid"] == 1000


def test_a_turn_that_is_over_takes_its_items_with_it() -> None:
    bench, client, agent, host = waiting()
    agent.say(Frame("ack", stage="done", event_id="e1", epoch=bench.instance("coder").epoch, payload=answer()))
    assert state(client) in ([], ["gone"], ["cancelled"])
    assert decide(client).get("state") != "approved"
    bench.restart()
    assert "waits" not in state(bench.client())


def test_arguments_that_nobody_can_be_shown() -> None:
    """More than 256 KiB: denied where a rule would ask, and run where it would not."""
    bench = Bench(ASK)
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.take()
    assert code_of(agent.call({"command": "x" * (300 << 10)})) == "E_APPROVAL_DENIED"
    assert ran(host) == 0
    assert state(client) == []


def test_a_message_behind_a_call_that_waits_comes_after_it() -> None:
    bench, client, agent, host = waiting()
    bench.ask(client, "e2")
    bench.ask(client, "e3")
    assert agent.take("event") == []
    waits = client.admin(op="why")["waits"]
    assert {wait["kind"] for wait in waits} & {"person", "approval"}, waits
    decide(client)
    agent.call(RM)
    agent.say(Frame("ack", stage="done", event_id="e1", epoch=bench.instance("coder").epoch, payload=answer()))
    assert [frame.event_id for frame in agent.take("event")][:1] in ([], ["e2"])
