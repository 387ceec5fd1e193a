"""MCP servers at the tool host: real jails, real workers, servers that speak the protocol by hand.

One tool host serves them all, because the template of the workers takes a second to start. Each test has its own
server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from goondan.schemas.bundle.launch import Filesystem, SandboxSpec, ServerSpec, ToolSpec
from goondan.toolhost.calls import machine
from goondan.toolhost.jails.server_jail import RemoteServer, ServerJail
from goondan.toolhost.serving.live import LiveSession
from goondan.toolhost.watch.procfs import process_status
from tests.mcp_fixture import Asker, make_server, text
from tests.toolhost_fixture import Bench, bench

DIES = """
def die(args, ask):
    sys.stderr.write("loading…\\nthe disk is full\\n"); sys.stderr.flush()
    os._exit(3)
def tell(args, ask): notify("notifications/tools/list_changed"); return "told"
def steps(args, ask):
    token = ask["params"]["_meta"]["progressToken"]
    for done in range(args["n"]):
        time.sleep(args["s"]); notify("notifications/progress", progressToken=token, progress=done + 1, total=args["n"])
    return "done"
def half(args, ask):
    say({"jsonrpc": "2.0", "id": ask["id"], "result": {"content": [{"type": "text", "text": "cut \\ud83d"}]}})
