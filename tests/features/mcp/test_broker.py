"""MCP servers in the broker: who may ask, which tool host answers, and who is attached when processes end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from goondan.features.mcp.broker import ATTACH_S, MAX_OPEN_EACH, Servers
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, CONTROL, TOOLS, Spawned
from goondan.kernel.broker.state.workdirs import Beneath, Workdir
from goondan.schemas.bundle.effective_config import server_of
from goondan.schemas.bundle.launch import KernelPlan, ServerSpec, ToolSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.control import Exited, Principal
from goondan.schemas.wire.frames import AgentEvent, AttachedServer, ErrorPayload, Frame
from goondan.schemas.wire.tokens import Claims
from goondan.schemas.worker.servers import NamedServer, ServerListing, ServerNews
from tests.unit.kernel.broker import approving
from tests.unit.kernel.broker.approving import Peer
from tests.unit.kernel.broker.swarm import plan
from tests.unit.kernel.broker.world import code, part_of

SHARED, OWN = "github", "files"
LISTING = to_raw(ServerListing(server_name="a server"))


def server_plan(servers: list[str]) -> KernelPlan:
    """`coder` and `reviewer` have both servers, `plain` has none. One is shared, one is each agent's own."""
    base = plan()
    agents = {name: structs.replace(spec, servers=servers) for name, spec in base.agents.items()}
    agents["plain"] = structs.replace(agents["coder"], name="plain", servers=[])
    shared = ServerSpec(extension=SHARED, transport="stdio", scope="instance")
    own = ServerSpec(extension=OWN, transport="stdio", scope="agent")
    tools = [ToolSpec(name=one.extension, entry="", root="", exports=[], server=one) for one in (shared, own)]
    return structs.replace(base, agents=agents, toolhost=structs.replace(base.toolhost, tools=tools))


class Bench(approving.Bench):
    """A broker, and what it sends to whom."""

    def __init__(self, servers: list[str] | None = None) -> None:
        super().__init__()
        self.plan = server_plan([SHARED, OWN] if servers is None else servers)
        self.router = self._router()
        self.servers = part_of(self.router, Servers)

    def hello(self, cls: int, claims: Claims, incarnation: str = "", attached: Sequence[AttachedServer] = ()) -> Peer:
        self.incarnations += 1
        peer = Peer(self, cls, claims, incarnation or f"i{self.incarnations}").hello(attached=attached)
        welcome, *peer.got = peer.take()
        assert welcome.type == "welcome", bytes(welcome.payload)
        return peer

    def agent(self, name: str = "coder", key: str = "k", launch: int = 0, **more: Any) -> Peer:  # type: ignore[override]
        return self.hello(AGENTS, Claims("agent", agent=name, instance_key=key, launch=launch), **more)

    def host(self, name: str = "1", launch: int = 0, **more: Any) -> Peer:
        return self.hello(TOOLS, Claims("toolhost", agent=name, launch=launch), **more)

    def take(self, peer: Peer) -> list[Frame]:
        return [frame for frame in peer.take() if frame.type != "credit"]

    def send(self, peer: Peer, frame: Frame) -> None:
        peer.got = peer.say(frame)

    def ask(self, agent: Peer, server: str, kind: str = "mcp.attach", **more: Any) -> None:  # type: ignore[override]
        self.send(agent, Frame(kind, payload=to_raw(NamedServer(server)), **more))

    def asked(self, host: Peer, kind: str = "mcp.attach") -> Frame:
        (frame,) = self.take(host)
        assert frame.type == kind
        return frame

    def attach(self, agent: Peer, host: Peer, server: str = SHARED) -> None:
        """Ask, and have the tool host agree."""
        self.ask(agent, server)
        self.send(host, Frame("reply", in_reply_to=self.asked(host).id, payload=LISTING))
        (reply,) = self.take(agent)
        assert reply.type == "reply"

    def wait(self, seconds: float) -> None:
        for _ in range(4):
            self.later(seconds / 4)

    def lose(self, peer: Peer) -> None:
        self.router.unreachable(peer.cls, peer.ident, self.now)
        self.flush()


def news(frames: list[Frame]) -> list[tuple[str, str]]:
    assert {frame.type for frame in frames} <= {"mcp.news"}
    told = [from_raw(frame.payload, ServerNews) for frame in frames]
    return [(one.server, one.kind) for one in told]


def detached(frames: list[Frame]) -> list[tuple[str | None, str | None, str]]:
    assert {frame.type for frame in frames} <= {"mcp.detach"}
    return [(frame.from_, frame.instance_key, from_raw(frame.payload, NamedServer).server) for frame in frames]


