"""What an accepted event survives: the end of the broker, of its sender, of its holder, at every write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.entities import AGENTS
from goondan.kernel.broker.state.ledger import Ledger
from goondan.kernel.broker.state.mailbox import LEASE_S, MAX_ATTEMPTS
from goondan.kernel.broker.state.records import Deadline, event_subject
from goondan.kernel.supervisor.lifecycle import MAX_START_FAILURES
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.control import Drain, Principal, RestartAgents, SpawnFailed
from goondan.schemas.wire.frames import AgentEvent, Blob, ErrorPayload, FilePart, Frame, ReplyTo
from tests.checks import there
from tests.unit.kernel.broker.actors import Agent, Client
from tests.unit.kernel.broker.world import World, client, run, said


def without_sender(world: World) -> Client:
    """The client that has asked is gone for good."""
    client = world.clients.pop(0)
    client.wire.cut(reconnect=False)
    return client


def agent(world: World) -> Agent:
    return next(iter(world.agents.values()))


# --- accepted events


@pytest.mark.parametrize("moment", ["queued", "held", "answering"])
def test_an_accepted_event_is_worked_on_without_its_sender(moment: str) -> None:
    world = World()
    client = world.clients[0]
    client.ask("e1")
    while world.state("e1") != "accepted":
        assert world.pump_up(client) or world.pump_down(client)
    if moment != "queued":
        run(world)
    if moment == "answering":
        world.host.work()
    without_sender(world)
    world.kill_broker()
    if moment == "held":
        world.kill_agent(agent(world))
    world.settle()
    assert world.state("e1") == "done"
    assert world.stores["coder", "k"].completed == ["e1"]


@pytest.mark.parametrize("moment", ["queued", "held"])
def test_the_files_of_a_message_are_handed_over_by_every_later_broker(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    got: list[list[FilePart] | None] = []
    files = [FilePart(Blob("5e" * 16, "5e" * 32, 99), "image/png", "cat.png")]
    client = world.clients[0]
    client.ask("e1", files=files)
    while world.state("e1") != "accepted":
        assert world.pump_up(client) or world.pump_down(client)
    if moment == "held":
        run(world)
    world.kill_broker()
    assert files[0].blob.file in world.router.bus.mailbox.blobs.referenced()
    if moment == "held":
        world.kill_agent(agent(world))
    send = world.router.bus.send

    def heard(to: Any, frame: Frame, *more: Any) -> None:
        got.append(frame.files)
        send(to, frame, *more)

    monkeypatch.setattr(world.router.bus, "send", heard)
    world.settle()
    assert world.state("e1") == "done"
    assert files in got
    assert files[0].blob.file not in world.router.bus.mailbox.blobs.referenced()


def test_what_was_not_written_was_accepted_by_nobody() -> None:
    world = World()
    world.dies = "before"
    world.clients[0].ask("e1")
    run(world, 1)
    assert world.brokers_killed == 1
    assert world.clients[0].answers == {}
    world.settle()
    assert [answer.answer.status for answer in world.clients[0].answers["e1"] if answer.answer] == ["completed"]


def test_events_keep_their_order_over_a_restart() -> None:
    world = World()
    for number in range(8):
        world.clients[number % 2].ask(f"e{number}", calls=0)
    world.flow(*world.clients)
    order = [event.id for event in world.router.bus.mailbox.instances["coder", "k"].queue]
    assert len(order) == 8
    world.clients.clear()
    world.kill_broker()
    world.settle()
    assert world.stores["coder", "k"].completed == order


def test_an_answer_stays_until_the_turn_that_asked_has_ended(world: World) -> None:
    """Its agent has acknowledged it and dies: the next incarnation asks again and is answered, by any broker."""
    event = AgentEvent(id="r1", type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)

    def asked() -> list[Frame]:
        connection = world.router.bus.presence.principals["agent/coder/k"]
        frame = Frame("event", id="f", to="reviewer", instance_key="k", event_id="r1", payload=to_raw(event))
        frame.reply_to = ReplyTo("coder", "corr")
        return said(world, connection, frame)

    def answers(frames: list[Frame]) -> list[str]:
        return [frame.event_id or "" for frame in frames if frame.in_reply_to == "corr"]

    asked()
    run(world)
    assert world.state("r1") == "done"
    for _ in range(2):
        world.kill_agent(world.agents["coder", "k"])
        world.kill_broker()
        run(world)
        assert answers(asked()) == ["r1:answer"]
    assert [subject for subject in subjects(world) if subject == event_subject("r1")]
    world.host.work()
    world.settle()
    assert world.state("e1") == "done"
    assert not [subject for subject in subjects(world) if subject.startswith("event:")], "nothing of it is left"


def test_a_question_that_expired_stays_so_for_the_turn_that_asked() -> None:
    """Asked for by an agent, over before its own agent could take it; then the broker dies."""
    world = World(max_live_agents=1)
    world.clients[0].ask("e1")
    run(world)
    event = AgentEvent(id="r1", type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)
    frame = Frame(
        "event", id="f", to="coder", instance_key="other", event_id="r1", payload=to_raw(event), deadline_ms=50
    )
    frame.reply_to = ReplyTo("coder", "corr")
    asking = world.router.bus.presence.principals["agent/coder/k"]
    world.router.receive(asking, encode(frame), world.now)
    world.router.bus.staged, staged = [], world.router.bus.staged
    world.journal.append([decision.item for decision in staged])
    world.router.settle(staged, world.now)
    world.now += 1
    world.router.tick(world.now)
    world.after_round()
    assert world.state("r1") == "expired"
    world.kill_broker()
    assert world.state("r1") == "expired"
    restored = world.router.bus.mailbox.events["r1"]
    answer = there(from_raw(there(restored.work.answer), AgentEvent).answer)
    assert there(answer.error).code == "E_AGENT_TIMEOUT"
    world.settle()
    assert world.stores["coder", "k"].completed == ["e1"]


def test_the_file_of_an_answer_stays_as_long_as_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's large answer, until the client has acknowledged it; a new broker sweeps what no record names."""
    monkeypatch.setattr("goondan.schemas.wire.peer.INLINE_FRAME_BYTES", 40)
    world = World()
    client = world.clients[0]
    client.ask("e1")
    run(world)
    client.wire.cut(reconnect=False)
    world.clients.remove(client)
    world.host.work()
    world.settle()
    assert world.state("e1") == "done"
    kept = there(world.journal.find_answer(event_subject("e1")))
    record = records.decode(kept)
    assert isinstance(record, records.Finished)
    assert record.blob is not None
    world.kill_broker()
    named = world.router.bus.mailbox.blobs.referenced() | world.journal.files()
    assert record.blob.file in named
    assert record.blob.file in world.files
    world.journal.append([world.router.bus.ledger.answer_arrived("e1")])
    assert record.blob.file not in world.journal.files()


