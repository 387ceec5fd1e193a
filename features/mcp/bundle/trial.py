"""One MCP server on trial: it is started in a kernel and a state root of its own, and says what it offers.

The trial is a bundle with one agent. The agent has the server, and an extension that remembers the blocks of its step:
there stand the server's resources, its prompts, and what it says about its use. The logs tell what it was refused.

Source: docs/mcp.md, "Looking at servers".
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from goondan.features.mcp.bundle.document import extension_document
from goondan.kernel.cli.attach import attach_or_start
from goondan.kernel.cli.commands.call import tool_result
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.session import Session, over_session
from goondan.kernel.cli.state import locate
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire import errors, frames
from goondan.schemas.worker.servers import GET_PROMPT, READ_RESOURCE

#: The names of the bundle's parts.
SERVER: Final = "inspected"
AGENT: Final = "inspector"
REPORT: Final = "inspection__report"
MODULE: Final = "inspection.py"
MODULE_TEXT: Final = """\
def register(api):
    seen = []

    def remember(ctx):
        seen[:] = [block for block in ctx.blocks]
        return ctx

    api.pipelines.mutate("step.blocks", remember, priority=1000000)
    item = {"name": "inspection__report", "description": "What was seen.", "parameters": {"type": "object"}}
    api.tools.register(item, lambda ctx, input: {"blocks": list(seen)})
