"""The processes of world.py: what each does with what it is given."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, CONTROL, TOOLS
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.control import (
    CheckBundle,
    Exited,
    ForFeature,
    Inventory,
    Principal,
    Ready,
    RestartDue,
    Retire,
    Running,
    ToSupervisor,
    Wanted,
)
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import (
    ORCHESTRATOR,
    AgentEvent,
    Answer,
    FilePart,
    Frame,
    InstanceEnd,
    InstanceEnded,
    Lease,
    ReplyTo,
)
from goondan.schemas.wire.peer import Deliver, Greet, LinkRefused, Peer, Reply, Settled, Welcomed, encode_reference
from goondan.schemas.wire.runtime_events import Gap, RuntimeEvent
from goondan.schemas.wire.tokens import Claims, mint
from tests.checks import there
from tests.unit.kernel.broker.swarm import TOOL

if TYPE_CHECKING:
    from tests.unit.kernel.broker.world import World

SECRET = b"s" * 32


class Wire:
    """One connection between an actor's peer and the broker."""

    def __init__(self, world: World, cls: int, actor: Actor) -> None:
        self.world = world
        self.cls = cls
        self.actor = actor
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.ident = b""
        self.connect()

    def connect(self) -> None:
        self.world.idents += 1
        self.ident = b"ident-%010d" % self.world.idents
        self.world.wires[(self.cls, self.ident)] = self
        self.up.clear()
        self.down.clear()
        self.up.append(b"")  # libzmq's probe

    def cut(self, *, reconnect: bool) -> None:
        self.world.wires.pop((self.cls, self.ident), None)
        self.up.clear()
        self.down.clear()
        if reconnect:
            self.connect()


class Actor:
    """A process with one link. Subclasses say what it does with what it is given."""

    def __init__(self, world: World, cls: int, claims: Claims) -> None:
        world.incarnations += 1
        self.world = world
        self.peer = Peer(mint(SECRET, claims), f"inc{world.incarnations}", started_ms=int(world.now * 1000))
        self.wire = Wire(world, cls, self)
        self.alive = True

    def leases(self) -> list[Lease]:
        return []

    def calls(self) -> list[str]:
        return []

    def on_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def on_settled(self, settled: Settled) -> None:
        raise NotImplementedError

    def on_welcome(self) -> None:
        """The link is ready (again)."""

    def send(self, frame: Frame) -> None:
        if self.peer.phase == "ready":
            frame.id = frame.id or self.peer.next_id()
            data = encode(frame)
            if self.peer.goes_by_reference(frame, len(data)):
                data = encode_reference(frame, self.world.write(frame))
            self.wire.up.append(data)

    def submit(self, kind: Any, frame: Frame, waiter: Any, patience_s: float | None = None) -> None:
        data = self.peer.submit(kind, frame, waiter, self.world.now, patience_s)
        if data is not None:
            self.wire.up.append(data)
        for entry in self.peer.take_unwritten():
            assert self.peer.written(entry, self.world.write(frame))
        self.flush()

    def flush(self) -> None:
        while (entry := self.peer.sendable(self.world.now)) is not None:
            self.wire.up.append(entry.data)

    def receive(self, data: bytes) -> None:
        frame = decode(data)
        if frame.blob is not None and self.peer.awaits(frame):
            self.world.read(frame)
        outcome = self.peer.receive(frame, self.world.now)
        if isinstance(outcome, Settled):
            if outcome.reply is not None:
                self.wire.up.append(outcome.reply)
            self.on_settled(outcome)
        elif isinstance(outcome, Deliver):
            self.on_frame(outcome.frame)
        elif isinstance(outcome, Reply):
            self.wire.up.append(outcome.data)
        elif isinstance(outcome, Greet):
            self.wire.up.append(self.peer.hello(self.world.now, leases=self.leases(), calls=self.calls()))
        elif isinstance(outcome, Welcomed):
            self.on_welcome()
        elif isinstance(outcome, LinkRefused):
            self.alive = False
        self.flush()

    def tick(self) -> None:
        settled, greet = self.peer.tick(self.world.now)
        for item in settled:
            self.on_settled(item)
        if greet:
            self.wire.up.append(self.peer.hello(self.world.now, leases=self.leases(), calls=self.calls()))
        self.flush()


