"""`gdn mcp inspect COMMAND…`: start an MCP server in a jail, and show what it offers and what it was refused.

It runs in a kernel and a state root of its own, of which nothing is left. Nothing is installed.

Source: docs/mcp.md, "Looking at servers".
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.commands.call import check_grant, tool_result
from goondan.kernel.mcp.inspecting import (
    AGENT,
    MODULE,
    MODULE_TEXT,
    REPORT,
    SERVER,
    bundle_text,
    grants,
    program_folder,
    refusals,
)
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goondan.kernel.cli.session import Session

#: How long the server and its agent have (seconds): a start has 30, and the agent has to be started as well.
PATIENCE_S: Final = 90.0
#: A host that does not exist: granted so that there is a network in which every host is refused by its name.
NOBODY: Final = "nobody.invalid:1"
#: Characters of a description that are shown.
_SHOWN: Final = 100
#: Lines of what the server has said itself that are shown.
_WORDS: Final = 8


@click.command(
    name="inspect",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: gdn mcp inspect --read ./mcp/time ./mcp/time/venv/bin/python -m server",
)
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--read", "reads", metavar="PATH", multiple=True, help="It may read this. Repeatable.")
@click.option("--write", "writes", metavar="DIR", multiple=True, help="It may write there. Repeatable.")
@click.option("--net", "network", metavar="HOST:PORT", multiple=True, help="It may reach this host. Repeatable.")
@click.option("--env", "variables", metavar="NAME", multiple=True, help="It gets this variable of yours. Repeatable.")
@options.as_json
def command(
    words: tuple[str, ...],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    network: tuple[str, ...],
    variables: tuple[str, ...],
    as_json: bool,
) -> int:
    """Start an MCP server in a jail; show what it offers, what it was refused, and the grants that it would need."""
    from goondan.kernel.mcp.packages import package_command

    for grant in network:
        check_grant(grant)
    if package_command(words) is not None:
        hint = "Install it first: gdn mcp add NAME -- COMMAND…; then inspect the command of its Extension."
        raise fail(
            "E_USAGE", f"{words[0]} would install a package, and nothing is installed at a start", suggestion=hint
        )
    shown = [_whole(word) for word in words]
    own = _own_folders(shown)
    sandbox = _sandbox(own, [_whole(path) for path in reads], [_whole(path) for path in writes], network)
    transport: dict[str, Any] = {"type": "stdio", "command": shown}
    if variables:
        transport["env"] = {name: f"${{{name}}}" for name in variables}
    told = inspected(transport, sandbox, own)
    _report(told, as_json)
    return 0 if told["server"] is not None else 1


def _whole(word: str) -> str:
    """Paths are those of this folder, and the bundle of the inspection lies elsewhere."""
    if word.startswith(("./", "../", "~/")) and os.path.lexists(os.path.expanduser(word)):
        return os.path.abspath(os.path.expanduser(word))
    return word


def _own_folders(words: list[str]) -> list[str]:
    """The folders of the program itself: without them nothing could be started."""
    own = [program_folder(word) for word in words if word.startswith("/") and os.path.isfile(word)]
    return [folder for folder in dict.fromkeys(own) if folder and not folder.startswith(("/usr/", "/bin", "/lib"))]


def _sandbox(own: list[str], reads: list[str], writes: list[str], network: tuple[str, ...]) -> dict[str, Any]:
    """What was granted, and the folders of the program itself."""
    sandbox: dict[str, Any] = {"filesystem": {"read": list(dict.fromkeys([*reads, *own])), "write": writes}}
    # With no network at all a program cannot make a socket, and nobody hears whom it wanted to reach.
    sandbox["network"] = {"allow": [*network, NOBODY]}
    return sandbox


def inspected(
    transport: dict[str, Any], sandbox: dict[str, Any] | None, own_folders: Sequence[str] = ()
) -> dict[str, Any]:
    """What the server offers, and what it was refused, in a kernel of its own."""
    import asyncio

    from goondan.kernel.cli.attach import attach_or_start, locate
    from goondan.kernel.cli.session import Session
    from goondan.kernel.supervisor_client import SupervisorClient

    with tempfile.TemporaryDirectory(prefix="goondan-inspect-") as own:
        os.environ["GOONDAN_STATE_ROOT"] = os.path.join(own, "state")
        bundle = Path(own, "bundle")
        bundle.mkdir()
        (bundle / MODULE).write_text(MODULE_TEXT)
        (bundle / "goondan.yaml").write_text(bundle_text(transport, sandbox))
        place = locate(str(bundle), trust=True)
        kernel = attach_or_start(place, ())
        offers: dict[str, Any] = {"server": None, "tools": [], "resources": [], "prompts": [], "error": None}
        try:

            async def go() -> None:
                async with Session(kernel) as session:
                    offers.update(await _asked(session))

            try:
                asyncio.run(go())
            except GoondanError as error:
                offers["error"] = error.info.message
            client = SupervisorClient.connect(place.state_dir)
            states = [] if client is None else client.ask("ps").servers or []
            if client is not None:
                client.close()
        finally:
            kernel.finish()
        lines = _log_lines(place.state_dir)
        for news in states:
            if news.server is not None:
                known = {"protocolVersion": news.server.protocol_version, "memoryKb": news.server.memory_kb}
                if news.server.state == "connected":
                    offers["server"] = known
                offers["error"] = offers["error"] or news.server.last_error
        said = [text for text in lines if text]
        tried = refusals([*said, offers["error"] or ""])
        return {**offers, "refused": tried, "grants": grants(tried, own_folders), "said": said[-_WORDS:]}


async def _asked(session: Session) -> dict[str, Any]:
    """The tools of the agent that has the server, and the blocks that its step was given."""
    from goondan.schemas.wire.frames import OPERATOR_CALL, OPERATOR_TOOLS, OperatorCall

    async def ask(kind: str, input: Any) -> Any:
        answer = await session.ask(AGENT, "default", kind, input, event_id=session.new_id(), timeout_s=PATIENCE_S)
        return tool_result(answer).get("output")

    report = await ask(OPERATOR_CALL, OperatorCall(REPORT, {})) or {}
    listed = await ask(OPERATOR_TOOLS, None) or []
    tools = [
        {**tool, "name": tool["name"].partition("__")[2]} for tool in listed if tool["name"].startswith(f"{SERVER}__")
    ]
    found: dict[str, Any] = {}
    for block in report.get("blocks", []):
        kind = str(block.get("type", ""))
        if kind in ("mcp.resources", "mcp.prompts"):
            found[kind.partition(".")[2]] = block.get("items", [])
        elif kind == "mcp.instructions":
            found["instructions"] = block.get("text")
    return {**found, "tools": [tool for tool in tools if not _is_ours(tool)]}


def _is_ours(tool: dict[str, Any]) -> bool:
    """Whether it is no tool of the server: with it a model reads the server's resources or gets its prompts."""
    from goondan.schemas.mcp import GET_PROMPT, READ_RESOURCE

    words = {READ_RESOURCE: "Reads a resource of this server.", GET_PROMPT: "Gets a prompt of this server"}
    about = words.get(tool["name"])
    return about is not None and str(tool.get("description", "")).startswith(about)