"""
#: How long the server and its agent have (seconds): a start has 30, and the agent has to be started as well.
PATIENCE_S: Final = 90.0
#: Lines of what the server has said itself that are shown.
_WORDS: Final = 8
#: A refusal in the log of the tool host.
_DENIED: Final = re.compile(
    r"(?P<host>[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}|\[[0-9a-f:]+\])(?P<port>:\d{1,5})? was denied"
)
#: The port of a name that was refused before a port was known.
_PORT: Final = ":443"
#: What programs say about a path that is not there, or closed to them.
_MISSING: Final = re.compile(
    r"(?:ENOENT|EACCES|EPERM|EROFS|No such file or directory|Permission denied|Read-only file system)[^/\n]{0,80}"
    r"['\"]?(?P<path>/[^\s'\"<>|:,;)]{2,300})"
)
#: Words that mean that it was to be written.
_WRITING: Final = re.compile(r"\b(EROFS|Read-only|mkdir|open for writing|write|unlink|rename)\b", re.IGNORECASE)
#: Paths that every jail has of its own, so that no grant would help.
_OWN: Final = ("/proc/", "/sys/", "/dev/", "/run/", "/tmp/", "/usr/", "/lib", "/bin/", "/etc/")
#: What programs say about a variable that they need.
_VARIABLE: Final = re.compile(
    r"(?:\b(?P<before>[A-Z][A-Z0-9_]{3,60})\b[^\n]{0,60}(?:environment variable|env var|is required|not set))"
    r"|(?:(?:environment variable|env var)s?[^\nA-Z]{0,40}\b(?P<after>[A-Z][A-Z0-9_]{3,60})\b)"
)


def bundle_text(transport: Mapping[str, Any], sandbox: Mapping[str, Any] | None) -> str:
    """The goondan.yaml of the inspection; each document is JSON, which quotes whatever a command holds."""
    scope = "agent" if "${WORKDIR}" in json.dumps(transport) else "instance"
    documents = [
        _document("Model", "console", {"provider": "embedded"}),
        extension_document(SERVER, transport, scope=scope, sandbox=sandbox),
        _document("Extension", "inspection", {"entry": f"./{MODULE}"}),
        _document(
            "Agent",
            AGENT,
            {
                "modelConfig": {"modelRef": "Model/console"},
                "extensions": [{"ref": f"Extension/{SERVER}"}, {"ref": "Extension/inspection"}],
            },
        ),
        _document("Swarm", "inspection", {"entryAgent": f"Agent/{AGENT}", "agents": [{"ref": f"Agent/{AGENT}"}]}),
    ]
    return "---\n".join(json.dumps(document, indent=1) + "\n" for document in documents)


def refusals(logs: Iterable[str]) -> dict[str, list[str]]:
    """What a server tried in vain, as its jail and its own words tell: `hosts`, `read` and `write` paths, `env`.

    A program that says nothing about a missing file leaves no trace here. A name that does not get as far as a port is
    taken to be meant for 443.
    """
    found: dict[str, dict[str, None]] = {"hosts": {}, "read": {}, "write": {}, "env": {}}
    for line in logs:
        for match in _DENIED.finditer(line):
            found["hosts"][match["host"] + (match["port"] or _PORT)] = None
        for match in _MISSING.finditer(line):
            path = match["path"].rstrip(".")
            if not path.startswith(_OWN):
                found["write" if _WRITING.search(line) else "read"][path] = None
        for match in _VARIABLE.finditer(line):
            found["env"][match["before"] or match["after"]] = None
    return {kind: list(values) for kind, values in found.items()}


def program_folder(path: str) -> str:
    """The folder that a program needs which a command names by this file. A program of npm needs its whole
    `node_modules`: the packages that it uses lie beside its own.
    """
    before, modules, _ = path.partition("/node_modules/")
    return f"{before}/node_modules" if modules else path.rpartition("/")[0]


def grants(tried: Mapping[str, Sequence[str]], own: Sequence[str] = ()) -> dict[str, Any]:
    """The sandbox that the server needs: folders of its program (`own`), and what would open what was refused. {} when
    there is neither.
    """
    sandbox: dict[str, Any] = {}
    wanted = {"read": [*own, *tried.get("read", ())], "write": list(tried.get("write", ()))}
    filesystem = {kind: list(dict.fromkeys(paths)) for kind, paths in wanted.items() if paths}
    if filesystem:
        sandbox["filesystem"] = filesystem
    if tried.get("hosts"):
        sandbox["network"] = {"allow": list(tried["hosts"])}
    return sandbox


def trial_of(tool: ToolSpec, agent: str) -> dict[str, Any]:
    """The result of a server of a bundle for `gdn extension test`: it is started as it would be for this agent."""
    server = tool.servers.get(agent) or tool.server
    if server is None:
        raise AssertionError("only a server is tried")
    if server.transport == "http":
        told = inspected({"type": "http", "endpoint": server.endpoint, "headers": server.headers}, None)
    else:
        files = tool.sandbox.filesystem
        reads = [*files.read, *([tool.root] if tool.root else [])]
        sandbox = {"filesystem": {"read": reads, "write": files.write}, "env": tool.sandbox.env}
        sandbox |= {"network": tool.sandbox.network}
        told = inspected({"type": "stdio", "command": server.command, "env": server.env}, sandbox)
    if told["server"] is None:
        return {"status": "failed", "code": "E_MCP_CONNECT", "message": told["error"] or "no word", "log": told["said"]}
    return {"status": "passed", "middleware": {}, "points": [], "tools": [tool["name"] for tool in told["tools"]]}


def _document(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "goondan.ai/v1", "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def inspected(
    transport: dict[str, Any], sandbox: dict[str, Any] | None, own_folders: Sequence[str] = ()
) -> dict[str, Any]:
    """What the server offers, and what it was refused, in a kernel of its own."""
    with tempfile.TemporaryDirectory(prefix="goondan-inspect-") as own:
        os.environ["GOONDAN_STATE_ROOT"] = os.path.join(own, "state")
        bundle = Path(own, "bundle")
        bundle.mkdir()
        (bundle / MODULE).write_text(MODULE_TEXT)
        (bundle / "goondan.yaml").write_text(bundle_text(transport, sandbox))
        place = locate(str(bundle), trust=True)
        offers: dict[str, Any] = {"server": None, "tools": [], "resources": [], "prompts": [], "error": None}
        with attach_or_start(place, ()) as kernel:
            try:
                offers |= over_session(kernel, _asked)
            except errors.GoondanError as error:
                offers["error"] = error.info.message
            reply = ask_supervisor(place.state_dir, "ps")
            states = [] if reply is None else reply.servers or []
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

    async def ask(kind: str, input: Any) -> Any:
        answer = await session.ask(Message(AGENT, "default", input, kind), timeout_s=PATIENCE_S)
        return tool_result(answer).get("output")

    report = await ask(frames.OPERATOR_CALL, frames.OperatorCall(REPORT, {})) or {}
    listed = await ask(frames.OPERATOR_TOOLS, None) or []
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
    words = {READ_RESOURCE: "Reads a resource of this server.", GET_PROMPT: "Gets a prompt of this server"}
    about = words.get(tool["name"])
    return about is not None and str(tool.get("description", "")).startswith(about)


def _log_lines(state_dir: str) -> list[str]:
    """What the tool host has logged about the server, with the server's own words."""
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