class Client(Actor):
    """Asks, and counts the answers. What it hears of running turns must be of its own, and wanted."""

    def __init__(self, world: World) -> None:
        super().__init__(world, CLIENTS, Claims("client", operator=True))
        self.asked: list[str] = []
        self.answers: dict[str, list[AgentEvent]] = {}
        self.errors: dict[str, str] = {}
        #: Event id -> how it had ended, for each question to cancel it; and how often that was asked.
        self.ended: dict[str, list[str]] = {}
        self.cancels: dict[str, int] = {}
        #: What was said to questions for a deletion.
        self.deleted: dict[str, str] = {}
        self.asks = 0
        #: Event id -> the epochs under which it was spoken of, in the order of hearing.
        self.heard: dict[str, list[int]] = {}
        #: It observes all turns, with a window of so many events; 0: it does not. What it was told, and of each
        #: subscription of this connection the last number.
        self.observes = 0
        self.observed: list[Frame] = []
        self.numbers: dict[str | None, int] = {}

    def ask(
        self,
        event_id: str,
        agent: str = "coder",
        key: str = "k",
        calls: int = 1,
        *,
        live: bool = False,
        files: list[FilePart] | None = None,
    ) -> None:
        event = AgentEvent(id=event_id, type="user", created_at="2026-01-01T00:00:00Z", input=calls)
        self.asked.append(event_id)
        self.world.asked_of[event_id] = (agent, key)
        frame = Frame(
            "event",
            to=agent,
            instance_key=key,
            event_id=event_id,
            reply_to=ReplyTo("client", "corr-" + event_id),
            payload=to_raw(event),
            live=live,
            files=files,
        )
        if live:
            self.heard[event_id] = []
        self.submit("ask", frame, event_id)

    def cancel(self, event_id: str) -> None:
        self.cancels[event_id] = self.cancels.get(event_id, 0) + 1
        frame = Frame("admin", payload=to_raw({"op": "cancel", "eventId": event_id}))
        self.submit("post", frame, ("cancel", event_id))

    def delete(self, key: str, *, agent: str = "coder", force: bool = False) -> str:
        """Have an instance deleted; `deleted` has what was said, under the name that this returns."""
        self.asks += 1
        question = f"{agent}/{key}#{self.asks}"
        asked = {"op": "instance.delete", "agent": agent, "instanceKey": key, "force": force}
        self.submit("post", Frame("admin", payload=to_raw(asked)), ("delete", question))
        return question

    def error_of(self, event_id: str) -> str:
        """The code with which the turn of an event of its own has failed."""
        return there(there(self.answers[event_id][0].answer).error).code

    def on_welcome(self) -> None:
        self.numbers = {}
        if self.observes:
            asked = {"op": "observe", "events": self.observes, "bytes": 1 << 20}
            self.submit("post", Frame("admin", payload=to_raw(asked)), ("observe",))

    def observe(self, frame: Frame) -> None:
        """Look whether numbers are missing that no gap names. Now and then, say what is read."""
        name, number = frame.in_reply_to, frame.position or 0
        if self.observed and self.observed[-1].id == frame.id:
            return  # it came twice
        self.observed.append(frame)
        first = from_raw(frame.payload, Gap).first if frame.stage == "gap" else number
        assert first == self.numbers.get(name, 0) + 1, f"{first} comes behind {self.numbers}"
        self.numbers[name] = number
        if len(self.observed) % 2 == 0 or frame.stage == "gap":
            self.send(Frame("observed", in_reply_to=name, position=number))

    def on_settled(self, settled: Settled) -> None:
        event_id = settled.entry.waiter
        if event_id == ("observe",):
            assert settled.error is None, settled.error
        elif isinstance(event_id, tuple) and event_id[0] == "delete":
            if settled.frame is not None:
                self.deleted[event_id[1]] = from_raw(settled.frame.payload, dict)["state"]
            elif settled.error is not None:
                self.deleted[event_id[1]] = f"{settled.error.code}: {settled.error.message}"
        elif isinstance(event_id, tuple):
            said = settled.error.code if settled.frame is None and settled.error is not None else None
            if said is None and settled.frame is not None:
                reply = from_raw(settled.frame.payload, dict)
                assert reply["eventId"] == event_id[1]
                said = reply["state"]
            self.ended.setdefault(event_id[1], []).append(said or "")
        elif settled.frame is not None:
            self.answers.setdefault(event_id, []).append(from_raw(settled.frame.payload, AgentEvent))
        elif settled.error is not None:
            self.errors[event_id] = settled.error.code

    def on_frame(self, frame: Frame) -> None:
        if frame.type == "observed":
            self.observe(frame)
            return
        assert frame.type == "runtime.event", f"a client was sent {frame.type}"
        heard = self.heard[frame.event_id or ""]
        assert frame.in_reply_to == f"corr-{frame.event_id}"
        event_id, _, epoch = (from_raw(frame.payload, RuntimeEvent).text or "").rpartition("@")
        assert event_id == frame.event_id, "somebody else's news"
        assert int(epoch) >= max(heard, default=0), "news of a holder that is gone"
        heard.append(int(epoch))


