"""The inspection of one MCP server as a bundle with one agent, and what its logs say about refusals. Pure.

The agent has the server, and an extension that remembers the blocks of its step: there stand the server's resources,
its prompts, and what it says about its use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from goondan.kernel.mcp.document import extension_document

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


def _document(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "goondan.ai/v1", "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}