def _log_lines(state_dir: str) -> list[str]:
    """What the tool host has logged about the server, with the server's own words."""
    import json

    found = []
    for path in sorted(Path(state_dir, "logs").glob("toolhost*")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("tool") == SERVER:
                found.append(str(entry.get("message", "")))
    return found


def _report(told: dict[str, Any], as_json: bool) -> None:
    from goondan.kernel.cli.output import write, write_json
    from goondan.kernel.mcp.document import yaml_text

    if as_json:
        write_json(told)
        return
    server = told["server"]
    lines = [
        f"connected, protocol {server['protocolVersion']}, {server['memoryKb'] // 1024} MiB"
        if server
        else "not connected"
    ]
    for kind in ("tools", "resources", "prompts"):
        items = told[kind]
        lines += [f"{kind}: {len(items)}", *(_line(item) for item in items)]
    tried = told["refused"]
    names = {"hosts": "network", "read": "to read", "write": "to write", "env": "variables"}
    lines += [f"refused, {name}: {', '.join(tried[kind])}" for kind, name in names.items() if tried[kind]]
    write(*lines)
    if told["grants"]:
        write("it would need:", *yaml_text({"sandbox": told["grants"]}).splitlines())
    if not server:
        write(*([told["error"]] if told["error"] else []), *told["said"], stream=sys.stderr)


def _line(item: dict[str, Any]) -> str:
    name = str(item.get("name") or item.get("uri"))
    about = " ".join(str(item.get("description") or item.get("uri") or "").split())
    return f"  {name}   {about[:_SHOWN]}".rstrip()