@dataclass
class Store:
    """What an instance has on its disk: it survives the agent, not only the link."""

    epoch: int = 0
    finished: dict[str, Any] = field(default_factory=dict)
    results: dict[str, dict[int, str]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    completed: list[str] = field(default_factory=list)
    #: Turn -> how its question ended: with its `answer`, or an answer that comes `later`.
    asked: dict[str, str] = field(default_factory=dict)


class Agent(Actor):
    """Runs turns: as many tool calls in a row as the event's input says, then `done`."""

    def __init__(self, world: World, name: str, key: str, launch: int) -> None:
        super().__init__(world, AGENTS, Claims("agent", agent=name, instance_key=key, launch=launch))
        self.name, self.key, self.launch = name, key, launch
        self.store = world.stores.setdefault((name, key), Store())
        self.held: Frame | None = None
        self.wanted_calls = 0
        self.open_call = ""
        #: Came before the end of what is held, which the broker ended without us.
        self.next: Frame | None = None

    def leases(self) -> list[Lease]:
        held = [frame for frame in (self.held, self.next) if frame is not None]
        return [Lease(frame.event_id or "", frame.epoch or 0, self.key, frame.root_event) for frame in held]

    def on_frame(self, frame: Frame) -> None:
        if frame.type == "shutdown":
            assert (frame.from_, frame.to) == (ORCHESTRATOR, self.name)
            self.world.kill_agent(self)
            return
        if frame.type == "tool.cancel":
            self.cancel(frame)
            return
        if frame.type == "listen":
            return
        assert frame.type == "event", frame.type
        if frame.asynchronous and frame.epoch is None:
            return  # news of a late answer, which comes as an event as well
        if self.held is not None and self.held.event_id not in self.store.finished:
            if frame.event_id != self.held.event_id:
                assert self.world.state(self.held.event_id or "") == "cancelled", "a second lease at a time"
                self.next = frame
                return
            self.held = frame
            return
        assert (frame.epoch or 0) >= self.store.epoch, "an epoch went back"
        self.store.epoch = frame.epoch or 0
        self.held = frame
        if frame.event_id not in self.store.finished:
            self.wanted_calls = 0 if frame.blob is not None else from_raw(frame.payload, AgentEvent).input
        if frame.blob is not None and frame.event_id not in self.store.finished:
            # A second hello crossed the delivery, and the broker ended the event meanwhile.
            event_id = frame.event_id or ""
            assert self.world.state(event_id) == "cancelled", "the payload is gone before its turn has ended"
            error = error_payload("E_BLOB_MISSING", "it is gone")
            self.finish(event_id, Answer(turn_id=event_id, status="failed", error=error))
        self.step()

    def step(self) -> None:
        """The next action of the turn; what it did is in the store before it is sent."""
        held = self.held
        if held is None:
            return
        event_id = held.event_id or ""
        self.tell(event_id, held.epoch or 0)
        results = self.store.results.setdefault(event_id, {})
        if event_id not in self.store.finished:
            asks = self.world.patience_s is not None and self.name == "coder" and not held.asynchronous
            if asks and event_id not in self.store.asked:
                self.ask(event_id)
                return
            for number in range(self.wanted_calls or 0):
                if number not in results:
                    self.call(event_id, number)
                    return
            self.finish(event_id, Answer(turn_id=event_id, status="completed", response=",".join(results.values())))
        finished = self.store.finished[event_id]
        stage = "done" if finished.answer.status == "completed" else "failed"
        frame = Frame("ack", stage=stage, event_id=event_id, epoch=held.epoch, payload=to_raw(finished))
        self.submit("post", frame, ("done", event_id))

    def ask(self, event_id: str) -> None:
        """Ask the reviewer of the same key, who calls a tool. Without the patience for that the answer is an event."""
        asked = f"{event_id}~q"
        frame = Frame("event", to="reviewer", instance_key=self.key, event_id=asked, reply_to=ReplyTo("coder", asked))
        told = AgentEvent(id=asked, type="agent.request", created_at="2026-01-01T00:00:00Z", input=1)
        frame.payload = to_raw(told)
        self.submit("ask", frame, ("asked", event_id), self.world.patience_s)

    def finish(self, event_id: str, answer: Answer) -> None:
        self.store.finished[event_id] = AgentEvent(
            id=event_id + "!", type="agent.response", created_at="2026-01-01T00:00:00Z", answer=answer
        )
        self.store.completed.append(event_id)

    def cancel(self, frame: Frame) -> None:
        """End the turn that this names, unless it has ended."""
        held = self.held
        if held is None or (held.event_id, held.epoch) != (frame.event_id, frame.epoch):
            return
        event_id = held.event_id or ""
        if event_id not in self.store.finished:
            forgotten = self.peer.forget(self.open_call)
            if forgotten is not None:
                self.send(Frame("tool.cancel", call_id=forgotten.call_id))
            self.finish(event_id, Answer(turn_id=event_id, status="failed", error=error_payload("E_CANCELLED", "no")))
            self.step()

    def tell(self, event_id: str, epoch: int) -> None:
        """News for the asker, and what nobody may hear: of another's event, and under an epoch that is over."""
        others = (asked for asked, of in self.world.asked_of.items() if of != (self.name, self.key))
        for about, under in ((event_id, epoch), (next(others, "c9e9"), epoch), (event_id, epoch - 1)):
            payload = to_raw(RuntimeEvent(kind="text", text=f"{event_id}@{under}"))
            self.send(Frame("runtime.event", event_id=about, epoch=under, payload=payload))

    def call(self, event_id: str, number: int) -> None:
        held = there(self.held)
        call_id = f"{self.name}/{self.key}/{event_id}/{number}"
        first = self.store.sent.setdefault(call_id, int(self.world.now * 1000))
        frame = Frame("tool.call", call_id=call_id, tool=TOOL, event_id=event_id, epoch=held.epoch, first_sent_ms=first)
        frame.payload = to_raw({"args": {}, "turnId": event_id, "toolCallId": str(number)})
        self.submit("call", frame, ("call", event_id, number))
        self.open_call = frame.id

    def on_settled(self, settled: Settled) -> None:
        what = settled.entry.waiter
        held = self.held
        if what[0] == "call" and held is not None and what[1] == held.event_id:
            if settled.frame is None:
                assert settled.error is not None
                assert settled.error.code in ("E_LEASE_LOST", "E_OVERLOADED"), settled.error
                if settled.error.code == "E_LEASE_LOST":
                    self.take_next()
                return
            result = from_raw(settled.frame.payload, dict)
            code = result["output"] if result["status"] == "ok" else result["error"]["code"]
            self.store.results[what[1]][what[2]] = str(code)
            self.send(Frame("ack", stage="result", calls=[settled.frame.call_id or ""]))
            self.step()
        elif what[0] == "asked" and held is not None and what[1] == held.event_id:
            assert settled.frame is not None, settled.error
            self.store.asked[what[1]] = "later" if settled.frame.type == "ack" else "answer"
            self.step()
        elif what[0] == "done" and held is not None and what[1] == held.event_id:
            self.take_next()
        elif what[0] == "bye" and settled.error is None:
            self.world.kill_agent(self)

    def take_next(self) -> None:
        """What was held is over."""
        self.held, after, self.next = None, self.next, None
        if after is not None:
            self.on_frame(after)

    def ask_to_leave(self) -> None:
        if self.held is None:
            self.submit("post", Frame("bye"), ("bye",))


class Host(Actor):
    """Runs calls once each, and keeps results until they are acknowledged. A result waits until `work` is called.

    Where the world's handlers ask, each call of `coder` asks another instance first, and ends with the answer.
    """

    def __init__(self, world: World, launch: int) -> None:
        super().__init__(world, TOOLS, Claims("toolhost", agent="1", launch=launch))
        self.launch = launch
        self.running: dict[str, Frame] = {}
        self.kept: dict[str, str] = {}
        self.ran: list[str] = []
        self.asking: dict[str, str] = {}  # callId -> the frame that is out
        self.heard: dict[str, str | None] = {}  # callId -> what was answered

    def calls(self) -> list[str]:
        return [*self.running, *self.kept]

    def on_frame(self, frame: Frame) -> None:
        if frame.type == "tool.call":
            call_id = frame.call_id or ""
            assert frame.from_ in ("coder", "reviewer")
            if call_id in self.kept:
                self.give(call_id)
            elif call_id not in self.running:
                assert frame.blob is None, "the arguments of a call are gone before it was run"
                self.ran.append(call_id)
                self.world.ran.append((self.launch, call_id))
                self.running[call_id] = frame
                if self.world.handlers_ask and frame.from_ == "coder":
                    self.ask(call_id)
        elif frame.type == "ack":
            for call_id in frame.calls or []:
                self.kept.pop(call_id, None)
        elif frame.type == "tool.cancel":
            self.running.pop(frame.call_id or "", None)
            self.peer.forget(self.asking.pop(frame.call_id or "", ""))
        elif frame.type == "instance.end":
            self.end(frame)

    def end(self, frame: Frame) -> None:
        """Nothing of an instance is to run here any more."""
        name = f"{frame.to}/{frame.instance_key}"
        mine = [call_id for call_id in self.running if call_id.startswith(f"{name}/")]
        if not from_raw(frame.payload, InstanceEnd).force:
            mine += self.world.background.get(name, [])
            if mine:
                self.send(Frame("reply", in_reply_to=frame.id, payload=to_raw(InstanceEnded(mine))))
                return
        for call_id in mine:
            del self.running[call_id]
        self.world.background.pop(name, None)
        if not self.world.jails_hang:
            self.send(Frame("reply", in_reply_to=frame.id, payload=to_raw(InstanceEnded())))

    def ask(self, call_id: str) -> None:
        """What a handler asks: of the other agent, or of its own with another key, without any call in that turn."""
        to = ("reviewer", "coder")[len(self.ran) % 2]
        event = AgentEvent(id=f"{call_id}~1", type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)
        frame = Frame("event", to=to, instance_key="asked", event_id=event.id, call_id=call_id, payload=to_raw(event))
        frame.reply_to = ReplyTo("coder", f"corr:{event.id}")
        self.submit("ask", frame, call_id)
        self.asking[call_id] = frame.id

    def run_out(self) -> None:
        """The deadline of calls that nobody waits for, because their cancelling was lost with a broker."""
        for call_id in [call_id for call_id in self.asking if self.world.router.bus.calls.get(call_id) is None]:
            self.peer.forget(self.asking.pop(call_id))
            del self.running[call_id]

    def work(self) -> None:
        for call_id in [call_id for call_id in self.running if call_id not in self.asking]:
            del self.running[call_id]
            self.kept[call_id] = f"ran{len(self.ran)}"
            self.give(call_id)

    def give(self, call_id: str) -> None:
        payload = to_raw({"status": "ok", "output": self.kept[call_id]})
        self.send(Frame("tool.result", call_id=call_id, payload=payload))

    def on_settled(self, settled: Settled) -> None:
        call_id = settled.entry.waiter
        assert settled.frame is not None, settled.error
        assert settled.frame.call_id == call_id
        assert call_id not in self.heard, "answered twice"
        answer = there(from_raw(settled.frame.payload, AgentEvent).answer)
        self.heard[call_id] = answer.error.code if answer.error is not None else None
        del self.asking[call_id]


class Supervisor(Actor):
    """Starts what is wanted, kills what it is told to, reports exits."""

    def __init__(self, world: World) -> None:
        super().__init__(world, CONTROL, Claims("control"))
        self.wanted: set[Principal] = set()
        self.backlog: list[Exited] = []
        #: Whether agents that start do not come to their end of it.
        self.loading = False
        #: What it heard about restarts, in order.
        self.restarts: list[CheckBundle | RestartDue] = []
        #: Processes that it was told to follow to their ends, in order.
        self.retired: list[Retire] = []
        #: What its halves of features heard, in order.
        self.for_features: list[ForFeature] = []

    def on_welcome(self) -> None:
        running = [Running(Principal("agent", a.name, a.key), a.launch) for a in self.world.agents.values()]
        self.send(Frame("runtime.event", payload=to_raw(Inventory(running))))
        for exited in self.backlog:
            self.send(Frame("runtime.event", payload=to_raw(exited)))
        self.backlog.clear()

    def on_frame(self, frame: Frame) -> None:
        import msgspec

        message = msgspec.msgpack.decode(frame.payload, type=ToSupervisor)
        if isinstance(message, CheckBundle | RestartDue):
            self.restarts.append(message)
        elif isinstance(message, ForFeature):
            self.for_features.append(message)
        elif isinstance(message, Wanted):
            self.wanted = set(message.principals) if message.full else self.wanted | set(message.principals)
        elif isinstance(message, Retire):
            self.retired.append(message)
            self.wanted.discard(message.principal)
        else:
            agent = self.world.agents.get((message.principal.name, message.principal.instance_key or ""))
            if agent is not None and agent.launch == message.launch:
                self.world.kill_agent(agent, ordered=True)

    def reconcile(self) -> None:
        for principal in sorted(self.wanted, key=lambda p: (p.name, p.instance_key or "")):
            key = (principal.name, principal.instance_key or "")
            if key not in self.world.agents:
                self.world.launches += 1
                self.world.agents[key] = Agent(self.world, *key, launch=self.world.launches)
                # Else the inventory will say so.
                if self.peer.phase == "ready" and not self.loading:
                    self.send(Frame("runtime.event", payload=to_raw(Ready(principal, self.world.launches))))

    def exited(self, principal: Principal, launch: int, *, ordered: bool = False, started: bool = True) -> None:
        self.wanted.discard(principal)
        message = Exited(principal, launch, "signal SIGKILL", ordered, started)
        if self.peer.phase == "ready":
            self.send(Frame("runtime.event", payload=to_raw(message)))
        else:
            self.backlog.append(message)

    def on_settled(self, settled: Settled) -> None:
        raise AssertionError("the supervisor posts nothing here")
