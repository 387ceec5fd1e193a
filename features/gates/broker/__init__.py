"""Answers the frames about gates, and gives back what connections held that are gone. Pure; gate.py has the rules.

- Which gate a request goes through follows from the agent's own models: their endpoint and the digest of the key. No
  frame can name another's.
- A permit belongs to a connection that works on an event. When the process or its lease is gone, so is the permit.
- A broker that takes another's place learns from `hello` which requests are out. What was learned comes back with it,
  as an agent has kept it; the broker's own signature is on it.

Source: docs/design/turns.md section 13; docs/decisions/107; PROTOCOL-AGENTS.md "Gates".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from goondan.features.gates import wire
from goondan.features.gates.broker.gate import Ask, Gate, Key, Lesson
from goondan.kernel.broker.state.bus import Bus, Core, overloaded
from goondan.kernel.broker.state.entities import AGENTS, Connection, Event
from goondan.kernel.broker.state.parts import LIST_BYTES, SHORT_BYTES, Op, Part, Take, Waiting, fitting
from goondan.schemas.bundle.launch import KernelPlan, ModelSpec
from goondan.schemas.models.model_providers import BY_NAME, ModelLimits
from goondan.schemas.text.times import age
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import Frame, Hello

#: Requests of one connection that wait or are out. A turn makes one model call at a time, and extensions ask beside it.
MAX_REQUESTS: Final = 8
#: For so long after its start (seconds) the broker believes since when a request waits: it waited at another one.
RETURN_S: Final = 10.0
#: The longest wait of a request that is believed (seconds).
MAX_WAITED_S: Final = 24 * 3600.0
#: How often agents whose askers listen are told of their places (seconds).
NEWS_S: Final = 1.0
#: A state of another broker that is older than this (seconds) is not used: its minutes are over.
STATE_S: Final = 120.0
#: Models that are named of one gate.
MAX_NAMED_MODELS: Final = 20
_MAC_BYTES: Final = 16
T = TypeVar("T")


class _Kept(Struct, frozen=True, array_like=True):
    """What an agent keeps for a broker that takes this one's place."""

    #: Names the gate.
    gate: bytes
    #: When it was so (CLOCK_BOOTTIME, seconds).
    at: float
    #: What was learned.
    lesson: Lesson
    #: Requests of the last minute.
    requests: int
    #: Tokens of the last minute.
    tokens: int


class _Asked(Struct):
    """Who waits for an ask."""

    #: The process that asked, by its incarnation: its connection may be another one meanwhile.
    incarnation: str
    #: The frame to answer.
    frame_id: str
    #: The event that it works on.
    event: Event


class _Way(Struct):
    """A gate, and the limits that it was made with."""

    #: The gate.
    gate: Gate
    #: The limits that its Model documents write.
    limits: ModelLimits
    #: Whether its agents were told that they have to ask.
    told: bool = False
    #: When its state was another broker's (CLOCK_BOOTTIME, seconds); 0: it never was.
    inherited_at: float = 0.0


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Gates(core.bus),)


