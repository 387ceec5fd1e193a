"""Who is connected, and for whom each connection may speak. Pure: identities and tokens in, connections out.

Rules.
- Authority is the token; its class must be the class of the socket that it came in on.
- A principal (an agent instance, a tool host, the supervisor) has one live connection. The same incarnation may
  come back over a new connection; another one is E_PRINCIPAL_BUSY while the first lives, unless its launch number
  is higher: the supervisor starts a launch only after it saw the one before end.
- The token of a launch that has ended is refused.

Source: docs/design/wire.md section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kernel.broker.launches import EndedLaunches
from schemas.errors import GoondanError, fail
from schemas.frames import PROTOCOL_VERSION, Frame, Hello
from schemas.tokens import Claims, TokenClass, verify

if TYPE_CHECKING:
    from kernel.broker.live import Allowance
    from kernel.broker.mailbox import Instance

#: The broker's sockets, by class; a connection's `cls` is an index into this.
CLASSES: Final[tuple[TokenClass, ...]] = ("control", "agent", "toolhost", "client")
CONTROL, AGENTS, TOOLS, CLIENTS = range(4)

#: Connected clients; more are refused, so that a loop of `gdn send` cannot fill the broker.
MAX_CLIENTS: Final = 4096
#: Of a client's incarnation, so many characters tell its session from others: it is kept with every event.
SESSION_CHARS: Final = 64
#: Characters of an incarnation: it is kept as long as its connection.
MAX_INCARNATION: Final = 256
#: Targets of one connection of which it is remembered that an event was refused; beyond them the order may be lost.
MAX_REFUSED: Final = 4096
#: So many refused events of a connection come back at once; for each further so many it is told to wait once as long.
REFUSED_AT_ONCE: Final = 16
#: The longest time that a refused sender is told to wait (milliseconds).
MAX_RETRY_MS: Final = 5000
#: A refused event that is so late (seconds) is not sent any more: what comes after it may come.
REFUSED_S: Final = 10.0


#: How the addresses of agents begin.
_AGENT: Final = "agent/"

Handler = Callable[["Connection", Frame, float], None]


class RefusedEvent(Struct):
    """The first event for a target that was refused. After `until` (the broker's clock) its sender has given it up."""

    event_id: str
    until: float


class Connection:
    """One welcomed connection."""

    __slots__ = (
        "address",
        "allowance",
        "allowed",
        "calls",
        "claims",
        "cls",
        "handlers",
        "ident",
        "incarnation",
        "instance",
        "last_seen",
        "pid",
        "refused",
        "session",
        "started_ms",
        "watched",
    )

    def __init__(self, cls: int, ident: bytes, address: str, claims: Claims, hello: Hello, now: float) -> None:
        self.cls = cls
        self.ident = ident
        self.address = address
        self.claims = claims
        self.incarnation = hello.incarnation
        #: What this peer sets going is counted under this name: a client keeps it over its reconnects.
        self.session = f"client/{self.incarnation[:SESSION_CHARS]}" if cls == CLIENTS else address
        self.started_ms = hello.started_ms or 0
        #: Tool hosts: the calls that it had when it said hello, running or with a result that is not acknowledged.
        self.calls: frozenset[str] = frozenset(hello.calls) if cls == TOOLS else frozenset()
        self.pid = hello.pid
        self.last_seen = now
        #: Somebody looks at `last_seen` now and then (quiet.py).
        self.watched = False
        #: What this connection may send, by frame type.
        self.handlers: dict[str, Handler] = {}
        #: Agents: the instance it serves, and the tools it may call.
        self.instance: Instance | None = None
        self.allowed: frozenset[str] = frozenset()
        #: Clients: how much live news it may get now; None before the first.
        self.allowance: Allowance | None = None
        #: target -> what was refused for overload first: later ones for it wait until that one is back.
        self.refused: dict[tuple[str, str], RefusedEvent] = {}

    @property
    def sender(self) -> str:
        """The principal whose frame and event ids are compared: all operator clients are one."""
        if self.cls == CLIENTS:
            return "client"
        return self.address

    def refuse(self, target: tuple[str, str], event_id: str, now: float, retry_ms: int) -> int:
        """An event for `target` was refused. Returns when it is to be sent again (milliseconds): the later, the more
        targets of this connection wait, so that a flood does not come back in a flood.
        """
        known = self.refused.get(target)
        if known is None or known.event_id == event_id or known.until <= now:
            known = self.refused[target] = RefusedEvent(event_id, 0.0)
        if len(self.refused) > MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
        retry_ms = min(MAX_RETRY_MS, retry_ms * (1 + len(self.refused) // REFUSED_AT_ONCE))
        if known.event_id == event_id:
            known.until = now + retry_ms / 1000 + REFUSED_S
        return retry_ms


class Presence:
    """All connections."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        #: By socket: routing id -> connection.
        self.connections: tuple[dict[bytes, Connection], ...] = ({}, {}, {}, {})
        self.principals: dict[str, Connection] = {}
        #: Launches that have ended: of agents by their numbers, of the few others the last one by its address.
        self.agents_ended = EndedLaunches()
        self._ended: dict[str, int] = {}
        self._clients = 0

    def greet(self, cls: int, ident: bytes, hello: Hello, now: float) -> tuple[Connection, Connection | None]:
        """Admit a hello: the connection, and the one that it replaces (same or earlier process), if any.

        Raises GoondanError: E_VERSION, E_FRAME_INVALID, E_TOKEN_INVALID, E_CLASS_MISMATCH, E_PRINCIPAL_BUSY,
        E_OVERLOADED. With E_PRINCIPAL_BUSY the caller should find out whether the other connection is still there.
        """
        if PROTOCOL_VERSION not in hello.versions:
            raise fail("E_VERSION", f"version {PROTOCOL_VERSION} is spoken here, the peer speaks {hello.versions[:8]}")
        if len(hello.incarnation) > MAX_INCARNATION:
            raise fail("E_FRAME_INVALID", f"incarnation has at most {MAX_INCARNATION} characters")
        claims = verify(self._secret, hello.token)
        if claims.cls != CLASSES[cls]:
            raise fail("E_CLASS_MISMATCH", f"a token of class {claims.cls} on the socket of class {CLASSES[cls]}")
        address = self._address(claims)
        if claims.launch and self._has_ended(cls, address, claims.launch):
            raise fail("E_TOKEN_INVALID", f"launch {claims.launch} of {address} has ended")
        if cls == CLIENTS and len(self.connections[CLIENTS]) >= MAX_CLIENTS:
            raise fail("E_OVERLOADED", f"{MAX_CLIENTS} clients are connected")
        old = self.principals.get(address)
        if old is not None and old.incarnation != hello.incarnation and claims.launch <= old.claims.launch:
            raise fail("E_PRINCIPAL_BUSY", f"{address} is connected from another process")
        if old is not None:
            self.connections[cls].pop(old.ident, None)
        connection = Connection(cls, ident, address, claims, hello, now)
        self.connections[cls][ident] = connection
        if cls != CLIENTS:
            self.principals[address] = connection
        return connection, old

    def holder(self, cls: int, hello: Hello) -> Connection | None:
        """The connection that makes the principal of this hello busy."""
        try:
            return self.principals.get(self._address(verify(self._secret, hello.token)))
        except GoondanError:
            return None

    def drop(self, connection: Connection) -> None:
        """Forget a connection."""
        known = self.connections[connection.cls]
        if known.get(connection.ident) is connection:
            del known[connection.ident]
        if self.principals.get(connection.address) is connection:
            del self.principals[connection.address]

    def end_launch(self, address: str, launch: int) -> Connection | None:
        """A launch has ended: its token is void. Returns its connection, already dropped."""
        if address.startswith(_AGENT):
            self.agents_ended.add(launch)
        else:
            self._ended[address] = max(launch, self._ended.get(address, 0))
        connection = self.principals.get(address)
        if connection is None or connection.claims.launch > launch:
            return None
        self.drop(connection)
        return connection

    def only_living(self, launches: Iterable[int]) -> None:
        """These launches of agents live, and all earlier ones have ended."""
        self.agents_ended.all_but(launches)

    def _has_ended(self, cls: int, address: str, launch: int) -> bool:
        return launch in self.agents_ended if cls == AGENTS else launch <= self._ended.get(address, 0)

    def _address(self, claims: Claims) -> str:
        if claims.cls == "agent":
            return agent_address(claims.agent or "", claims.instance_key or "")
        if claims.cls == "toolhost":
            return toolhost_address(claims.agent or "1")
        if claims.cls == "control":
            return claims.agent or "supervisor"
        self._clients += 1
        return f"client/{self._clients}"


def agent_address(agent: str, instance_key: str) -> str:
    """The principal of an agent instance. Agent names hold no slash; instance keys may."""
    return f"{_AGENT}{agent}/{instance_key}"


def toolhost_address(name: str) -> str:
    """The principal of a tool host."""
    return f"toolhost/{name}"
