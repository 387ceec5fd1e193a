"""Keeps the connections, and for whom each may speak. Pure: identities and tokens in, connections out.

Rules.
- Authority comes from the token. Its class must be the class of the socket on which it came.
- A principal (an agent instance, a tool host, the supervisor) has one live connection. The same incarnation may
  come back over a new connection; another one is E_PRINCIPAL_BUSY while the first lives, unless its launch number
  is higher: the supervisor starts a launch only after it saw the one before end.
- The token of a launch that has ended is refused.

Source: docs/design/wire.md section 3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from goondan.kernel.broker.state.entities import AGENTS, CLASSES, CLIENTS, Connection
from goondan.schemas.bundle.address import is_name
from goondan.schemas.wire import frames, tokens
from goondan.schemas.wire.errors import fail


class EndedLaunches:
    """The numbers of ended launches."""

    def __init__(self) -> None:
        #: First and last number of each run, in order; there is a gap between two runs.
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, launch: int) -> bool:
        at = bisect_right(self._first, launch) - 1
        return at >= 0 and launch <= self._last[at]

    def add(self, launch: int) -> None:
        """This launch has ended."""
        if launch in self:
            return
        at = bisect_right(self._first, launch)
        after = at < len(self._first) and self._first[at] == launch + 1
        if at > 0 and self._last[at - 1] == launch - 1:
            self._last[at - 1] = self._last[at] if after else launch
            if after:
                del self._first[at], self._last[at]
        elif after:
            self._first[at] = launch
        else:
            self._first.insert(at, launch)
            self._last.insert(at, launch)

    def all_but(self, living: Iterable[int]) -> None:
        """These launches live. Every other launch up to the highest known number has ended."""
        known = sorted(set(living))
        top = max([*known[-1:], *self._last[-1:]], default=0)
        self._first, self._last = [], []
        begin = 1
        for launch in [*known, top + 1]:
            if begin < launch:
                self._first.append(begin)
                self._last.append(launch - 1)
            begin = launch + 1


#: Connected clients. More are refused, so that a loop of `gdn send` cannot fill the broker.
MAX_CLIENTS: Final = 4096
#: Characters of an incarnation: it is kept as long as its connection.
MAX_INCARNATION: Final = 256
#: How the addresses of agents begin.
_AGENT: Final = "agent/"


class Presence:
    """All connections."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        #: For each socket: routing id -> connection.
        self.connections: tuple[dict[bytes, Connection], ...] = ({}, {}, {}, {})
        self.principals: dict[str, Connection] = {}
        #: Launches that have ended: of agents by their numbers, of the few others the last one by its address.
        self.agents_ended = EndedLaunches()
        self._ended: dict[str, int] = {}
        self._clients = 0

    def greet(self, cls: int, ident: bytes, hello: frames.Hello, now: float) -> tuple[Connection, Connection | None]:
        """Admit a hello. Returns the new connection, and the connection that it replaces, if any: of the same process,
        or of an earlier one.

        Raises GoondanError: E_VERSION, E_FRAME_INVALID, E_TOKEN_INVALID, E_CLASS_MISMATCH, E_PRINCIPAL_BUSY,
        E_OVERLOADED. With E_PRINCIPAL_BUSY the caller should find out whether the other connection is still there.
        """
        if frames.PROTOCOL_VERSION not in hello.versions:
            raise fail(
                "E_VERSION", f"version {frames.PROTOCOL_VERSION} is spoken here, the peer speaks {hello.versions[:8]}"
            )
        if not is_name(hello.incarnation, MAX_INCARNATION):
            raise fail("E_FRAME_INVALID", f"incarnation has 1 to {MAX_INCARNATION} visible characters")
        claims = tokens.verify(self._secret, hello.token)
        if claims.cls != CLASSES[cls]:
            raise fail("E_CLASS_MISMATCH", f"a token of class {claims.cls} on the socket of class {CLASSES[cls]}")
        address = self._address(claims)
        ended = claims.launch in self.agents_ended if cls == AGENTS else claims.launch <= self._ended.get(address, 0)
        if claims.launch and ended:
            raise fail("E_TOKEN_INVALID", f"launch {claims.launch} of {address} has ended")
        if cls == CLIENTS and len(self.connections[CLIENTS]) >= MAX_CLIENTS:
            raise fail("E_OVERLOADED", f"{MAX_CLIENTS} clients are connected")
        old = self.principals.get(address)
        if old is not None and old.incarnation != hello.incarnation and claims.launch <= old.claims.launch:
            raise fail("E_PRINCIPAL_BUSY", f"{address} is connected from another process")
        if old is not None:
            self.connections[cls].pop(old.ident, None)
        more = (hello.incarnation, hello.pid, hello.started_ms or 0, frozenset(hello.calls))
        connection = Connection(cls, ident, address, claims, now, *more)
        self.connections[cls][ident] = connection
        if cls != CLIENTS:
            self.principals[address] = connection
        return connection, old

    def holder(self, hello: frames.Hello) -> Connection:
        """The connection for whose sake this hello is E_PRINCIPAL_BUSY."""
        return self.principals[self._address(tokens.verify(self._secret, hello.token))]

    def drop(self, connection: Connection) -> None:
        """Forget a connection."""
        known = self.connections[connection.cls]
        if known.get(connection.ident) is connection:
            del known[connection.ident]
        if self.principals.get(connection.address) is connection:
            del self.principals[connection.address]

    def end_launch(self, address: str, launch: int) -> Connection | None:
        """A launch has ended: its token is not valid any more. Returns its connection, which is dropped already."""
        if address.startswith(_AGENT):
            self.agents_ended.add(launch)
        else:
            self._ended[address] = max(launch, self._ended.get(address, 0))
        connection = self.principals.get(address)
        if connection is None or connection.claims.launch > launch:
            return None
        self.drop(connection)
        return connection

    def _address(self, claims: tokens.Claims) -> str:
        if claims.cls == "agent":
            return agent_address(claims.agent or "", claims.instance_key or "")
        if claims.cls == "toolhost":
            return f"toolhost/{claims.agent or 1}"
        if claims.cls == "control":
            return claims.agent or "supervisor"
        self._clients += 1
        return f"client/{self._clients}"


def agent_address(agent: str, instance_key: str) -> str:
    """The principal of an agent instance. Agent names hold no slash; instance keys may."""
    return f"{_AGENT}{agent}/{instance_key}"
