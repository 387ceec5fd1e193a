"""What the broker holds in memory: what a new thing is, and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.broker.state.entities import (
    AGENTS,
    ANSWER_ROOM,
    CLIENTS,
    CONTROL,
    MAX_REFUSED,
    REFUSED_S,
    SESSION_CHARS,
    TOOLS,
    Connection,
    Content,
    Event,
    Instance,
    Spawned,
    Standing,
    Work,
    size_in_memory,
    unknown_session,
)
from goondan.kernel.broker.state.shares import Claim
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, ReplyTo, Source
from goondan.schemas.wire.tokens import Claims

CORR = ReplyTo("client", "c")


def connection(cls: int = CLIENTS, *, incarnation: str = "i", calls: list[str] | None = None) -> Connection:
    return Connection(cls, b"ident", "client", Claims("client"), 3.0, incarnation, 7, 5, frozenset(calls or []))


def instance(agent: str = "coder", key: str = "k") -> Instance:
    return Instance(agent, key, Workdir("/w"), 4, 2.0)


def event(event_id: str = "e", /, **options: Any) -> Event:
    given: dict[str, Any] = {"sender": "client", "content_here": Content()}
    return Event(event_id, instance(), **(given | options))


# --- connections


def test_a_new_connection_knows_who_it_is_and_has_sent_nothing() -> None:
    made = connection(TOOLS, calls=["t/1", "t/2"])
    assert (made.cls, made.ident, made.address, made.claims) == (TOOLS, b"ident", "client", Claims("client"))
    assert (made.incarnation, made.started_ms, made.pid, made.last_seen) == ("i", 5, 7, 3.0)
    assert (made.calls, made.watched, made.handlers) == (frozenset({"t/1", "t/2"}), False, {})
    assert (made.instance, made.allowed, made.allowance, made.refused) == (None, frozenset(), None, {})
    assert Connection(CLIENTS, b"", "client", Claims("client"), 0.0, "i").started_ms == 0


@pytest.mark.parametrize("cls", [CONTROL, AGENTS, CLIENTS])
def test_only_a_tool_host_says_which_calls_it_has(cls: int) -> None:
    assert connection(cls, calls=["t/1"]).calls == frozenset()


def test_what_a_client_sets_going_is_counted_under_its_incarnation_and_others_under_their_address() -> None:
    long = "x" * (SESSION_CHARS + 1)
    assert connection(CLIENTS, incarnation=long).session == "client/" + "x" * SESSION_CHARS
    assert (connection(CLIENTS).sender, connection(CLIENTS).session) == ("client", "client/i")
    agent = Connection(AGENTS, b"", "agent/coder/k", Claims("agent"), 0.0, "i")
    assert (agent.sender, agent.session) == ("agent/coder/k", "agent/coder/k")
    assert Connection(CLIENTS, b"", "client:2", Claims("client"), 0.0, "i").sender == "client"


# --- refusals


def test_the_first_refused_event_of_a_target_is_the_one_that_comes_back() -> None:
    made = connection()
    assert made.refuse(("coder", "k"), "e1", 100.0, 250) == 250
    assert (made.refused["coder", "k"].event_id, made.refused["coder", "k"].until) == ("e1", 100.25 + REFUSED_S)
    made.refuse(("coder", "k"), "e2", 101.0, 250)
    assert (made.refused["coder", "k"].event_id, made.refused["coder", "k"].until) == ("e1", 100.25 + REFUSED_S)
    made.refuse(("coder", "k"), "e1", 102.0, 500)
    assert made.refused["coder", "k"].until == 102.5 + REFUSED_S
    assert [*made.refused] == [("coder", "k")]


def test_a_refused_event_that_its_sender_has_given_up_is_replaced() -> None:
    made = connection()
    made.refuse(("coder", "k"), "e1", 100.0, 0)
    made.refuse(("coder", "k"), "e2", 100.0 + REFUSED_S - 0.1, 0)
    assert made.refused["coder", "k"].event_id == "e1"
    made.refuse(("coder", "k"), "e2", 100.0 + REFUSED_S, 0)
    assert made.refused["coder", "k"].event_id == "e2"


def test_so_many_targets_are_remembered_and_the_oldest_forgotten() -> None:
    made = connection()
    for number in range(MAX_REFUSED):
        made.refuse(("coder", str(number)), "e", 0.0, 1)
    assert len(made.refused) == MAX_REFUSED
    made.refuse(("coder", "more"), "e", 0.0, 1)
    assert len(made.refused) == MAX_REFUSED
    assert ("coder", "0") not in made.refused
    assert ("coder", "1") in made.refused


# --- events


def test_an_event_keeps_what_it_is_given() -> None:
    asking = event("a")
    source = Source("tool", "x", "k")
    made = event(
        "e",
        content_here=Content(payload=to_raw("hello"), reply_to=CORR, chain=["a/b", "c/d"], auth=to_raw({"user": 1})),
        source=source,
        deadline=9.0,
        call_id="t/1",
        blob=Blob("f", "s", 100),
        root="r",
        session="client/1",
        asking=asking,
        since=3.0,
        asynchronous=True,
        in_reply_to="corr",
    )
    assert (made.root, made.session, made.source, made.deadline, made.call_id) == ("r", "client/1", source, 9.0, "t/1")
    assert (made.blob, made.asking, made.since, made.asynchronous) == (Blob("f", "s", 100), asking, 3.0, True)
    assert (made.in_reply_to, made.wants_answer, made.depth, made.claim.lender) == ("corr", True, 2, "a")
    assert made.inline == size_in_memory(to_raw("hello"), to_raw({"user": 1}))
    assert made.size == made.inline + 100 + ANSWER_ROOM
    assert event(blob=Blob("f", "s", 100)).size == size_in_memory(NO_PAYLOAD, None) + 100
    assert event(asynchronous=True).size == size_in_memory(NO_PAYLOAD, None) + ANSWER_ROOM


def test_a_root_of_the_same_name_is_one_string() -> None:
    name, same = (str(1000) for _ in range(2))
    assert same is not name
    assert event(name, root=same).root is name
    assert event(name, root="r").session == unknown_session("r") == "root/r"


def test_what_an_event_takes_is_its_payload_and_who_it_is_for() -> None:
    base = size_in_memory(NO_PAYLOAD, None)
    assert size_in_memory(to_raw("hello"), None) == base + 5
    assert size_in_memory(to_raw("hello"), to_raw("you")) == base + 5 + 4
    assert base == 256 + 1


def test_content_that_is_in_the_journal_only_has_to_be_recalled() -> None:
    made = event("e7")
    made.content_here = None
    assert made.content_here is None
    with pytest.raises(AssertionError, match="e7"):
        _ = made.content
    content = Content(workdir="/w")
    made.content_here = content
    assert made.content is content


def test_new_work_has_come_to_nothing() -> None:
    work = Work()
    assert (work.requests, work.answered, work.calls, work.open_calls, work.attempts) == ({}, {}, {}, 0, 0)
    assert (work.progressed, work.position, work.lease_until) == (False, 0, 0.0)
    assert (work.answer, work.answer_blob, work.cause, work.ended_ms, work.dead_bytes) == (None, None, "", 0, 0)
    assert (work.kept_here, work.kept_in_file) == (0, 0)


def test_only_a_position_beyond_the_last_is_progress() -> None:
    made = event()
    for position in (None, 0):
        made.work.moved(position)
        assert (made.work.position, made.work.progressed) == (0, False)
    made.work.moved(2)
    assert (made.work.position, made.work.progressed) == (2, True)
    made.work.progressed = False
    for position in (2, 1, None):
        made.work.moved(position)
        assert (made.work.position, made.work.progressed) == (2, False)


def test_while_a_person_is_asked_the_clock_stands_still_and_nobody_is_handed_it() -> None:
    made = event()
    made.standing = Standing()
    assert (made.held, made.waits) == (False, False)
    made.standing.holds = 1
    assert (made.held, made.waits) == (True, False)
    made.standing.holds, made.standing.items = 0, 1
    assert (made.held, made.waits) == (False, True)
    made.standing.ready = True
    assert not made.waits


CLIENT, AGENT = Source("client", "operator"), Source("agent", "boss", "b")


@pytest.mark.parametrize(
    ("options", "late_for"),
    [
        ({"in_reply_to": "c"}, ("coder", "k")),
        ({"source": AGENT}, None),
        ({"asynchronous": True}, None),
        ({"source": AGENT, "asynchronous": True}, ("boss", "b")),
        ({"source": CLIENT, "asynchronous": True}, None),
    ],
)
def test_for_which_instance_something_comes_late(options: dict[str, Any], late_for: tuple[str, str] | None) -> None:
    assert event(**options).late_for == late_for


@pytest.mark.parametrize(
    ("source", "is_operator"),
    [(None, False), (CLIENT, True), (Source("client", "other"), False), (Source("agent", "operator"), False)],
)
def test_who_is_an_operator(source: Source | None, is_operator: bool) -> None:
    made = event(source=source, session="s", root="r")
    assert made.by_operator is is_operator
    assert made.claim == Claim("s", "r", is_operator, None, 0)


def test_an_event_that_a_turn_waits_for_may_have_that_turns_place() -> None:
    made = event(asking=event("a"), content_here=Content(chain=["a/b"]), session="s", root="r")
    assert made.claim == Claim("s", "r", False, "a", 1)


# --- instances


def test_a_new_instance_has_nothing_and_wants_nothing() -> None:
    made = instance()
    assert (made.agent, made.key, made.workdir, made.epoch, made.since) == ("coder", "k", Workdir("/w"), 4, 2.0)
    assert ([*made.queue], made.open, made.answers, made.spawns) == ([], 0, {}, {})
    assert (made.leased, made.conn, made.host, made.spawned) == (None, None, None, None)
    assert (made.requested, made.leaving, made.deleting) == (False, False, False)
    assert (made.waits_since, made.place_s) == (0.0, 0.0)
    assert (made.wanted, made.has_queued, made.address) == (False, False, "coder/k")


def test_for_what_a_process_must_run() -> None:
    made = instance()
    made.leased = event()
    assert made.wanted
    made.leased = None
    made.answers["a"] = b"frame"
    assert made.wanted
    made.answers.clear()
    made.queue.append(event())
    assert (made.wanted, made.has_queued) == (True, True)
    made.queue[0].end = "done"
    assert (made.wanted, made.has_queued) == (False, False)
    made.queue.append(event())
    assert made.has_queued
    made.queue[0].standing = Standing()
    made.queue[0].standing.items = 1
    assert not made.has_queued, "the first waits for a person, and the others for it"
    made.spawned = Spawned("boss", "b", 0.0, None, ("agent/boss/b", "1"))
    assert not made.wanted, "nobody waits for its process"
