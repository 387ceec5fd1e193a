"""MCP servers: passes on what agents ask of them, and knows which agents are attached to which. Pure.

Rules.
- An agent asks for servers that its declaration names (AgentSpec.servers). The connection decides which agent it is.
  It may always detach. The broker says to the tool host who asks and where that instance works.
- A question goes to the tool host of the instance. It is kept until it is answered, and sent again to a tool host that
  comes back or follows another one: a server may be attached to twice. After ATTACH_S the asker is told in any case.
- An attachment belongs to one process of an agent. When that process is gone, the broker detaches it.
- When a tool host is lost, those that were attached there hear that their servers are gone.
- The tool host's hello says who is attached. A broker that has just started believes it, since the agents live on. What
  an older broker does not know was detached while the host was away, so it is detached once more.

Source: docs/design/tools.md section 11; requirements MCP-09, MCP-20, MCP-21.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

from msgspec import Raw, Struct

import goondan.features.mcp.wire  # noqa: F401 # the codes of its errors
from goondan.kernel.broker.state.bus import RETURN_S, Bus, Core, overloaded
from goondan.kernel.broker.state.entities import AGENTS, TOOLS, Connection, Instance
from goondan.kernel.broker.state.parts import LISTS_BYTES, SHORT_BYTES, OfHosts, Part, Take
from goondan.kernel.broker.state.workdirs import check_opened
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import AttachedServer, Frame, Hello
from goondan.schemas.worker.servers import CONNECT_S, NamedServer, ServerNews

#: How long a question about a server may take (seconds): the start of the server, and as much again for the tool host,
#: which may have to wait for a place or to be started itself.
ATTACH_S: Final = 2 * CONNECT_S
#: Questions of one agent process that have no answer yet. More are refused. No agent has as many servers.
MAX_OPEN_EACH: Final = 64
#: What agents ask. `mcp.detach` is answered by the broker, the others by the tool host.
_Asked = Literal["mcp.attach", "mcp.list"]


class _Open(Struct, eq=False):
    """A question that has no answer yet."""

    #: What is asked.
    kind: _Asked
    #: The server's prefix.
    server: str
    #: The instance that asks.
    instance: Instance
    #: The sender, its process, and the frame that asked.
    asker: tuple[str, str, str]
    #: The connection over which that frame came last.
    connection: Connection
    #: When the asker is told that no answer came (seconds on the broker's clock).
    until: float
    #: The id of the frame to the tool host; "" while none was sent.
    id: str = ""
    #: The tool host that was asked last.
    host: Connection | None = None


class _Attached(Struct, eq=False):
    """One agent process that is attached to one server."""

    #: The server's prefix.
    server: str
    #: Name of the agent.
    agent: str
    #: Key of the instance.
    key: str
    #: The process. None: it is not known which one it was when the broker started.
    incarnation: str | None
    #: The tool host that has the session.
    host: Connection
    #: Since when the agent has no connection (seconds on the broker's clock); None while it has one.
    away_since: float | None = None


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Servers(core.bus),)


class Servers(Part, OfHosts):
    """Open questions, and attachments."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._assigned = bus.mailbox.hosts
        self._hosts = bus.presence.connections[TOOLS]
        #: By the id of the frame to the tool host; those that wait for a tool host are in `_waiting`.
        self._open: dict[str, _Open] = {}
        self._waiting: list[_Open] = []
        self._by_asker: dict[tuple[str, str, str], _Open] = {}
        #: How many of them each process has: by its principal and incarnation.
        self._counts: Counter[tuple[str, str]] = Counter()
        #: By server and instance key, then by agent.
        self._attached: dict[tuple[str, str], dict[str, _Attached]] = {}
        self.takes = (
            Take((AGENTS,), "mcp.attach", self.ask, SHORT_BYTES, confined="no"),
            Take((AGENTS,), "mcp.list", self.ask, SHORT_BYTES, confined="no"),
            Take((AGENTS,), "mcp.detach", self.detach, SHORT_BYTES),
            Take((TOOLS,), "mcp.news", self.news, LISTS_BYTES),
        )
        self.revise(bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """The plan has changed. Agents are detached from servers that their declaration does not name any more."""
        shared = {
            spec.name for spec in plan.toolhost.tools if spec.server is not None and spec.server.scope == "instance"
        }
        self._assigned.together = frozenset(
            name for name, spec in plan.agents.items() if shared.intersection(spec.servers)
        )
        for one in list(self._every()):
            spec = plan.agents.get(one.agent)
            if spec is None or one.server not in spec.servers:
                self._detach(one)

    # --- agents

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`mcp.attach` or `mcp.list` from an agent."""
        instance = _instance(connection)
        server = from_raw(frame.payload, NamedServer).server
        if server not in self._bus.plan.agents[instance.agent].servers:
            message = f"the declaration of {instance.agent!r} names no MCP server {server[:100]!r}"
            raise fail("E_FORBIDDEN", message)
        check_opened(instance.place, self._bus.plan.spawn_workdirs)
        asker = (connection.sender, connection.incarnation, frame.id)
        known = self._by_asker.get(asker)
        if known is not None:  # the same frame again, perhaps over another connection
            known.connection = connection
            return
        if self._counts[asker[:2]] >= MAX_OPEN_EACH:
            raise overloaded(f"{MAX_OPEN_EACH} questions about MCP servers have no answer yet")
        patience_s = ATTACH_S if frame.deadline_ms is None else min(ATTACH_S, max(0, frame.deadline_ms) / 1000)
        kind: _Asked = "mcp.attach" if frame.type == "mcp.attach" else "mcp.list"
        asked = _Open(kind, server, instance, asker, connection, now + patience_s)
        self._by_asker[asker] = asked
        self._counts[asker[:2]] += 1
        self._send(asked, now)

    def detach(self, connection: Connection, frame: Frame, now: float) -> None:
        """`mcp.detach` from an agent."""
        instance = _instance(connection)
        server = from_raw(frame.payload, NamedServer).server
        one = self._attached.get((server, instance.key), {}).get(instance.agent)
        if one is not None:
            self._detach(one)
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id))

    # --- tool hosts

    def answered(self, host: Connection, frame: Frame, now: float) -> bool:
        """Pass on a `reply` or `error` of a tool host. False when it answers no question about a server."""
        asked = self._open.get(frame.in_reply_to or "")
        if asked is None or asked.host is not host:
            return False
        if frame.type == "error" and asked.kind == "mcp.attach":
            self._forget(asked)
        self._settle(asked, frame.type, frame.payload)
        return True

    def news(self, connection: Connection, frame: Frame, now: float) -> None:
        """`mcp.news` from a tool host: for the agents that are attached there, or for the one that `to` names."""
        news = from_raw(frame.payload, ServerNews)
        attached = self._attached.get((news.server, frame.instance_key or ""), {})
        for one in list(attached.values()):
            if one.host is connection and frame.to in (None, one.agent):
                self._tell(one, frame.payload)
                if news.kind == "gone":
                    self._drop(one)

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """A tool host was welcomed. It says who is attached to its servers."""
        if peer.cls == TOOLS:
            self._host_here(peer, hello.attached, now)

    def _host_here(self, host: Connection, told: Iterable[AttachedServer], now: float) -> None:
        listed = {(one.server, one.instance_key, one.agent) for one in told}
        asked = {(one.server, one.instance.key, one.instance.agent) for one in self._open.values()}
        for one in [one for one in self._every() if one.host.address == host.address]:
            name = (one.server, one.key, one.agent)
            one.host = host
            if name not in listed and name not in asked:
                self._gone(one, "the tool host of the MCP server has started anew")
            listed.discard(name)
        for server, key, agent in sorted(listed):
            one = _Attached(server, agent, key, None, host)
            if now - self._bus.started_ms / 1000 < RETURN_S and self._may(agent, server):
                self._attached.setdefault((server, key), {}).setdefault(agent, one)
            else:
                self._detach(one)
        self._ask_again(lambda asked: asked.address == host.address, now)
        waiting, self._waiting = self._waiting, []
        for question in waiting:
            self._send(question, now)

    def host_lost(self, host: Connection, now: float) -> None:
        """A tool host is gone, with its servers."""
        self._lost(lambda one: one is host, now)

    def host_ended(self, address: str, launch: int, now: float) -> None:
        """The supervisor saw a tool host end."""
        self._lost(lambda host: host.address == address and host.claims.launch <= launch, now)

    def no_host(self, reason: str) -> None:
        """No tool host can be started: nobody can answer."""
        for asked in list(self._waiting):
            info = error_payload("E_SANDBOX_UNAVAILABLE", f"no tool host could be started: {reason}")
            self._settle(asked, "error", to_raw(info))

    def tick(self, now: float) -> None:
        """Detach processes that are gone, and answer questions whose time is over."""
        for one in list(self._every()):
            connection = self._connection(one)
            if connection is None:
                one.away_since = now if one.away_since is None else one.away_since
                if now - one.away_since >= RETURN_S:
                    self._detach(one)
                continue
            one.away_since = None
            one.incarnation = one.incarnation or connection.incarnation
            if one.incarnation != connection.incarnation:
                self._detach(one)
        for asked in [asked for asked in self._by_asker.values() if asked.until <= now]:
            message = f"the MCP server {asked.server!r} could not be asked in time"
            self._settle(asked, "error", to_raw(error_payload("E_MCP_CONNECT", message)))

    # --- inside

    def _send(self, asked: _Open, now: float) -> None:
        """Ask the tool host of the instance. Without one, wait for it."""
        instance = asked.instance
        host = self._assigned.host_for(instance, self._hosts.values())
        if host is None:
            asked.id, asked.host = "", None
            self._waiting.append(asked)
            return
        frame = Frame(
            asked.kind, from_=instance.agent, instance_key=instance.key, payload=to_raw(NamedServer(asked.server))
        )
        place = instance.place
        frame.workdir = place.path
        frame.workdir_base = None if place.beneath is None else place.beneath.base
        frame.deadline_ms = max(0, round((asked.until - now) * 1000))
        self._bus.send(host, frame)
        asked.id, asked.host = frame.id, host
        self._open[asked.id] = asked
        if asked.kind == "mcp.attach":
            one = _Attached(asked.server, instance.agent, instance.key, asked.asker[1], host)
            self._attached.setdefault((asked.server, instance.key), {})[instance.agent] = one

    def _settle(self, asked: _Open, kind: str, payload: Raw) -> None:
        self._open.pop(asked.id, None)
        if asked in self._waiting:
            self._waiting.remove(asked)
        del self._by_asker[asked.asker]
        self._counts[asked.asker[:2]] -= 1
        if not self._counts[asked.asker[:2]]:
            del self._counts[asked.asker[:2]]
        self._bus.send(asked.connection, Frame(kind, in_reply_to=asked.asker[2], payload=payload))

    def _forget(self, asked: _Open) -> None:
        """An attachment did not come about."""
        one = self._attached.get((asked.server, asked.instance.key), {}).get(asked.instance.agent)
        if one is not None and one.incarnation == asked.asker[1]:
            self._drop(one)

    def _may(self, agent: str, server: str) -> bool:
        spec = self._bus.plan.agents.get(agent)
        return spec is not None and server in spec.servers

    def _every(self) -> Iterator[_Attached]:
        for attached in self._attached.values():
            yield from attached.values()

    def _connection(self, one: _Attached) -> Connection | None:
        """The connection that the agent of an attachment has now."""
        instance = self._bus.mailbox.instances.get((one.agent, one.key))
        return None if instance is None else instance.conn

    def _lost(self, is_lost: Callable[[Connection], bool], now: float) -> None:
        for one in [one for one in self._every() if is_lost(one.host)]:
            self._gone(one, "the tool host of the MCP server has ended")
        self._ask_again(is_lost, now)

    def _ask_again(self, was_asked: Callable[[Connection], bool], now: float) -> None:
        """The questions to these tool hosts may be lost: ask them, or others, again."""
        for asked in [asked for asked in self._open.values() if asked.host is not None and was_asked(asked.host)]:
            del self._open[asked.id]
            self._send(asked, now)

    def _gone(self, one: _Attached, message: str) -> None:
        self._drop(one)
        self._tell(one, to_raw(ServerNews(server=one.server, kind="gone", message=message)))

    def _tell(self, one: _Attached, payload: Raw) -> None:
        connection = self._connection(one)
        if connection is not None and one.incarnation in (None, connection.incarnation):
            self._bus.send(connection, Frame("mcp.news", payload=payload))

    def _detach(self, one: _Attached) -> None:
        """Tell the tool host that this agent does not need the server any more."""
        self._drop(one)
        frame = Frame("mcp.detach", from_=one.agent, instance_key=one.key, payload=to_raw(NamedServer(one.server)))
        self._bus.send(one.host, frame)

    def _drop(self, one: _Attached) -> None:
        name = (one.server, one.key)
        attached = self._attached.get(name, {})
        if attached.get(one.agent) is one:
            del attached[one.agent]
        if not attached:
            self._attached.pop(name, None)


def _instance(connection: Connection) -> Instance:
    if connection.instance is None:
        raise fail("E_FORBIDDEN", "only an agent asks for MCP servers")
    return connection.instance