def test_a_wish_to_cancel_survives_the_broker() -> None:
    world = World()
    world.advance(5)
    world.clients[0].ask("e1")
    run(world)
    world.clients[0].cancel("e1")
    while world.pump_up(world.clients[0]):
        pass  # the broker has it, and nobody else
    world.clients[0].wire.cut(reconnect=False)
    world.clients.pop(0)
    world.kill_broker()
    world.settle()
    assert world.state("e1") == "cancelled"


def test_nothing_is_left_in_the_journal_of_work_that_is_done() -> None:
    world = World(handlers_ask=True)
    for number in range(6):
        world.clients[number % 2].ask(f"e{number}", ("coder", "reviewer")[number % 2], f"k{number % 3}")
    world.settle()
    assert {subject.partition(":")[0] for subject in subjects(world)} <= {"epochs"}


def test_a_call_that_a_new_process_repeats_is_asked_for_again_under_its_own_frame(world: World) -> None:
    """Its agent is gone and the next one repeats the call; then the connection of the tool host breaks."""
    world.kill_agent(agent(world))
    run(world)
    assert list(world.host.running) == ["coder/k/e1/0"]
    world.cut(world.host)
    world.settle()
    assert world.stores["coder", "k"].results["e1"] == {0: "ran1"}


# --- epochs