class Gates(Part):
    """The gates of the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._began = bus.now
        #: Agent -> name of a Model document -> name of its gate.
        self._names: dict[str, dict[str, bytes]] = {}
        self._ways: dict[bytes, _Way] = {}
        #: Who has the requests that wait or are out: by the address of the process, and their ids.
        self._asked: dict[str, dict[str, _Asked]] = {}
        self._next_news = 0.0
        self.takes = (
            Take((AGENTS,), "model.permit", self.ask, SHORT_BYTES),
            Take((AGENTS,), "model.over", self.over, SHORT_BYTES),
            Take((AGENTS,), "model.out", self.out, SHORT_BYTES),
        )
        self.ops = (Op("gates", self.tell),)
        self.revise(bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """Use the models of `plan` from now on."""
        limits: dict[bytes, ModelLimits] = {}
        self._names = {}
        for spec in plan.agents.values():
            names = self._names[spec.name] = {}
            for index, model in enumerate(spec.models):
                if model.provider not in BY_NAME:
                    continue  # no server is asked
                name = gate_name(model)
                limits[name] = _stricter(limits.get(name), model.limits)
                names.setdefault(model.document, name)
                if index == 0:
                    names[""] = name
        for name, written in limits.items():
            way = self._ways.get(name)
            if way is None:
                self._ways[name] = _Way(Gate(written), written, told=Gate(written).limited)
            elif way.limits != written:
                way.limits = way.gate.limits = written
                self._tell_all(way)
        for name in self._ways.keys() - limits.keys():
            if not self._ways[name].gate.permits and not self._ways[name].gate.queue:
                del self._ways[name]

    def welcome(self, peer: Connection) -> dict[str, Any]:
        """The names of the agent's models whose requests have to ask."""
        if peer.cls != AGENTS:
            return {}
        names = self._names.get(peer.claims.agent or "", {})
        limited = [document for document, name in names.items() if (way := self._ways.get(name)) and way.told]
        return {"limited": limited}

    # --- frames

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`model.permit`: a request wants to go out, perhaps again."""
        event = _leased(connection, frame)
        request = from_raw(frame.payload, wire.PermitAsk)
        way, key = self._way(connection, request.model), (connection.address, request.id)
        gate = way.gate
        if request.refused is None and not gate.limited:
            self._bus.reply(connection, frame.id, wire.PermitGranted(open=True))
            return
        ask = self._new_ask(gate, key, event, request, now)
        self._asked.setdefault(key[0], {})[key[1]] = _Asked(connection.incarnation, frame.id, event)
        gate.ask(ask)
        self._tell_all(way)
        self._serve(way, now)

    def _new_ask(self, gate: Gate, key: Key, event: Event, request: wire.PermitAsk, now: float) -> Ask:
        """The ask in the line. A repeat, and a request that was refused, keep their place. Raises GoondanError."""
        since = now
        if request.asked_ms is not None and now - self._began < RETURN_S:
            since = min(now, max(now - MAX_WAITED_S, request.asked_ms / 1000))
        patience_s, not_before = request.patience_ms / 1000, 0.0
        known = gate.queue.get(key)
        if known is not None:
            since = known.since
        elif self._count(key[0]) - (key in gate.permits) >= MAX_REQUESTS:
            raise overloaded(f"a process has at most {MAX_REQUESTS} requests to models")
        if request.refused is not None and (key in gate.permits or not gate.limited):
            wait_s = None if request.refused.wait_ms is None else request.refused.wait_ms / 1000
            held = gate.refused(key, wait_s, now)
            since = since if held is None else held.since
            not_before = now + (wait_s or 0.0)
            self._bus.counters["model_refusals"] += 1
        elif key in gate.permits:  # its grant was lost with a connection
            since = gate.permits[key].since
            gate.withdraw(key)
        return Ask(key, event.root, since, request.tokens, patience_s, not_before)

    def over(self, connection: Connection, frame: Frame, now: float) -> None:
        """`model.over`: a request is over, or was given up."""
        said = from_raw(frame.payload, wire.PermitOver)
        way, key = self._way(connection, said.model), (connection.address, said.id)
        self._forget(key)
        if not way.gate.limited:
            way.gate.withdraw(key)
            if said.limits is not None:
                _leased(connection, frame)
                way.gate.warned(key, said.limits, now)
                self._tell_all(way)
            return
        way.gate.over(key, now, accepted=said.accepted, tokens=said.tokens, news=said.limits)
        self._serve(way, now)

    def out(self, connection: Connection, frame: Frame, now: float) -> None:
        """`model.out`: a request that went through an open gate is still out."""
        self._is_out(connection, _leased(connection, frame), from_raw(frame.payload, wire.HeldPermit), now)

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """An agent has said hello. It keeps the permits that it names, and its asks come again by themselves."""
        if peer.cls != AGENTS:
            return
        address = peer.address
        for way in self._ways.values():
            for key in [key for key in way.gate.permits if key[0] == address]:
                self._free(way.gate, key)
        for kept in _read(hello.gates[:MAX_REQUESTS], wire.KeptState):
            self._inherit(peer, kept.model, kept.state, now)
        event = None if peer.instance is None else peer.instance.leased
        if event is not None:
            for held in _read(hello.permits[:MAX_REQUESTS], wire.HeldPermit):
                self._is_out(peer, event, held, now)

    def tick(self, now: float) -> None:
        """Free what the dead held, let out what is due, and tell those whose askers listen of their places."""
        news = now >= self._next_news
        if news:
            self._next_news = now + NEWS_S
        for way in self._ways.values():
            gate = way.gate
            if not gate.limited and not gate.permits:
                continue
            for key in [*gate.permits, *(ask.key for ask in gate.queue)]:
                if not self._lives(key):
                    self._free(gate, key)
            for permit in gate.expired(now):
                self._bus.notices.append(f"a model request of {permit.key[0]} is out for too long: its permit ended")
                self._free(gate, permit.key)
            self._give_up(gate, now)
            gate.forget_old(now)
            self._serve(way, now)
            if news and gate.queue:
                self._tell_places(gate, now)
            self._tell_all(way)

    def waiting(self, now: float) -> Iterator[Waiting]:
        """The events whose requests wait: how many go out before each, and for how long nobody does."""
        for way in self._ways.values():
            places = way.gate.queue.places()
            for ask in way.gate.queue:
                if (asked := self._who(ask.key)) is not None:
                    before, held_s = places.get(ask.key, 0), max(0.0, way.gate.held_until(now) - now)
                    words = [f"{before} before it"] if before else []
                    words += [f"held back for {age(held_s)} by the limit of its server"] if held_s >= 1 else []
                    text = f"waits for its model: {', '.join(words) or 'it is next'}"
                    more = {"before": before, "heldMs": round(1000 * held_s), "text": text}
                    yield Waiting("model", asked.event, ask.since, more)

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "gates"}`: what was learned of each server, since when and why; `…Ms` are milliseconds that something
        has lasted. With `forget` it is forgotten.
        """
        rows = []
        for name, way in self._ways.items():
            learned = way.gate.learned
            if learned.refused_at is None:
                continue
            documents = {document for names in self._names.values() for document, its in names.items() if its == name}
            times = {
                "learnedMs": now - learned.since,
                "lastMs": now - learned.refused_at,
                "heldMs": way.gate.held_until(now) - now,
                "refusingMs": now - (now if learned.refusing_since is None else learned.refusing_since),
            }
            row: dict[str, Any] = {
                "models": sorted(documents - {""})[:MAX_NAMED_MODELS],
                "concurrent": learned.concurrent,
                "perMinute": None if learned.rate is None else round(60 * learned.rate, 1),
                "refusals": learned.refusals,
            }
            rows.append(row | {field: max(0, round(1000 * seconds)) for field, seconds in times.items()})
            if asked.get("forget") is True:
                way.gate.forget()
                for ask in way.gate.queue:
                    ask.not_before = 0.0
                self._tell_all(way)
                self._serve(way, now)
        self._bus.reply(connection, frame.id, {"gates": fitting(rows, LIST_BYTES)})

    # --- inside

    def _way(self, connection: Connection, document: str) -> _Way:
        agent = connection.claims.agent or ""
        name = self._names.get(agent, {}).get(document)
        if name is None or name not in self._ways:
            raise fail("E_FORBIDDEN", f"agent {agent!r} has no model {document[:80]!r} that is asked over a gate")
        return self._ways[name]

    def _serve(self, way: _Way, now: float) -> None:
        """Let out what may go now."""
        gate = way.gate
        while taken := gate.take(now):
            for permit in taken:
                self._grant(way, permit, now)

    def _grant(self, way: _Way, permit: Ask, now: float) -> None:
        asked = self._who(permit.key)
        connection = None if asked is None else self._connection(permit.key, asked)
        if asked is None or connection is None:
            self._free(way.gate, permit.key)
            return
        self._bus.reply(
            connection, asked.frame_id, wire.PermitGranted(state=self._state(way, now), others=permit.others)
        )

    def _give_up(self, gate: Gate, now: float) -> None:
        since = gate.learned.refusing_since
        for ask in gate.given_up(now):
            asked = self._who(ask.key)
            self._forget(ask.key)
            connection = None if asked is None else self._connection(ask.key, asked)
            if asked is not None and connection is not None:
                message = f"the model server has refused every request for {now - (since or now):.0f} s"
                info = error_payload("E_MODEL_FAILED", message)
                self._bus.error(connection.cls, connection.ident, info, Frame("model.permit", id=asked.frame_id))

    def _is_out(self, connection: Connection, event: Event, held: wire.HeldPermit, now: float) -> None:
        way, key = self._way(connection, held.model), (connection.address, held.id)
        if key in way.gate.permits or self._count(key[0]) >= MAX_REQUESTS:
            return
        self._asked.setdefault(key[0], {})[key[1]] = _Asked(connection.incarnation, "", event)
        out_since = now - held.out_ms / 1000
        way.gate.is_out(Ask(key, event.root, out_since, out_since=out_since))

    def _inherit(self, connection: Connection, document: str, state: str, now: float) -> None:
        """Take over what another broker has learned, unless something newer is known."""
        name = self._names.get(connection.claims.agent or "", {}).get(document)
        way = None if name is None else self._ways.get(name)
        kept = self._read_state(state)
        if way is None or kept is None or kept.gate != name or not now - STATE_S < kept.at <= now:
            return
        if kept.at <= way.inherited_at or kept.at >= self._began or now - self._began > RETURN_S:
            return
        first = way.inherited_at == 0.0
        way.inherited_at = kept.at
        way.gate.take_over(kept.lesson, kept.requests if first else 0, kept.tokens if first else 0, now)
        self._tell_all(way)

    def _state(self, way: _Way, now: float) -> str:
        name = next((name for name, other in self._ways.items() if other is way), b"")
        lesson, requests, tokens = way.gate.lesson(now)
        body = msgspec.msgpack.encode(_Kept(name, now, lesson, requests, tokens))
        return base64.b64encode(self._sign(body) + body).decode()

    def _read_state(self, state: str) -> _Kept | None:
        try:
            signed = base64.b64decode(state, validate=True)
            mac, body = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
            return msgspec.msgpack.decode(body, type=_Kept) if hmac.compare_digest(mac, self._sign(body)) else None
        except (ValueError, msgspec.MsgspecError):
            return None  # no base64, or of another version

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._bus.secret, b"gate\0" + body, hashlib.sha256)[:_MAC_BYTES]

    def _connection(self, key: Key, asked: _Asked) -> Connection | None:
        """The connection of the process that asked; None when it is gone."""
        connection = self._bus.presence.principals.get(key[0])
        return connection if connection is not None and connection.incarnation == asked.incarnation else None

    def _lives(self, key: Key) -> bool:
        """Whether the process is there and still works on its event."""
        asked = self._who(key)
        if asked is None:
            return False
        connection = self._connection(key, asked)
        return connection is not None and asked.event.instance.leased is asked.event

    def _free(self, gate: Gate, key: Key) -> None:
        self._forget(key)
        gate.withdraw(key)

    def _forget(self, key: Key) -> None:
        requests = self._asked.get(key[0], {})
        requests.pop(key[1], None)
        if not requests:
            self._asked.pop(key[0], None)

    def _who(self, key: Key) -> _Asked | None:
        return self._asked.get(key[0], {}).get(key[1])

    def _count(self, address: str) -> int:
        return len(self._asked.get(address, ()))

    def _tell_all(self, way: _Way) -> None:
        """Tell every agent of a gate whether its requests have to ask, if that has changed."""
        limited = way.gate.limited
        if limited == way.told:
            return
        way.told = limited
        for connection in self._bus.presence.connections[AGENTS].values():
            for document, name in self._names.get(connection.claims.agent or "", {}).items():
                if self._ways.get(name) is way:
                    changed = to_raw(wire.GateChanged(document, limited))
                    self._bus.send(connection, Frame("model.gate", payload=changed))

    def _tell_places(self, gate: Gate, now: float) -> None:
        places = gate.queue.places()
        held_ms = max(0, round((gate.held_until(now) - now) * 1000))
        for key, place in places.items():
            asked = self._who(key)
            connection = None if asked is None or not asked.event.work.tells else self._connection(key, asked)
            if asked is not None and connection is not None:
                told = wire.PlaceInLine(key[1], place, held_ms)
                self._bus.send(connection, Frame("model.line", event_id=asked.event.id, payload=to_raw(told)))