def test_a_question_says_who_asks_and_where_that_instance_works_whatever_the_agent_wrote() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent()
    bench.router.bus.instance("coder", "k", 0).workdir = Workdir("/w/sub", Beneath("/w"))
    bench.ask(agent, SHARED, from_="reviewer", instance_key="other", workdir="/etc", id="a.1")
    frame = bench.asked(host)
    assert (frame.from_, frame.instance_key) == ("coder", "k")
    assert (frame.workdir, frame.workdir_base) == ("/w/sub", "/w")
    assert frame.deadline_ms == ATTACH_S * 1000
    bench.send(host, Frame("reply", in_reply_to=frame.id, payload=LISTING, from_="x", workdir="/x"))
    (reply,) = bench.take(agent)
    assert (reply.type, reply.in_reply_to, bytes(reply.payload)) == ("reply", "a.1", bytes(LISTING))
    assert reply.from_ is None and reply.workdir is None


def test_a_server_of_its_own_is_started_where_the_turn_works() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent()
    operator = bench.hello(CLIENTS, Claims("client", operator=True))
    go = to_raw(AgentEvent(id="e1", type="user", created_at="2026-01-01T00:00:00Z"))
    named = Frame("event", to="coder", instance_key="k", event_id="e1", workdir="/named", payload=go)
    bench.send(operator, named)
    assert bench.router.bus.instance("coder", "k", 0).leased is not None
    bench.take(agent)
    bench.ask(agent, OWN)
    frame = bench.asked(host)
    assert (frame.workdir, frame.workdir_base) == ("/named", None)


@pytest.mark.parametrize("kind", ["mcp.attach", "mcp.list"])
def test_only_servers_of_the_declaration_are_asked(kind: str) -> None:
    bench = Bench()
    host = bench.host()
    for agent, server in ((bench.agent("plain"), SHARED), (bench.agent(), "bash"), (bench.agent("reviewer"), "")):
        bench.ask(agent, server, kind)
        assert code(bench.take(agent)) == "E_FORBIDDEN"
    assert bench.take(host) == []


def test_a_repeat_is_the_same_question_and_an_answer_goes_to_the_connection_that_asked_last() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent(incarnation="same")
    bench.ask(agent, SHARED, id="a.1")
    again = bench.agent(incarnation="same")
    bench.ask(again, SHARED, id="a.1")
    bench.send(host, Frame("reply", in_reply_to=bench.asked(host).id, payload=LISTING))
    assert [frame.in_reply_to for frame in bench.take(again)] == ["a.1"]
    assert bench.take(agent) == []


def test_only_the_host_that_was_asked_answers() -> None:
    bench = Bench()
    host = bench.host()
    other = bench.host("2")
    agent = bench.agent()
    bench.ask(agent, SHARED)
    liar = other if host.got else host
    (asked,) = (*bench.take(host), *bench.take(other))
    bench.send(liar, Frame("reply", in_reply_to=asked.id, payload=LISTING))
    assert bench.take(agent) == []


def test_a_question_waits_for_a_tool_host_and_is_sent_again_to_its_successor() -> None:
    bench = Bench()
    agent = bench.agent()
    bench.ask(agent, SHARED)
    first = bench.host()
    assert bench.asked(first).from_ == "coder"
    bench.lose(first)
    second = bench.host()
    assert bench.asked(second).from_ == "coder"
    assert [kind for _, kind in news(bench.take(agent))] == ["gone"]  # what it may have had there is not there any more
    bench.wait(ATTACH_S)
    assert code(bench.take(agent)) == "E_MCP_CONNECT"


def test_without_a_tool_host_that_can_be_started_the_asker_is_told() -> None:
    bench = Bench()
    agent = bench.agent()
    bench.ask(agent, SHARED)
    bench.servers.no_host("no bubblewrap")
    bench.flush()
    assert code(bench.take(agent)) == "E_SANDBOX_UNAVAILABLE"


def test_questions_without_an_answer_are_bounded() -> None:
    bench = Bench()
    bench.host()
    agent = bench.agent()
    for _ in range(MAX_OPEN_EACH):
        bench.ask(agent, OWN, "mcp.list")
    assert bench.take(agent) == []
    bench.ask(agent, OWN, "mcp.list")
    assert code(bench.take(agent)) == "E_OVERLOADED"
    other = bench.agent("reviewer")
    bench.ask(other, OWN)
    assert bench.take(other) == []  # it is a bound of each process
    bench.wait(ATTACH_S)
    assert len(bench.take(agent)) == MAX_OPEN_EACH
    bench.ask(agent, OWN, "mcp.list")
    assert bench.take(agent) == []


