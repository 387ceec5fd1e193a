"""Turns that wait for a person: parked without a process, over the death of a broker, with clocks that stand still."""

from __future__ import annotations

import pytest

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, Lease, ReplyTo
from tests.features.approvals.waiting import RM, decide, items, result, waiting
from tests.unit.kernel.broker.approving import Bench, Peer, answer, code_of


def test_a_parked_turn_needs_no_process_and_comes_back_when_decided() -> None:
    bench, client, agent, host = waiting()
    places = bench.router.bus.mailbox.places
    agent.ack("park")
    assert not places.pool.held
    bench.ask(client, "e2")
    assert not agent.take("event"), "newer messages wait behind it"
    assert [frame.type for frame in agent.say(Frame("bye"))] == ["reply"], "its process may leave"
    decide(client)
    agent = bench.agent()
    assert [frame.event_id for frame in agent.take("event")] == ["e1"]
    agent.call(RM)
    (call,) = host.take("tool.call")
    result(host, call)
    assert [frame.event_id for frame in agent.ack("done", payload=answer()) if frame.type == "event"] == ["e2"]


@pytest.mark.feature("waits")
def test_who_waits_for_a_person_is_shown() -> None:
    bench, client, agent, _ = waiting()
    agent.ack("park")
    bench.ask(client, "e2")
    (why,) = client.admin(op="why")["waits"]
    assert (why["kind"], why["agent"], why["messages"], why["tools"]) == ("approval", "coder", 1, ["bash__exec"])
    asked = f"(gdn approve: {why['items'][0]})"
    assert why["text"] == f"waits for a person to approve 1 call of bash__exec {asked}; 1 message behind it"


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


def test_a_full_disk_asks_nobody() -> None:
    bench, client, agent, _ = waiting()
    bench.full = True
    assert code_of(agent.call({"command": "b"}, "t1/c2")) == "E_DISK_FULL"
    assert len(items(client)) == 1
    decide(client)  # ends of what is there are always written
    assert items(client) == []


@pytest.mark.parametrize("dies", ["asked", "approved", "denied", "started"])
def test_what_a_broker_knew_the_next_one_knows(dies: str) -> None:
    bench, client, agent, host = waiting()
    agent.ack("park")
    if dies != "asked":
        decide(client, "no" if dies == "denied" else "yes")
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
    told = code_of(agent.call(RM, first_sent_ms=5))
    (call,) = host.take("tool.call") or (None,)
    if dies == "started":
        assert call is None, "it was passed on before: nobody knows what came of it"
    elif dies == "denied":
        assert (call, told) == (None, "E_APPROVAL_DENIED")
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
