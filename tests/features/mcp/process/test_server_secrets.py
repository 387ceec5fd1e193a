"""An MCP server knows the values of its variables and headers, and says them wherever it can: nobody is told them."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from goondan.schemas.bundle.launch import SandboxSpec, ServerSpec, ToolSpec
from goondan.schemas.worker.hosts import network, parse_rule, write_network
from tests.mcp_fixture import Asker, Web, make_server
from tests.toolhost_fixture import Bench, bench

SECRET = "tok-4711-Grüße-kept9"
GRANTED = "granted-1147-kept9"
#: In a host's name there is no room for every character.
NAMED = "tok-in-a-name-4711"

LEAKS = """
import base64, socket
token = os.environ["TOKEN"]
def gives(args, ask): return {token: ["and", token, {"deep": f"x{token}y"}, os.environ["GRANTED"]]}
def encodes(args, ask): return base64.b64encode(token.encode()).decode()
def fails(args, ask): raise LookupError(f"no entry for {token}")
def tells(args, ask):
    notify("notifications/progress", progressToken=ask["params"]["_meta"]["progressToken"], progress=1, message=token)
    notify("notifications/message", level="error", data=token)
    with lock: sys.stdout.write(f"noise {token}\\n"); sys.stdout.flush()
    return "told"
def prints(args, ask):
    for part in (token[:9], token[9:], " is wrong\\n"): os.write(2, part.encode()); time.sleep(0.05)
    return "printed"
def reaches(args, ask):
    try: socket.create_connection((os.environ["NAMED"] + ".example.com", 443), 2)
    except OSError as error: raise LookupError("unreached") from error
def dies(args, ask): os.write(2, f"bad token {token}".encode()); os._exit(3)
tools |= {f.__name__: f for f in (gives, encodes, fails, tells, prints, reaches, dies)} | {token: gives}
def answer(ask, honest=answer):
    if ask["method"] != "tools/list": return honest(ask)
    return {"tools": [{"name": name, "description": token, "inputSchema": {"type": "object"}} for name in tools]}
"""
NEVER = "sys.exit(f\"cannot begin with {os.environ['TOKEN']}\")"


def servers(folder: Path, port: int) -> list[ToolSpec]:
    env = {"TOKEN": SECRET, "NAMED": NAMED, "MODE": "info"}
    granted = SandboxSpec(env=["GRANTED"], network=write_network(network([parse_rule("127.0.0.1:1")])))
    leaks = make_server(folder, LEAKS, name="leaks", env=env, sandbox=granted)
    never = make_server(folder, name="never", env=env, last=NEVER)
    web = [
        replace(
            never,
            name=name,
            server=ServerSpec(
                extension=name,
                transport="http",
                worker="mcp",
                endpoint=f"http://127.0.0.1:{port}/{name}",
                headers={"Authorization": f"Bearer {NAMED}"},
                tools=True,
            ),
        )
        for name in ("web", "refuses")
    ]
    return [leaks, never, *web]


def everything(made: Bench) -> str:
    """All that came out of the tool host."""
    frames = [bytes(frame.payload) for frame in made.news]
    return repr((made.logs, made.results, made.progress, made.workers, made.receipts, frames))


async def test_no_way_out_of_a_server_has_its_secrets(short_tmp: Path) -> None:
    web = Web()
    async with await asyncio.start_server(web, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with bench(*servers(short_tmp, port), environment={"GRANTED": GRANTED}) as made:
            asker = Asker(made)
            told: dict[str, Any] = {name: await asker.ask(name) for name in ("leaks", "never", "web", "refuses")}
            for name in ("gives", "encodes", "fails", "tells", "prints", "reaches", "dies"):
                told[name] = await made.call(f"leaks__{name}")
            told["echo"] = await made.call("web__echo")
            logs = [line.message for line in made.logs]
            shown = repr(told) + everything(made)
        await asyncio.gather(*web.tasks)

    for secret in (SECRET, SECRET[9:], GRANTED, NAMED, base64.b64encode(SECRET.encode()).decode()[:-4]):
        assert secret not in shown
    tools = told["leaks"]["tools"]
    assert [tool["name"] for tool in tools][-1] == "dies", "a tool whose name is the secret is not offered"
    assert {tool["description"] for tool in tools} == {"***"}
    assert told["never"]["code"] == "E_MCP_CONNECT"
    assert "cannot begin with ***" in told["never"]["message"]
    assert told["gives"]["output"] == '{"***": ["and", "***", {"deep": "x***y"}, "***"]}'
    assert told["encodes"]["output"].startswith('"***')
    assert told["fails"]["error"]["message"].endswith("no entry for ***")
    assert "*** is wrong" in logs
    assert any("noise ***" in line for line in logs)
    assert any("***.example.com" in line for line in logs)
    assert "['***.example.com']" in repr(made.receipts)
    assert told["dies"]["error"]["message"].endswith("it said last: bad token ***")
    assert told["web"]["serverName"] == "***"
    assert told["echo"]["error"]["message"].endswith("*** may not")