def test_agents_that_share_a_server_have_one_tool_host_for_each_key() -> None:
    bench = Bench()
    hosts = [bench.host("1"), bench.host("2"), bench.host("3")]
    for key in ("a", "b", "c"):
        for name in ("coder", "reviewer"):
            bench.ask(bench.agent(name, key), SHARED)
    served = [{(frame.instance_key, frame.from_) for frame in bench.take(host)} for host in hosts]
    assert sorted(len(one) for one in served) == [2, 2, 2]
    assert all(len({key for key, _ in one}) == 1 for one in served)


def test_agents_without_a_shared_server_are_spread() -> None:
    bench = Bench(servers=[OWN])
    hosts = [bench.host("1"), bench.host("2")]
    for name in ("coder", "reviewer"):
        bench.ask(bench.agent(name, "a"), OWN)
    assert [len(bench.take(host)) for host in hosts] == [1, 1]


def test_news_go_to_who_is_attached_there() -> None:
    bench = Bench()
    host = bench.host()
    coder, reviewer, elsewhere = bench.agent(), bench.agent("reviewer"), bench.agent("reviewer", "other")
    for agent in (coder, reviewer, elsewhere):
        bench.attach(agent, host)
        bench.attach(agent, host, OWN)
    bench.send(host, Frame("mcp.news", instance_key="k", payload=to_raw(ServerNews(server=SHARED, kind="tools"))))
    assert [news(bench.take(agent)) for agent in (coder, reviewer, elsewhere)] == [[(SHARED, "tools")]] * 2 + [[]]
    own = Frame("mcp.news", instance_key="k", to="reviewer", payload=to_raw(ServerNews(server=OWN, kind="prompts")))
    bench.send(host, own)
    assert [news(bench.take(agent)) for agent in (coder, reviewer, elsewhere)] == [[], [(OWN, "prompts")], []]
    bench.send(bench.host("2"), own)
    assert bench.take(reviewer) == []  # another host says nothing about servers that it does not have


def test_a_server_that_is_gone_has_nobody_attached() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent()
    bench.attach(agent, host)
    gone = Frame(
        "mcp.news", instance_key="k", payload=to_raw(ServerNews(server=SHARED, kind="gone", message="segfault"))
    )
    bench.send(host, gone)
    assert news(bench.take(agent)) == [(SHARED, "gone")]
    bench.lose(agent)
    bench.wait(2 * RETURN_S)
    assert bench.take(host) == []
    bench.attach(bench.agent(), host)


def test_detaching_is_answered_and_the_tool_host_is_told_once() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent()
    bench.attach(agent, host)
    for _ in range(2):
        bench.ask(agent, SHARED, "mcp.detach")
        (reply,) = bench.take(agent)
        assert reply.type == "reply"
    assert detached(bench.take(host)) == [("coder", "k", SHARED)]


def test_an_attachment_that_is_refused_is_none() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent()
    bench.ask(agent, SHARED)
    told = to_raw(ErrorPayload("E_MCP_CONNECT", "it ended"))
    bench.send(host, Frame("error", in_reply_to=bench.asked(host).id, payload=told))
    assert code(bench.take(agent)) == "E_MCP_CONNECT"
    bench.lose(agent)
    bench.wait(2 * RETURN_S)
    assert bench.take(host) == []


def test_a_process_that_is_gone_is_detached_and_one_that_comes_back_is_not() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent(incarnation="one")
    bench.attach(agent, host)
    bench.lose(agent)
    bench.wait(RETURN_S / 2)
    agent = bench.agent(incarnation="one")
    bench.wait(2 * RETURN_S)
    assert bench.take(host) == []
    bench.lose(agent)
    bench.wait(2 * RETURN_S)
    assert detached(bench.take(host)) == [("coder", "k", SHARED)]


def test_another_process_in_its_place_is_attached_only_when_it_asks() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent(launch=1)
    bench.attach(agent, host, SHARED)
    bench.attach(agent, host, OWN)
    successor = bench.agent(launch=2)
    bench.ask(successor, SHARED)
    bench.send(host, Frame("reply", in_reply_to=bench.asked(host).id, payload=LISTING))
    bench.wait(1.0)
    assert detached(bench.take(host)) == [("coder", "k", OWN)]