def _read(said: list[Any], kind: type[T]) -> list[T]:
    """What `hello` says, in its form. What does not fit is as if it were not said: an agent can say nothing, too."""
    try:
        return msgspec.convert(said, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError:
        return []


def gate_name(model: ModelSpec) -> bytes:
    """Names the gate of a model: a digest of its server's address and of the key, also of one in a header."""
    server = model.endpoint or BY_NAME[model.provider].server
    headers = sorted(model.headers.items())
    parts = (server.rstrip("/"), model.api_key or "", *(text for pair in headers for text in pair))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).digest()[:16]


def _leased(connection: Connection, frame: Frame) -> Event:
    """The event that the agent works on. Raises GoondanError E_LEASE_LOST."""
    instance = connection.instance
    event = None if instance is None else instance.leased
    if instance is None or event is None or event.id != frame.event_id or instance.epoch != frame.epoch:
        raise fail("E_LEASE_LOST", "a model request needs the lease of its event")
    return event


def _stricter(one: ModelLimits | None, other: ModelLimits | None) -> ModelLimits:
    """The lower of two Models' limits to one server."""
    return ModelLimits(
        **{
            name: min(
                (value for limits in (one, other) if (value := getattr(limits, name, None)) is not None), default=None
            )
            for name in ModelLimits.__struct_fields__
        }
    )
