"""Attempts to hold more of the broker than is counted: in headers, in what comes later, in what nobody takes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from goondan.kernel.broker.state.entities import AGENTS, CLASSES, TOOLS, Connection
from goondan.kernel.broker.state.mailbox import MAX_ATTEMPTS, MAX_EPOCH, MAX_LATE
from goondan.kernel.broker.state.records import event_subject
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.control import Principal, SpawnFailed
from goondan.schemas.wire.frames import AgentEvent, Answer, Blob, ErrorPayload, Frame, Hello, Lease, ReplyTo, Source
from goondan.schemas.wire.tokens import Claims, TokenClass, mint
from tests.checks import there
from tests.unit.kernel.broker.actors import SECRET
from tests.unit.kernel.broker.test_quotas import error, event
from tests.unit.kernel.broker.world import CALL, World, client, host, request, run, said, working

MIB = 1 << 20
LONG = "x" * 900_000


def told(world: World, connection: Connection, frame: Frame) -> list[Frame]:
    return [answer for answer in said(world, connection, frame) if answer.in_reply_to]


# --- what a header may carry

#: Fields of an `event` that are kept with it, or beside it, and could be as long as a frame.
HEADERS: dict[str, Callable[[Frame], Any]] = {
    "id": lambda frame: setattr(frame, "id", LONG),
    "eventId": lambda frame: setattr(frame, "event_id", LONG),
    "instanceKey": lambda frame: setattr(frame, "instance_key", LONG),
    "to": lambda frame: setattr(frame, "to", LONG),
    "traceId": lambda frame: setattr(frame, "trace_id", LONG),
    "correlationId": lambda frame: setattr(frame, "reply_to", ReplyTo("client", LONG)),
    "target": lambda frame: setattr(frame, "reply_to", ReplyTo(LONG, "c")),
    "workdir": lambda frame: setattr(frame, "workdir", "/" + LONG),
    "auth": lambda frame: setattr(frame, "auth", to_raw({"a": LONG})),
}


@pytest.mark.parametrize("field", HEADERS)
def test_no_header_takes_what_is_not_counted(world: World, field: str) -> None:
    frame = event("e2")
    HEADERS[field](frame)
    refusal = there(error(said(world, client(world), frame)))
    assert refusal.code in ("E_FRAME_INVALID", "E_AGENT_NOT_FOUND")
    assert len(refusal.message) < 1000
    assert "e2" not in world.router.bus.mailbox.events


def test_no_frame_has_an_id_that_is_kept_until_its_answer_comes() -> None:
    world = working()
    agent = world.router.bus.presence.principals["agent/coder/k"]
    instance = world.router.bus.mailbox.instances["coder", "k"]
    call = Frame("tool.call", id=LONG, tool="bash__exec", call_id="new", event_id="c0e0", epoch=instance.epoch)
    cancel = Frame("admin", id=LONG, payload=to_raw({"op": "cancel", "eventId": "c0e0"}))
    for connection, frame in ((agent, call), (client(world), cancel)):
        refusal = there(error(said(world, connection, frame)))
        assert refusal.code == "E_FRAME_INVALID"
    assert world.router.bus.calls.get("new") is None


def test_what_is_said_on_behalf_of_somebody_is_counted(world: World) -> None:
    before = world.router.bus.mailbox.held.held
    frame = event("e2")
    frame.auth = to_raw({"a": "x" * 16_000})
    assert error(said(world, client(world), frame)) is None
    assert world.router.bus.mailbox.held.held - before > 16_000


@pytest.mark.parametrize("cls", range(len(CLASSES)))
def test_no_incarnation_is_kept_that_is_as_long_as_a_frame(world: World, cls: int) -> None:
    ident = b"stranger-0000000"
    name: TokenClass = CLASSES[cls]
    hello = Hello(mint(SECRET, Claims(name, agent="coder", instance_key="new", launch=9)), LONG)
    world.router.stranger(cls, ident, encode(Frame("hello", id="h", payload=to_raw(hello))), world.now)
    (answer,) = [decode(data) for _, to, data in world.router.bus.out if to == ident]
    assert from_raw(answer.payload, ErrorPayload).code == "E_FRAME_INVALID"


def test_nobody_says_whose_work_it_is() -> None:
    """Every field by which a sender could have its work counted with somebody else's, or with nobody's."""
    world = working()
    lies = {
        "from_": "operator",
        "root_event": "somebody-elses",
        "chain": ["coder/k"] * 33,
        "source": Source("client", "operator"),
        "in_reply_to": "corr",
        "epoch": 1,
        "stage": "done",
        "position": 1 << 40,
        "seen_epoch": 1 << 40,
        "calls": ["x"],
    }
    for number, (field, lie) in enumerate(lies.items()):
        stranger = client(world, operator=False)
        frame = event(f"lie{number}")
        setattr(frame, field, lie)
        assert error(said(world, stranger, frame)) is None
        kept = world.router.bus.mailbox.events[f"lie{number}"]
        assert (kept.root, kept.session, kept.content.chain) == (kept.id, stranger.session, None), field
        assert (kept.by_operator, kept.in_reply_to, kept.asynchronous) == (False, None, False), field
        agent = event(f"agents{number}")
        agent.reply_to = ReplyTo("coder", f"c{number}")
        setattr(agent, field, lie)
        assert error(said(world, world.router.bus.presence.principals["agent/coder/k"], agent)) is None
        kept = world.router.bus.mailbox.events[f"agents{number}"]
        asked_by = Source("agent", "coder", "k")
        assert (kept.root, kept.content.chain, kept.source) == ("c0e0", ["coder/k"], asked_by), field
        assert kept.session == f"client/{world.clients[0].peer.incarnation}", field


def test_asynchronous_is_an_agents_word_only(world: World) -> None:
    frame = event("e2")
    frame.asynchronous, frame.reply_to = True, ReplyTo("coder", "corr")
    assert error(said(world, client(world), frame)) is None
    run(world)
    world.host.work()
    world.settle()
    assert world.state("e2") == "done"
    assert world.state("e2:answer") == "unknown", "its answer is no event of the agent that it named"


def test_a_hello_that_names_leases_of_others_gets_none_of_them(world: World) -> None:
    world.clients[0].ask("e2", "reviewer", "other")
    mailbox = world.router.bus.mailbox
    run(world)
    token = mint(SECRET, Claims("agent", agent="coder", instance_key="thief", launch=1))
    hello = Hello(token, "thief", leases=[Lease(name, 1, "k", "stolen") for name in mailbox.events])
    held = {name: (one.instance, one.state, one.root) for name, one in mailbox.events.items()}
    ident = b"thief-0000000000"
    world.router.stranger(AGENTS, ident, encode(Frame("hello", id="h", payload=to_raw(hello))), world.now)
    thief = mailbox.instances["coder", "thief"]
    assert thief.leased is None
    assert {name: (one.instance, one.state, one.root) for name, one in mailbox.events.items()} == held
    connection = world.router.bus.presence.connections[AGENTS][ident]
    for name in held:
        for stage in ("done", "failed", "release", "renew"):
            (answer,) = said(world, connection, Frame("ack", id=stage, stage=stage, event_id=name, epoch=1))
            assert from_raw(answer.payload, ErrorPayload).code == "E_LEASE_LOST"


# --- answers that nobody waits for


def ask(world: World, name: str, *, size: int = 0) -> Frame:
    """`coder/k` asks `reviewer/k` without waiting; what it is told."""
    frame = request(name, call_id=None, calls=3, asynchronous=True)
    (told,) = [one for one in said(world, world.peer(), frame) if one.in_reply_to]
    return told


def response(text: str) -> Any:
    ended = Answer(turn_id="t", status="completed", response=text)
    return to_raw(AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00Z", input=0, answer=ended))


def answer_all(world: World, payload: Any, blob: Blob | None = None) -> None:
    """`reviewer/k` answers all that it has been asked."""
    run(world)
    instance = world.router.bus.mailbox.instances["reviewer", "k"]
    answering = world.router.bus.presence.principals["agent/reviewer/k"]
    while (held := instance.leased) is not None:
        done = Frame("ack", id=f"d-{held.id}", stage="done", event_id=held.id, epoch=instance.epoch, blob=blob)
        if blob is None:
            done.payload = payload
        else:
            done.blob = Blob(held.id.encode().hex().rjust(32, "0")[-32:], blob.digest, blob.size)
        said(world, answering, done)


def test_an_instance_asks_so_much_without_waiting_and_no_more(world: World) -> None:
    for number in range(MAX_LATE):
        assert ask(world, f"r{number}").type == "ack"
    refused = ask(world, "one-more")
    assert from_raw(refused.payload, ErrorPayload).code == "E_TOOL_LIMIT", "and not E_OVERLOADED: it would ask for ever"
    answer_all(world, response("yes"))
    assert from_raw(ask(world, "one-more").payload, ErrorPayload).code == "E_TOOL_LIMIT", "answers wait as well"
    world.kill_broker()
    run(world)
    instance = world.router.bus.mailbox.instances["coder", "k"]
    assert world.router.bus.mailbox.late_of(instance) == MAX_LATE, "it is known again after a restart"
    while world.router.bus.mailbox.late_of(instance) == MAX_LATE:
        world.host.work()
        run(world)
        world.advance(0.3)
    world.settle()
    assert world.router.bus.mailbox.late_of(instance) == 0


@pytest.mark.parametrize("large", ["in frames", "in files"])
def test_late_answers_take_no_more_than_the_share_of_their_root(world: World, large: str) -> None:
    for number in range(MAX_LATE):
        ask(world, f"r{number}")
    mailbox = world.router.bus.mailbox
    mailbox.held.capacity, mailbox.held.kept = 34 * MIB, MIB
    size = 100_000 if large == "in frames" else 5 * MIB
    answer_all(
        world, response("x" * size) if large == "in frames" else None, None if large == "in frames" else file(size)
    )
    answers = [one for name, one in mailbox.events.items() if name.endswith(":answer")]
    assert len(answers) == MAX_LATE, "every question has an answer"
    assert mailbox.held.held <= mailbox.held.capacity // 2 + MIB, "one root has half"
    left = mailbox.held.free(operator=False)
    assert left >= 10 * MIB
    whole = [one for one in answers if one.size >= size]
    assert 0 < len(whole) < MAX_LATE
    refused = next(one for one in answers if one.size < size)
    said_instead = there(from_raw(refused.content.payload, AgentEvent).answer)
    assert there(said_instead.error).code == "E_TOOL_LIMIT"
    if large == "in files":
        kept = {one.blob.file for one in whole if one.blob is not None}
        assert mailbox.blobs.referenced() == kept, "the files of the others go"


def file(size: int) -> Blob:
    return Blob("0" * 32, "0" * 64, size)


# --- answers that a turn waits for


def asks_one_by_one(world: World, asker: Connection, size: int, *, large: bool, reads: bool, times: int) -> list[str]:
    """A turn asks `reviewer/k` again and again, and gets answers of so many bytes; how each ended."""
    ended = []
    mailbox = world.router.bus.mailbox
    for number in range(times):
        frame = request(f"s{number}", call_id=CALL if asker.cls == TOOLS else None, calls=3)
        assert error(told(world, asker, frame)) is None
        run(world)
        instance = mailbox.instances["reviewer", "k"]
        done = Frame("ack", id=f"d{number}", stage="done", event_id=f"s{number}", epoch=instance.epoch)
        if large:
            done.blob = Blob(f"{number:032x}", "0" * 64, size)
        else:
            done.payload = response("x" * size)
        answering = world.router.bus.presence.principals["agent/reviewer/k"]
        assert error(told(world, answering, done)) is None
        world.agents["reviewer", "k"].held = None
        for actor in (world.host, world.agents["coder", "k"]):
            actor.wire.down.clear()  # what is read is said below
        kept = mailbox.events[f"s{number}"].work
        ended.append("whole" if kept.answer_blob is not None or len(kept.answer or b"") >= size else "refused")
        if reads:
            said(world, asker, Frame("ack", id=f"a{number}", stage="done", event_id=f"s{number}:answer"))
    return ended


@pytest.mark.parametrize("who", ["an agent", "a tool"])
@pytest.mark.parametrize("large", [False, True])
def test_answers_that_are_kept_for_a_turn_have_a_bound(monkeypatch: pytest.MonkeyPatch, who: str, large: bool) -> None:
    """17 answers of the largest size filled the folder that all share; those to a tool stayed in the broker's memory
    after they were read, a thousand of them for one call.
    """
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.MAX_TURN_ANSWERS", 8 * MIB)
    world = working()
    asker = host(world) if who == "a tool" else world.router.bus.presence.principals["agent/coder/k"]
    mailbox, size = world.router.bus.mailbox, MIB if large else 900_000
    ended = asks_one_by_one(world, asker, size, large=large, reads=large, times=6)
    assert (ended[0], ended[-1]) == ("whole", "refused")
    held = sum(
        (0 if one.work.answer is None else len(memoryview(one.work.answer)))
        + (0 if one.work.answer_blob is None else one.work.answer_blob.size)
        for one in mailbox.events.values()
        if one.finished
    )
    assert held <= 4 * MIB, "one root has half"
    assert mailbox.answers.held == held
    if large:
        assert len(mailbox.blobs.referenced()) == ended.count("whole"), "the files of the others go"
    world.kill_broker()
    assert world.router.bus.mailbox.answers.held >= held, "it is known again after a restart"
    run(world)
    world.host.work()
    world.settle()
    assert world.router.bus.mailbox.answers.held == 0, "with the turn all of it goes"


@pytest.mark.parametrize("who", ["an agent", "a tool"])
def test_answers_that_were_read_cost_no_memory(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.MAX_TURN_ANSWERS", 8 * MIB)
    world = working()
    asker = host(world) if who == "a tool" else world.router.bus.presence.principals["agent/coder/k"]
    ended = asks_one_by_one(world, asker, 900_000, large=False, reads=True, times=12)
    assert set(ended) == {"whole"}, "a turn may ask for as long as it likes"
    assert world.router.bus.mailbox.answers.held == 0


# --- dead letters


def fail_to_start(world: World, agent: str) -> None:
    """Nobody can start the process of any instance of `agent`."""
    control = there(world.router.bus.control)
    for name, key in list(world.router.bus.mailbox.instances):
        if name == agent:
            failed = SpawnFailed(Principal("agent", name, key), 5, "no memory")
            world.router.receive(control, encode(Frame("runtime.event", payload=to_raw(failed))), world.now)
    world.after_round()


@pytest.mark.feature("dead_letters")
@pytest.mark.parametrize(("size", "most"), [(0, 160), (16 * MIB, 9)])
def test_an_agent_that_never_starts_does_not_fill_the_disk(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    """A session gets two thirds; by 16 MiB of 240 that are ten at most."""
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.MAX_DEAD", 256)
    world = World()
    run(world)
    attacker, number, refusal = client(world), 0, None
    while refusal is None:
        for _ in range(100 if size == 0 else 1):
            frame = event(f"d{number}", size=size, key="never")
            if size:
                frame.blob = Blob(f"{number:032x}", "0" * 64, size)
            refusal = error(told(world, attacker, frame))
            number += 1
            if refusal is not None:
                break
        fail_to_start(world, "reviewer")
        assert number <= 2 * most + 100
    assert refusal.code == "E_AGENT_FAILED", "not E_OVERLOADED: waiting does not help"
    assert "gdn dead" in (refusal.suggestion or "")
    assert most <= len(world.router.bus.mailbox.dead) < most + 100
    mailbox = world.router.bus.mailbox
    held = mailbox.dead_events.held, mailbox.dead_bytes.held
    assert held == (len(mailbox.dead), sum(one.work.dead_bytes for one in mailbox.dead.values()))
    fresh = event("by-another", size=size, key="never")
    if size:
        fresh.blob = Blob("f" * 32, "0" * 64, size)
    assert error(told(world, client(world), fresh)) is None, "nor does it keep other senders from that agent"
    fail_to_start(world, "reviewer")
    others = event("others", to="coder")
    assert error(told(world, client(world), others)) is None, "other agents are spoken to"
    world.kill_broker()
    run(world)
    again = client(world)
    pools = world.router.bus.mailbox.dead_events, world.router.bus.mailbox.dead_bytes
    assert pools[0].held == held[0] + 1, "it is known again after a restart"
    for name in list(world.router.bus.mailbox.dead):
        frame = Frame("admin", id=f"drop-{name}", payload=to_raw({"op": "dead.drop", "eventId": name}))
        assert error(told(world, again, frame)) is None
    assert (pools[0].held, pools[1].held) == (0, 0)
    assert error(told(world, again, event("d-last", key="never"))) is None, "a person has looked"


def test_the_end_of_pending_work_is_taken_for_an_agent_with_many_dead_letters() -> None:
    world = working()
    mailbox = world.router.bus.mailbox
    (mailbox.dead["given up"],) = mailbox.events.values()
    mailbox._dead_of["coder"] = 1
    mailbox.dead_events.take("somebody", "else", mailbox.dead_events.capacity)
    completed = event(f"{CALL}~completed", to="coder", key="k")
    completed.root_event = "c0e0"
    assert error(told(world, host(world), completed)) is None
    assert error(told(world, client(world), event("more", to="coder"))) is not None


def test_a_file_with_an_epoch_beyond_all_counting_ends_in_a_dead_letter(world: World) -> None:
    """A flipped bit in a conversation's file: the event went round between broker and agent without a pause."""
    instance = world.router.bus.mailbox.instances["coder", "k"]
    rounds = 0
    while instance.leased is not None:
        connection, held = instance.conn, instance.leased
        assert connection is not None
        rounds += 1
        assert rounds <= MAX_ATTEMPTS
        frame = Frame("ack", id=f"x{rounds}", stage="release", event_id=held.id, epoch=instance.epoch)
        frame.seen_epoch = MAX_EPOCH + rounds
        said(world, connection, frame)
    assert "epoch" in world.router.bus.mailbox.dead["e1"].work.cause
    assert event_subject("e1") in {row.subject for row in world.journal.rows()}


@pytest.mark.feature("dead_letters")
def test_a_dead_answer_that_is_sent_again_is_an_answer(world: World) -> None:
    """It was read as a question without a word in it."""
    ask(world, "r1")
    answer_all(world, response("yes"))
    fail_to_start(world, "coder")
    assert list(world.router.bus.mailbox.dead) == ["e1", "r1:answer"]  # its turn, whose process is gone, as well
    frame = Frame("admin", id="again", payload=to_raw({"op": "dead.requeue", "eventId": "r1:answer"}))
    assert error(told(world, client(world), frame)) is None
    again = world.router.bus.mailbox.events["r1:answer~requeued"]
    assert (again.in_reply_to, again.source) == ("corr-r1", Source("agent", "reviewer", "k"))
    assert world.router.bus.mailbox.late_of(again.instance) == 1