def test_a_call_that_has_waited_for_its_tool_host_has_an_outcome_after_a_restart_of_the_broker() -> None:
    """It was sent before its tool host began; the next broker took that for a sign of an earlier tool host."""
    world = World()
    world.clients[0].ask("e1")
    for _ in range(6):
        world.flow(world.supervisor, *world.clients, *world.agents.values())
        world.supervisor.reconcile()
    assert len(world.router.bus.calls) == 1
    world.now += 1
    world.kill_host()
    run(world)
    assert len(world.host.running) == 1
    world.kill_broker()
    world.settle()
    assert world.state("e1") == "done"
    ((_, results),) = world.stores["coder", "k"].results.items()
    assert "E_TOOL_OUTCOME_UNKNOWN" not in results.values()
    assert len(world.ran) == 1


def test_epochs_grow_over_restarts_even_when_the_clock_is_set_back() -> None:
    world = World()
    seen = []
    for number in range(4):
        world.clients[0].ask(f"e{number}", calls=0)
        run(world)
        seen.append(agent(world).store.epoch)
        world.kill_agent(agent(world))
        world.now -= 500.0
        world.kill_broker()
        run(world)
    assert seen == sorted(set(seen))


def test_a_file_with_a_higher_epoch_is_named_and_the_broker_goes_above_it() -> None:
    world = World()
    world.clients[0].ask("e1", calls=0)
    world.goes_up(world.clients[0])
    world.supervisor.reconcile()
    run(world, 1)
    holder = world.router.bus.mailbox.instances["coder", "k"]
    far = holder.epoch + 10_000_000
    event = holder.leased
    if event is None:  # it was answered already; ask again
        world.clients[0].ask("e2")
        run(world, 2)
        event = holder.leased
    assert event is not None
    connection = there(holder.conn)
    frame = Frame("ack", id="x", stage="release", event_id=event.id, epoch=holder.epoch, seen_epoch=far)
    told = said(world, connection, frame)
    again = next(frame for frame in told if frame.type == "event")
    assert (again.event_id, (again.epoch or 0) > far) == (event.id, True)
    world.kill_broker()
    assert world.router.bus.mailbox.epochs.next() > far


# --- attempts and dead letters


def crash(world: World) -> None:
    """The holder dies before it has stored anything."""
    world.kill_agent(agent(world))
    run(world)


@pytest.mark.parametrize("told", [Frame("ack", stage="renew"), Frame("tool.call", call_id="c", tool="not__allowed")])
def test_a_holder_that_gets_on_is_no_reason_to_give_up(world: World, told: Frame) -> None:
    for position in range(1, 3 * MAX_ATTEMPTS):
        holder = agent(world)
        held = there(holder.held)
        holder.send(replace(told, event_id="e1", epoch=held.epoch, position=position))
        run(world)
        crash(world)
    assert world.state("e1") == "leased"
    assert not world.router.bus.mailbox.dead


def test_a_holder_that_hangs_every_time_is_a_reason_to_give_up(world: World) -> None:
    first = agent(world).launch
    for _ in range(4 * MAX_ATTEMPTS):  # it answers nothing, the broker orders its end, and its exit is seen
        world.advance(LEASE_S / 2)
        run(world)
    assert world.launches == first + MAX_ATTEMPTS - 1
    (letter,) = world.router.bus.mailbox.dead.values()
    assert "its lease ran out" in letter.work.cause


@pytest.mark.parametrize("crashes", [0, 1])
def test_an_agent_that_ends_while_it_starts_cannot_be_started(world: World, crashes: int) -> None:
    for _ in range(crashes):
        crash(world)
    for _ in range(MAX_START_FAILURES - 1):
        world.kill_agent(agent(world), started=False)
        run(world)
    last = agent(world)
    assert last.held is not None, "an agent is handed its event before it has loaded everything"
    failed = SpawnFailed(Principal("agent", last.name, last.key), MAX_START_FAILURES, "exit 3")
    world.supervisor.send(Frame("runtime.event", payload=to_raw(failed)))
    world.kill_agent(last, started=False)
    run(world)
    assert world.clients[0].error_of("e1") == "E_AGENT_SPAWN_FAILED"
    assert list(world.router.bus.mailbox.dead) == ["e1"]
    world.clients[0].ask("e2")
    world.settle()
    assert world.state("e2") == "done"


