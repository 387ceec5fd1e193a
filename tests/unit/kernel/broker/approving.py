"""A router whose agent `coder` is gated, with peers that say exactly what a test wants them to say."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from msgspec import Raw, structs

from goondan.features import FEATURES
from goondan.kernel.broker.__main__ import features
from goondan.kernel.broker.routing.deletions import Moved
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.ledger import Ledger
from goondan.kernel.broker.state.mailbox import Epochs
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.frames import (
    AgentEvent,
    Answer,
    AttachedServer,
    Frame,
    Hello,
    Lease,
    ReplyTo,
    ToolCallPayload,
)
from goondan.schemas.wire.tokens import Claims, mint
from tests.unit.kernel.broker.memory_journal import MemoryJournal
from tests.unit.kernel.broker.swarm import TOOL, plan
from tests.unit.kernel.broker.world import restored

SECRET = b"s" * 32
ASK: dict[str, Any] = {"rules": [{"tools": ["bash__*"], "action": "ask", "expiresAfter": "1h"}]}


class NoFolders:
    """No instance has a folder here."""

    def exists(self, agent: str, key: str) -> bool:
        return False

    def move(self, agent: str, key: str, keep_workdir: bool) -> None:
        raise AssertionError("nothing is deleted here")

    def moved(self) -> list[Moved]:
        return []


def policy(config: dict[str, Any]) -> Any:
    found, problems = import_module("goondan.features.approvals.wire").read_policy("approval", config)
    assert not problems
    return found


def rules(config: dict[str, Any]) -> dict[str, Raw]:
    """The part of an agent's specification. In a tree without the feature nothing is gated."""
    there = any(feature.name == "approvals" for feature in FEATURES)
    return {"approvals": to_raw([policy(config)])} if there else {}


class Peer:
    """One connection. `got` is what came and was not looked at."""

    def __init__(self, bench: Bench, cls: int, claims: Claims, incarnation: str) -> None:
        self.bench, self.cls, self.claims, self.incarnation = bench, cls, claims, incarnation
        self.ident = b""
        self.got: list[Frame] = []
        self.count = 0

    def hello(self, leases: Sequence[Lease] = (), attached: Sequence[AttachedServer] = ()) -> Peer:
        self.ident = f"{self.incarnation}-{self.bench.idents}".encode()
        self.bench.idents += 1
        self.bench.peers[self.cls, self.ident] = self
        started = int(self.bench.now * 1000)
        token = mint(SECRET, self.claims)
        said = Hello(token, self.incarnation, leases=list(leases), attached=list(attached), started_ms=started)
        payload = to_raw(said)
        self.bench.router.stranger(
            self.cls, self.ident, encode(Frame("hello", id="h", payload=payload)), self.bench.now
        )
        self.bench.flush()
        return self

    def say(self, frame: Frame) -> list[Frame]:
        """Send; what came back to this peer since it was asked last."""
        self.count += 1
        frame.id = frame.id or f"{self.incarnation}.{self.count}"
        bench = self.bench
        known = bench.router.bus.presence.connections[self.cls].get(self.ident)
        assert known is not None, "this peer has not said hello"
        bench.router.receive(known, encode(frame), bench.now)
        bench.flush()
        return self.take()

    def take(self, kind: str | None = None) -> list[Frame]:
        found = [frame for frame in self.got if frame.type != "ping" and kind in (None, frame.type)]
        self.got.clear()
        return found

    def admin(self, **asked: Any) -> Any:
        for frame in self.say(Frame("admin", payload=to_raw(asked))):
            if frame.type in ("reply", "error"):
                return from_raw(frame.payload, dict)
        raise AssertionError("no answer")

    def call(self, args: dict[str, Any], call_id: str = "t1/c1", event: str = "e1", **fields: Any) -> list[Frame]:
        epoch = fields.pop("epoch", None)
        instance = self.bench.instance(*self.who)
        payload = fields.pop("payload", None) or to_raw(
            ToolCallPayload(args=to_raw(args), turn_id="t1", tool_call_id="c1")
        )
        frame = Frame("tool.call", tool=TOOL, call_id=call_id, event_id=event, payload=payload, **fields)
        frame.epoch = instance.epoch if epoch is None else epoch
        return self.say(frame)

    def ack(self, stage: str, event: str = "e1", **fields: Any) -> list[Frame]:
        epoch = self.bench.instance(*self.who).epoch
        return self.say(Frame("ack", stage=stage, event_id=event, epoch=epoch, **fields))

    @property
    def who(self) -> tuple[str, str]:
        return self.claims.agent or "", self.claims.instance_key or ""