@pytest.mark.parametrize("how", ["unreachable", "bye", "exited"])
def test_when_a_tool_host_is_lost_its_servers_are_gone(how: str) -> None:
    bench = Bench()
    host = bench.host(launch=5)
    agent, other = bench.agent(), bench.agent("reviewer", "other")
    bench.attach(agent, host)
    if how == "unreachable":
        bench.lose(host)
    elif how == "bye":
        bench.send(host, Frame("bye"))
    else:
        supervisor = bench.hello(CONTROL, Claims("control"))
        ended = Exited(Principal("toolhost", "1"), 5, "signal 9", started=True)
        bench.send(supervisor, Frame("runtime.event", payload=to_raw(ended)))
    assert news(bench.take(agent)) == [(SHARED, "gone")]
    assert bench.take(other) == []
    bench.attach(agent, bench.host(launch=6))


def test_a_tool_host_that_comes_back_keeps_what_it_still_has() -> None:
    bench = Bench()
    host = bench.host(incarnation="one")
    agent = bench.agent()
    bench.attach(agent, host, SHARED)
    bench.attach(agent, host, OWN)
    again = bench.host(incarnation="one", attached=[AttachedServer(SHARED, "coder", "k")])
    assert news(bench.take(agent)) == [(OWN, "gone")]
    bench.lose(agent)
    bench.wait(2 * RETURN_S)
    assert detached(bench.take(again)) == [("coder", "k", SHARED)]


def test_a_new_broker_believes_the_tool_host_and_detaches_who_does_not_come_back() -> None:
    bench = Bench()
    told = [
        AttachedServer(SHARED, "coder", "k"),
        AttachedServer(SHARED, "reviewer", "k"),
        AttachedServer("x", "coder", "k"),
    ]
    host = bench.host(attached=told)
    assert detached(bench.take(host)) == [("coder", "k", "x")]  # no such server
    agent = bench.agent()
    bench.send(host, Frame("mcp.news", instance_key="k", payload=to_raw(ServerNews(server=SHARED, kind="tools"))))
    assert news(bench.take(agent)) == [(SHARED, "tools")]
    bench.wait(2 * RETURN_S)
    assert detached(bench.take(host)) == [("reviewer", "k", SHARED)]


def test_an_old_broker_detaches_what_it_does_not_know() -> None:
    bench = Bench()
    bench.wait(2 * RETURN_S)
    host = bench.host(attached=[AttachedServer(SHARED, "coder", "k")])
    assert detached(bench.take(host)) == [("coder", "k", SHARED)]


def test_a_declaration_without_the_server_detaches() -> None:
    bench = Bench()
    host, agent = bench.host(), bench.agent()
    bench.attach(agent, host)
    bench.servers.revise(server_plan([OWN]))
    bench.flush()
    assert detached(bench.take(host)) == [("coder", "k", SHARED)]


# --- the bound


@pytest.mark.parametrize(
    ("tool", "server"),
    [
        ("github__create_issue", "github"),
        ("github__a__b", "github"),
        ("github__", None),
        ("github", None),
        ("__github", None),
        ("github2__x", None),
        ("", None),
        (None, None),
    ],
)
def test_the_server_of_a_tool_is_its_whole_prefix(tool: str | None, server: str | None) -> None:
    assert server_of(tool, frozenset({"github"})) == server


def test_an_agent_calls_every_tool_of_its_servers_and_of_no_other() -> None:
    bench = Bench(servers=[SHARED])
    host = bench.host()
    client = bench.hello(CLIENTS, Claims("client", operator=True))
    for name, passed in (("coder", True), ("plain", False)):
        agent = bench.agent(name)
        event = AgentEvent(id=f"e-{name}", type="user", created_at="2026-01-01T00:00:00Z")
        bench.send(client, Frame("event", to=name, instance_key="k", event_id=event.id, payload=to_raw(event)))
        (lease,) = [frame for frame in bench.take(agent) if frame.type == "event"]
        for number, tool in enumerate(("github__create_issue", "files__read", "github__")):
            call = Frame("tool.call", call_id=f"{name}/{number}", tool=tool, event_id=event.id, epoch=lease.epoch)
            call.payload = to_raw({"args": {}, "turnId": "t", "toolCallId": str(number)})
            bench.send(agent, call)
        assert [frame.tool for frame in bench.take(host)] == (["github__create_issue"] if passed else [])
        refused = [frame for frame in bench.take(agent) if frame.type == "error"]
        assert len(refused) == (2 if passed else 3)


def test_a_spawned_instance_stays_in_its_folder_only_while_the_policy_opens_it() -> None:
    bench = Bench()
    bench.host()
    agent = bench.agent()
    instance = bench.router.bus.instance("coder", "k", 0)
    instance.workdir = Workdir("/opened/sub", Beneath("/opened", by_policy=True))
    instance.spawned = Spawned("reviewer", "k", 0.0, instance.workdir, ("", ""))
    bench.ask(agent, SHARED)
    assert code(bench.take(agent)) == "E_FORBIDDEN"