@pytest.mark.parametrize(("position", "restarts"), [(None, True), (3, False), (3, True)])
def test_attempts_are_counted_unless_a_holder_gets_beyond_where_one_was_before(
    world: World, position: int | None, restarts: bool
) -> None:
    for _ in range(MAX_ATTEMPTS if position is None else MAX_ATTEMPTS + 1):
        assert world.state("e1") == "leased"
        holder = agent(world)
        if position is not None:
            epoch = there(holder.held).epoch
            holder.send(Frame("ack", stage="renew", event_id="e1", epoch=epoch, position=position))
            run(world)
        crash(world)
        if restarts:
            world.kill_broker()
            run(world)
    assert list(world.router.bus.mailbox.dead) == ["e1"]
    assert world.clients[0].error_of("e1") == "E_AGENT_FAILED"


def test_a_holder_that_is_lost_while_its_end_is_written_leaves_no_record_behind_it(world: World) -> None:
    world.slow_disk = True
    world.host.work()
    for actor in (world.host, agent(world), agent(world)):  # the result, then the end
        world.flow(actor)
    assert world.router.bus.mailbox.events["e1"].ending
    world.kill_agent(agent(world))
    run(world)
    world.kill_broker()  # the next one reads what was written
    world.settle()
    assert world.state("e1") == "done"


def admin(world: World, op: str, **more: Any) -> dict[str, Any]:
    (frame,) = said(world, client(world), Frame("admin", id="q", payload=to_raw({"op": op, **more})))
    if frame.type == "error":
        return {"error": from_raw(frame.payload, ErrorPayload).code}
    return from_raw(frame.payload, dict)


# --- a full disk


def test_a_full_disk_refuses_new_events_and_ends_old_ones() -> None:
    world = World()
    world.clients[0].ask("e1", calls=0)
    run(world)
    world.full = True
    world.clients[0].ask("e2", calls=0)
    run(world)
    assert world.clients[0].errors == {"e2": "E_DISK_FULL"}
    assert world.state("e1") == "done"
    assert "e2" not in world.router.bus.mailbox.events
    world.full = False
    world.clients[1].ask("e3", calls=0)
    world.settle()
    assert world.state("e3") == "done"
    assert world.router.bus.mailbox.held.held == 0


# --- deadlines


def test_a_deadline_holds_on_the_boot_clock_and_after_a_reboot_on_the_wall_clock() -> None:
    deadline = Deadline("this boot", 1000.0, 1_700_000_000.0)
    assert Ledger("this boot", 1e9).on_clock(deadline) == 1000.0, "whatever the wall clock was set to"
    assert Ledger("the next", 1_699_999_990.0).on_clock(deadline) == 10.0


# --- what the tests above look at


def subjects(world: World) -> list[str]:
    return [row.subject for row in world.journal.rows()]


def test_an_answer_that_was_read_takes_no_memory_and_is_there_when_it_is_asked_for_again(world: World) -> None:
    connection = world.router.bus.presence.principals["agent/coder/k"]
    event = AgentEvent(id="r1", type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)
    frame = Frame("event", id="f", to="reviewer", instance_key="k", event_id="r1", payload=to_raw(event))
    frame.reply_to = ReplyTo("coder", "corr")
    said(world, connection, frame)
    run(world, 2)
    while world.state("r1") != "done":
        run(world, 1)
    known = world.router.bus.mailbox.events["r1"]
    first = known.work.answer
    said(world, connection, Frame("ack", id="a", stage="done", event_id="r1:answer"))
    assert (known.work.answer, first is not None) == (None, True)
    (again,) = [one for one in said(world, connection, frame) if one.in_reply_to == "corr"]
    assert again.payload == first