tools |= {"die": die, "tell": tell, "steps": steps, "half": half}
"""
#: A server of old that ends when it is asked what it does not know.
STRICT = """
def answer(ask, honest=answer): return os._exit(1) if ask["method"] == "server/discover" else honest(ask)
"""
#: A server that does not hear that its input is closed, and what it does with a signal.
DEAF = """
def end(number, frame): open(KEPT + "/signal", "w").close(); os._exit(0)
signal.signal(15, HANDLER)
threading.Thread(target=serve).start()
while True: time.sleep(1)
"""


def servers(folder: Path) -> list[ToolSpec]:
    kept = folder / "kept"
    kept.mkdir()
    writes = SandboxSpec(filesystem=Filesystem(write=[str(kept)]))
    deaf = f"KEPT = {str(kept)!r}\n{DEAF}"
    return [
        make_server(folder, name="plain", env={"X": "secret"}, arguments=["${WORKDIR}"]),
        make_server(folder, name="own", scope="agent", arguments=["--root=${WORKDIR}"], env={"X": "${WORKDIR}/x"}),
        make_server(folder, name="less", mode="stateless"),
        *(make_server(folder, DIES, name=name) for name in ("dies", "news", "told")),
        make_server(folder, DIES, name="silent", idle_s=1.0, total_s=20),
        *(make_server(folder, name=name) for name in ("shared", "held", "slow")),
        make_server(folder, name="writes", sandbox=writes, last=f"serve()\nopen({str(kept / 'input')!r}, 'w').close()"),
        make_server(folder, name="deaf", sandbox=writes, last=deaf.replace("HANDLER", "end")),
        make_server(folder, name="stubborn", sandbox=writes, last=deaf.replace("HANDLER", "signal.SIG_IGN")),
        make_server(folder, STRICT, name="strict"),
    ]


class HttpServer:
    """A server of the handshake era at a URL, without a session: each request is answered by itself."""

    def __init__(self) -> None:
        self.port = 0
        #: Requests so far, by path.
        self.asked: list[tuple[str, str]] = []
        self.secrets: set[str] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.asked.append((method, path))
                self.secrets.add(headers.get("x-key", ""))
                writer.write(self.answer(method, path, body))
                await writer.drain()
        writer.close()

    def answer(self, method: str, path: str, body: bytes) -> bytes:
        message = json.loads(body) if body else {}
        if path == "/away":
            return b"HTTP/1.1 307 See\r\nlocation: http://localhost:1/other\r\ncontent-length: 0\r\n\r\n"
        if method != "POST":
            return b"HTTP/1.1 405 No\r\ncontent-length: 0\r\n\r\n"
        if "id" not in message:
            return b"HTTP/1.1 202 Ok\r\ncontent-length: 0\r\n\r\n"
        who = {"name": "far", "version": "1"}
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": who},
            "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
            "tools/call": {
                "content": [{"type": "text", "text": json.dumps(message.get("params", {}).get("arguments"))}]
            },
        }
        told: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] in results:
            told["result"] = results[message["method"]]
        else:
            told["error"] = {"code": -32601, "message": "no such method"}
        data = json.dumps(told).encode()
        return b"HTTP/1.1 200 Ok\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def far(name: str, port: int, path: str) -> ToolSpec:
    """The same at the tool host."""
    spec = ServerSpec(
        extension=name,
        transport="http",
        worker="mcp",
        endpoint=f"http://127.0.0.1:{port}{path}",
        headers={"X-Key": "s3cret"},
        tools=True,
    )
    return ToolSpec(name=name, entry="", root="", exports=[], server=spec)


class Served:
    """A tool host and its servers."""

    def __init__(self, made: Bench, folder: Path, http: HttpServer) -> None:
        self.made = made
        self.folder = folder
        self.http = http
        self.asker = Asker(made)

    def lives(self, server: str) -> list[LiveSession]:
        return lives(self.made, server)

    def jail(self, server: str) -> ServerJail:
        return jail(self.made, server)

    async def retire(self, server: str) -> None:
        """Let what is idle end, and wait until the server is gone."""
        self.made.host.sessions._perform(self.made.host.sessions.pool.retire(self.made.loop.time()))
        await self.ended(server)

    async def ended(self, server: str) -> None:
        async with asyncio.timeout(20):
            while self.lives(server):
                await asyncio.sleep(0.01)


def lives(made: Bench, server: str) -> list[LiveSession]:
    """The sessions of a server whose jails are there."""
    return [live for live in made.host.sessions._live.values() if live.tool.name == server]


def jail(made: Bench, server: str) -> ServerJail:
    """The one jail of a server."""
    (live,) = lives(made, server)
    assert isinstance(live.jail, ServerJail)
    return live.jail


async def gone(*pids: int) -> None:
    """Wait until these processes are gone, or zombies that somebody else waits for."""
    async with asyncio.timeout(20):
        while any(process_status(pid).get("State", "Z")[0] not in "ZX" for pid in pids):
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="gdn") as name:
        folder = Path(name)
        http = HttpServer()
        async with await asyncio.start_server(http, "127.0.0.1", 0) as listening:
            http.port = listening.sockets[0].getsockname()[1]
            remote = [far("far", http.port, "/mcp"), far("away", http.port, "/away")]
            async with bench(*servers(folder), *remote) as made:
                yield Served(made, folder, http)
                pids = [made.host.sessions._starter.templates["mcp"].pid]
                for live in made.host.sessions._live.values():
                    if isinstance(live.jail, ServerJail):
                        pids += [live.jail.process.pid, *live.jail.processes()]
            assert len(pids) > 3
            await gone(*pids)  # nothing outlives the tool host


@pytest.fixture
def workdir(served: Served) -> Path:
    folder = served.folder / "work"
    folder.mkdir(exist_ok=True)
    return folder


in_module = pytest.mark.asyncio(loop_scope="module")


@in_module
async def test_a_server_is_listed_and_called_behind_all_walls(served: Served, workdir: Path) -> None:
    listing = await served.asker.ask("plain")
    assert [tool["export"] for tool in listing["tools"]] == ["echo", "count", "nap", "where"]
    assert (listing["serverName"], listing["protocolVersion"]) == ("small", "2025-11-25")
    call_id, waiter = served.made.start("plain__echo", {"a": [1, "x"]}, workdir=workdir)
    assert text(await waiter) == {"a": [1, "x"]}
    assert {"namespaces", "seccomp", "limits"} <= set(served.made.receipts[call_id]["jail"]["walls"])
    # It serves several workdirs, and sees none.
    found = text(await served.made.call("plain__where", workdir=workdir))
    assert found == ["/run/goondan/home", [], ["${WORKDIR}"], "***"]  # it has its variable, and cannot say it
    assert (await served.made.call("plain__nothing"))["status"] == "error"
    assert (await served.asker.ask("other"))["code"] == "E_TOOL_NOT_FOUND"


@in_module
async def test_everybody_of_one_instance_key_shares_one_process(served: Served) -> None:
    asker, made = served.asker, served.made
    agents = [f"agent-{number}" for number in range(20)]
    listings = await asyncio.gather(*(asker.ask("shared", agent=agent) for agent in agents))
    assert len({listing["session"] for listing in listings}) == 1
    results = await asyncio.gather(*(made.call("shared__count", agent=agent) for agent in agents))
    counted = [text(result) for result in results]
    assert sorted(count for count, _ in counted) == list(range(1, 21))
    assert len({pid for _, pid in counted}) == len(served.lives("shared")) == 1
    # Another key is another instance: never one state for both.
    other = await asker.ask("shared", instance_key="k2")
    assert other["session"] != listings[0]["session"]
    assert text(await made.call("shared__count", instance_key="k2"))[0] == 1


@in_module
async def test_an_agents_own_server_sees_its_workdir(served: Served) -> None:
    one, two = served.folder / "one", served.folder / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / folder.name).touch()
    first = await served.asker.ask("own", workdir=one)
    second = await served.asker.ask("own", workdir=two, instance_key="k2")
    assert first["session"] != second["session"]
    for folder, key in ((one, "k1"), (two, "k2")):
        found = text(await served.made.call("own__where", workdir=folder, instance_key=key))
        assert found == [str(folder), [folder.name], [f"--root={folder}"], f"{folder}/x"]
    # Another agent of the same key has a process of its own.
    await served.asker.ask("own", agent="other", workdir=one)
    assert text(await served.made.call("own__count", agent="other", workdir=one))[0] == 1
    assert len(served.lives("own")) == 3


@in_module
async def test_a_stateless_server_has_a_session_for_each_listing_and_call(served: Served) -> None:
    assert (await served.asker.ask("less"))["tools"]
    counted = [text(await served.made.call("less__count")) for _ in range(2)]
    assert [count for count, _ in counted] == [1, 1]
    await served.ended("less")
    assert not [news for news in served.asker.news() if news["server"] == "less"]


@in_module
async def test_a_dead_server_fails_its_calls_at_once_with_its_last_words(served: Served) -> None:
    asker, made = served.asker, served.made
    before = await asker.ask("dies")
    await asker.ask("dies", agent="other")
    _, waits = made.start("dies__nap", {"s": 60}, agent="other")
    for result in [await made.call("dies__die"), await waits]:
        assert result["status"] == "error"
        assert result["error"]["code"] == "E_MCP_GONE"
        assert result["error"]["message"] == "the MCP server dies exited with status 3; it said last: the disk is full"
    for agent in ("coder", "other"):
        (news,) = [news for news in asker.news(agent) if news["server"] == "dies"]
        assert news["kind"] == "gone"
        assert "the disk is full" in news["message"]
    # Until it attaches again, an agent begins no new session unnoticed.
    refused = await made.call("dies__echo")
    assert refused["error"]["code"] == "E_MCP_GONE"
    assert "the disk is full" in refused["error"]["message"]
    after = await asker.ask("dies")
    assert after["session"] != before["session"]
    assert text(await made.call("dies__echo", {"a": 1})) == {"a": 1}
    assert (await made.call("dies__echo", agent="other"))["error"]["code"] == "E_MCP_GONE"


@in_module
async def test_a_server_that_ends_at_the_newer_question_is_asked_the_older_one_next(served: Served) -> None:
    assert (await served.asker.ask("strict"))["code"] == "E_MCP_CONNECT"
    again = await served.asker.ask("strict")
    assert again.get("protocolVersion") == "2025-11-25", again
    assert text(await served.made.call("strict__echo", {"a": 1})) == {"a": 1}


@in_module
async def test_a_server_writes_down_what_it_must_when_its_input_is_closed(served: Served) -> None:
    await served.asker.ask("writes")
    pid = served.jail("writes").process.pid
    served.asker.detach("writes")
    await served.retire("writes")
    assert (served.folder / "kept" / "input").exists()
    await gone(pid)


@in_module
@pytest.mark.parametrize(("name", "is_asked"), [("stubborn", False), ("deaf", True)])
async def test_a_server_that_ignores_its_input_is_ended_by_signals(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str, is_asked: bool
) -> None:
    monkeypatch.setattr(machine, "SERVER_EXIT_S", 0.2)
    monkeypatch.setattr(machine, "SERVER_TERM_S", 0.3)
    await served.asker.ask(name)
    inside = [served.jail(name).process.pid, *served.jail(name).processes()]
    served.asker.detach(name)
    await served.retire(name)
    await gone(*inside)
    assert (served.folder / "kept" / "signal").exists() == is_asked


@in_module
async def test_only_a_server_that_nobody_is_attached_to_retires(served: Served) -> None:
    asker, made, pool = served.asker, served.made, served.made.host.sessions.pool
    await asker.ask("held")
    await asker.ask("held", agent="other")
    asker.detach("held")
    assert text(await made.call("held__count", agent="other"))[0] == 1
    assert pool.retire(made.loop.time()) == [] or served.lives("held")
    assert not served.lives("held")[0].session.closed
    assert [one.agent for one in made.host.sessions.servers.attached() if one.server == "held"] == ["other"]
    asker.detach("held", agent="other")
    await served.retire("held")


@in_module
async def test_a_call_without_news_is_given_up_and_the_server_goes_on(served: Served) -> None:
    made = served.made
    await served.asker.ask("silent")
    pid = text(await made.call("silent__count"))[1]
    # News keeps it alive for longer than the bound.
    assert text(await made.call("silent__steps", {"n": 6, "s": 0.2})) == "done"
    assert made.progress
    result = await made.call("silent__nap", {"s": 30})
    assert result["error"]["code"] == "E_TOOL_TIMEOUT"
    assert text(await made.call("silent__count")) == [2, pid]


@in_module
async def test_a_call_is_cancelled_or_out_of_time_and_the_server_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CANCEL_GRACE_S", 0.3)
    made = served.made
    await served.asker.ask("slow")
    pid = text(await made.call("slow__count"))[1]
    call_id, waits = made.start("slow__nap", {"s": 60})
    await asyncio.sleep(0.05)
    made.cancel(call_id)
    assert (await waits)["error"]["code"] == "E_CANCELLED"
    late = await made.call("slow__nap", {"s": 60}, deadline_ms=200)
    assert late["error"]["code"] == "E_TOOL_TIMEOUT"
    await asyncio.sleep(machine.CANCEL_GRACE_S + 0.1)
    assert text(await made.call("slow__count")) == [2, pid]


@in_module
async def test_a_text_with_half_a_character_comes_through_all_walls(served: Served) -> None:
    await served.asker.ask("news")
    assert (await served.made.call("news__half"))["output"] == "cut \N{REPLACEMENT CHARACTER}"


@in_module
async def test_news_of_a_server_reach_who_is_attached(served: Served) -> None:
    first = await served.asker.ask("news", agent="listener")
    await served.made.call("news__tell", agent="listener")
    async with asyncio.timeout(20):
        while not served.asker.news("listener"):
            await asyncio.sleep(0.01)
    assert served.asker.news("listener") == [{"server": "news", "kind": "tools"}]
    again = await served.asker.ask("news", "mcp.list", agent="listener")
    assert again["tools"] == first["tools"]


@in_module
async def test_the_supervisor_hears_how_a_server_is(served: Served) -> None:
    await served.asker.ask("told")
    await served.made.call("told__echo")
    served.made.host.sessions.tick()
    told = [news for news in served.made.workers if news.server is not None and news.server.server == "told"]
    assert all(news.op == "server" for news in told)
    last = told[-1].server
    assert last is not None
    assert (last.state, last.attached, last.calls, last.protocol_version) == ("connected", 1, 1, "2025-11-25")
    assert last.memory_kb > 1000
    assert told[-1].pid == served.jail("told").worker_pid
    await served.made.call("told__die")
    last = served.made.workers[-1].server
    assert last is not None
    assert last.state == "ended"
    assert "the disk is full" in (last.last_error or "")


@in_module
async def test_a_server_at_a_url_is_reached_through_the_egress_proxy_only(served: Served) -> None:
    listing = await served.asker.ask("far")
    assert [tool["export"] for tool in listing["tools"]] == ["echo"]
    call_id, waits = served.made.start("far__echo", {"a": 1})
    assert text(await waits) == {"a": 1}
    # Its endpoint is its grant, loopback too; the proxy has made the connection.
    assert served.made.receipts[call_id]["jail"]["reached"] == [f"127.0.0.1:{served.http.port}"]
    assert "s3cret" in served.http.secrets
    assert "s3cret" not in str(served.made.logs)
    (live,) = served.lives("far")
    assert isinstance(live.jail, RemoteServer)
    pid = live.jail.process.pid
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    async with asyncio.timeout(20):
        while not [news for news in served.asker.news() if news["server"] == "far"]:
            await asyncio.sleep(0.01)
    assert (await served.made.call("far__echo"))["error"]["code"] == "E_MCP_GONE"
    assert (await served.asker.ask("far"))["tools"]
    # A URL that the server names is no grant.
    told = await served.asker.ask("away")
    assert told["code"].startswith("E_")


@in_module
async def test_whichever_part_is_killed_all_of_it_ends(served: Served) -> None:
    asker, made = served.asker, served.made
    for who in ("worker", "jail", "template"):
        await asker.ask("held", instance_key=who)
        _, waits = made.start("held__nap", {"s": 60}, instance_key=who)
        there, template = served.jail("held"), made.host.sessions._starter.templates["mcp"].pid
        inside = there.processes()
        assert template > 0
        assert inside
        victim = {"worker": there.process.pid, "template": template, "jail": there.worker_pid or 0}[who]
        os.kill(victim, signal.SIGKILL)
        result = await asyncio.wait_for(waits, 20)
        assert result["error"]["code"] == "E_MCP_GONE"
        await gone(there.process.pid, *inside, *([template] if who == "template" else []))
    await asker.ask("held")  # by a new template
    assert text(await made.call("held__count"))[0] == 1


#: A tool host that has a server, says which processes there are, and then waits.
HOST = """
import asyncio, json, sys
from pathlib import Path
from tests.mcp_fixture import Asker, make_server
from tests.features.mcp.process.test_mcp_host import jail
from tests.toolhost_fixture import bench

async def main():
    async with bench(make_server(Path(sys.argv[1]))) as made:
        await Asker(made).ask()
        there = jail(made, "srv")
        template = made.host.sessions._starter.templates["mcp"]
        print(json.dumps([there.process.pid, template.pid, *there.processes()]), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_nothing_of_a_server_outlives_a_tool_host_that_is_killed(short_tmp: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOST, str(short_tmp), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[4]
    )
    assert process.stdout is not None
    pids = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
    assert len(pids) >= 4
    process.kill()
    await process.wait()
    await gone(*pids)