class Bench:
    """The router, its journal, and its peers. `now` is the broker's clock."""

    def __init__(self, config: dict[str, Any] = ASK, agents: Sequence[str] = ("coder", "reviewer")) -> None:
        self.now, self.idents, self.incarnations = 1000.0, 0, 0
        self.journal = MemoryJournal()
        base = plan()
        parts = rules(config)
        gated = {name: structs.replace(base.agents["coder"], name=name, parts=parts) for name in agents}
        self.plan: KernelPlan = structs.replace(base, agents={**base.agents, **gated})
        self.peers: dict[tuple[int, bytes], Peer] = {}
        self.full = False
        self.lost_writes = False
        self.router = self._router()

    def _router(self) -> Router:
        ms = int(self.now * 1000)
        bus = Bus(
            self.plan,
            SECRET,
            broker_id=f"b{ms}",
            started_ms=ms,
            epochs=Epochs(0, ms),
            archive=self.journal,
            ledger=Ledger("boot", 0.0),
        )

        return restored(Router(bus, NoFolders(), features()), list(self.journal.rows()))

    def restart(self) -> None:
        """kill -9 of the broker, and another one."""
        self.peers.clear()
        self.now += 1
        self.router = self._router()
        self.flush()

    def flush(self) -> None:
        bus = self.router.bus
        while bus.staged or bus.out:
            staged, bus.staged = bus.staged, []
            refused = frozenset(at for at, one in enumerate(staged) if self.full and one.item.refusable)
            if not self.lost_writes:
                self.journal.append([one.item for at, one in enumerate(staged) if at not in refused])
                self.router.settle(staged, self.now, refused)
            out, bus.out[:] = list(bus.out), []
            for cls, ident, data in out:
                peer = self.peers.get((cls, ident))
                if peer is not None:
                    peer.got.append(decode(data))
        assert not bus.faults, bus.faults

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick(self.now)
        self.flush()

    def instance(self, agent: str, key: str = "k") -> Any:
        return self.router.bus.mailbox.instances[agent, key]

    @property
    def items(self) -> dict[str, Any]:
        """The items that people are asked about, or have decided; none where that feature is not there."""
        return next((part.all for part in self.router.parts if type(part).__name__ == "Items"), {})  # type: ignore[attr-defined]

    # --- peers

    def agent(self, name: str = "coder", key: str = "k", leases: Sequence[Lease] = ()) -> Peer:
        self.incarnations += 1
        return Peer(self, 1, Claims("agent", agent=name, instance_key=key), f"a{self.incarnations}").hello(leases)

    def host(self) -> Peer:
        self.incarnations += 1
        return Peer(self, 2, Claims("toolhost"), f"t{self.incarnations}").hello()

    def client(self, *, operator: bool = True) -> Peer:
        self.incarnations += 1
        return Peer(
            self, 3, Claims("client", operator=operator, uid=1000 if operator else None), f"c{self.incarnations}"
        ).hello()

    def ask(self, client: Peer, event: str = "e1", agent: str = "coder", key: str = "k", **fields: Any) -> None:
        payload = to_raw(AgentEvent(id=event, type="user.message", created_at="now", input="x"))
        frame = Frame("event", to=agent, instance_key=key, event_id=event, payload=payload, **fields)
        frame.reply_to = ReplyTo("client", event)
        client.say(frame)


def answer() -> Any:
    ended = Answer(turn_id="t1", status="completed", response="done")
    return to_raw(AgentEvent(id="t1.answer", type="agent.response", created_at="now", answer=ended))


def code_of(frames: list[Frame]) -> str | None:
    """The code of the error frame, or of the error of the result, among these."""
    for frame in frames:
        if frame.type == "error":
            return str(from_raw(frame.payload, dict)["code"])
        if frame.type == "tool.result":
            error = from_raw(frame.payload, dict).get("error")
            return None if error is None else str(error["code"])
    return None