def test_the_answer_of_an_ended_event_is_given_to_its_own_sender_only() -> None:
    world = World()
    world.clients[0].ask("e1", calls=0)
    world.settle()
    world.clients[0].ask("e2", agent="reviewer", key="other", calls=0)
    run(world)
    (connection,) = (c for c in world.router.bus.presence.connections[AGENTS].values() if c.claims.agent == "reviewer")
    stolen = Frame("event", id="f", to="coder", instance_key="k", event_id="e1", payload=to_raw(1))
    stolen.reply_to = ReplyTo("reviewer", "c")
    answers = said(world, connection, stolen)
    assert [frame.type for frame in answers] == ["error"]
    assert from_raw(answers[0].payload, ErrorPayload).code == "E_FRAME_INVALID"


@pytest.mark.feature("dead_letters")
def test_an_event_for_an_agent_that_the_bundle_has_no_more_is_a_dead_letter() -> None:
    world = World()
    client = world.clients[0]
    client.ask("e1", agent="reviewer")
    while world.state("e1") != "accepted":
        assert world.pump_up(client) or world.pump_down(client)
    agents = world.plan.agents
    world.plan = msgspec.structs.replace(world.plan, agents={"coder": agents["coder"]})
    world.kill_broker()
    world.settle()
    assert client.errors == {"e1": "E_AGENT_NOT_FOUND"}
    assert admin(world, "dead.requeue", eventId="e1") == {"error": "E_AGENT_NOT_FOUND"}
    world.plan = msgspec.structs.replace(world.plan, agents=agents)
    world.kill_broker()
    assert admin(world, "dead.requeue", eventId="e1")["state"] == "requeued"
    world.settle()
    assert world.stores["reviewer", "k"].completed == ["e1~requeued"]


# --- a kernel that stops


@pytest.mark.parametrize(("reason", "told"), [("orchestrator_shutdown", True), ("restart", False)])
def test_who_sends_something_new_to_a_kernel_that_stops_is_told_so(reason: Any, told: bool) -> None:
    world = World()
    client = world.clients[0]
    client.ask("accepted")
    run(world)
    world.supervisor.send(Frame("runtime.event", payload=to_raw(Drain(2500, reason))))
    world.goes_up(world.supervisor)
    client.ask("new")
    world.goes_up(client)
    while client.wire.down:  # but for the shutdown, which is for its session
        data = client.wire.down.popleft()
        if data and decode(data).type != "shutdown":
            client.receive(data)
    assert client.errors == ({"new": "E_KERNEL_NOT_RUNNING"} if told else {})

    # What was accepted before is no news, whoever repeats it: it is acknowledged, so its sender knows that it is kept.
    world.clients[1].ask("accepted")
    world.goes_up(world.clients[1])
    frames = [decode(data) for data in world.clients[1].wire.down if data]
    assert [(frame.type, frame.event_id) for frame in frames] == [("shutdown", None), ("ack", "accepted")]


def test_the_supervisor_hears_of_each_agent_that_has_said_goodbye() -> None:
    world = World()
    world.clients[0].ask("e1")
    run(world)
    (agent,) = world.agents.values()
    agent.send(Frame("shutdown_ack", id="before"))
    world.goes_up(agent)
    world.supervisor.send(Frame("runtime.event", payload=to_raw(Drain(2500, "orchestrator_shutdown"))))
    world.goes_up(world.supervisor)
    world.goes_down(world.supervisor)
    assert not world.supervisor.retired
    agent.send(Frame("shutdown_ack", id="bye"))
    world.goes_up(agent)
    world.goes_down(world.supervisor)
    assert [order.launch for order in world.supervisor.retired] == [agent.launch]


def test_an_agent_that_was_restarted_after_its_step_has_not_said_goodbye_when_a_stop_follows() -> None:
    world = World()
    world.clients[0].ask("e1")
    run(world)
    (agent,) = world.agents.values()
    assert world.state("e1") == "leased"
    for message in (RestartAgents(["coder"], 8000), Drain(2500, "orchestrator_shutdown")):
        world.supervisor.send(Frame("runtime.event", payload=to_raw(message)))
    world.goes_up(world.supervisor)
    world.goes_down(world.supervisor)
    assert [order.done for order in world.supervisor.retired] == [False]  # its step goes on, and may call tools
    agent.send(Frame("shutdown_ack", id="bye"))
    world.goes_up(agent)
    world.goes_down(world.supervisor)
    assert [order.done for order in world.supervisor.retired] == [False, True]
