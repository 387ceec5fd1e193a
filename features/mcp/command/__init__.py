"""The commands `gdn mcp …`. Those that are here: `list`, `inspect` and `import`.

- `list` shows the servers of a bundle, and how those are that run.
- `inspect` starts a server in a jail, and shows what it offers and what it was refused. Nothing is installed.
- `import` writes Extension documents of the servers that another program has in its JSON file. No value that may be a
  secret is in the documents or in the remarks.

Source: docs/mcp.md, "Looking at servers" and "Servers of other programs".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import click

from goondan.features.mcp.api import idle_row, row
from goondan.features.mcp.bundle import SERVERS, document, trial
from goondan.features.mcp.command.add import add, add_to_bundle
from goondan.features.mcp.command.rules import importing, packages
from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.bundle.rules.extensions import extension_spec, fits
from goondan.kernel.cli import options
from goondan.kernel.cli.commands.call import check_grant
from goondan.kernel.cli.console.lines import FROM_STDIN, read_all
from goondan.kernel.cli.output import columns, emit, printable, wants_json, write, write_json
from goondan.kernel.cli.rules.batch import parse_json
from goondan.kernel.cli.state import locate
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.schemas.bundle import launch
from goondan.schemas.wire.blobs import too_large
from goondan.schemas.wire.errors import fail

#: A list of servers that a person keeps is a few kilobytes; other programs keep more in the same file (bytes).
MAX_FILE: Final = 8 << 20
#: A host that does not exist: granted so that there is a network in which every host is refused by its name.
NOBODY: Final = "nobody.invalid:1"
#: Characters of a description that are shown.
_SHOWN: Final = 100
_COLUMNS: Final = ("SERVER", "INSTANCE", "STATE", "ATTACHED", "CALLS", "MEMORY", "PID", "PROTOCOL")


# --- list -----------------------------------------------------------------------------------------------------------


@click.command(name="list")
@options.bundle
@options.policy
@options.json
def list_servers(bundle: str | None, policy: str | None) -> None:
    """Show the MCP servers of a bundle: state, calls, memory, last error."""
    place = locate(bundle, policy)
    reply = ask_supervisor(place.state_dir, "ps")
    running = [] if reply is None else reply.servers or []
    bundled = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy)
    rows = [row(news) for news in running if news.server is not None]
    seen = {one["server"] for one in rows}
    for prefix, server in sorted(bundled.checked.servers.items()):
        if prefix not in seen:
            rows.append(idle_row(prefix, server.spec.extension, server.spec.transport))
    named = {server.spec.extension for server in bundled.checked.servers.values()}
    for one in (one for one in bundled.checked.extensions.values() if one.name not in named):
        spec = extension_spec(one, None)
        if launch.is_bundled(SERVERS.extension, spec.entry, spec.bundled) and spec.config and fits(one, spec.config):
            told = idle_row(SERVERS.prefix(spec.name, spec.config), spec.name, spec.config["transport"]["type"])
            rows.append({**told, "state": "no agent names it"})
    emit(rows, render(rows) if rows else [f"no MCP servers in {place.bundle}"])


def render(rows: list[dict[str, Any]]) -> list[str]:
    """The table, with the last error of a server below it. What servers and agents are called is text from outside."""
    head, *lines = columns([_COLUMNS, *map(_cells, rows)])
    shown = [head]
    for one, line in zip(rows, lines, strict=True):
        shown.append(line)
        if one["lastError"]:
            shown.append(f"    {printable(str(one['lastError']))}")
    return shown


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    instance = one["instanceKey"] or "-"
    if one["agent"]:
        instance = f"{one['agent']}/{instance}"
    calls = str(one["calls"]) + (f" ({one['openCalls']} open)" if one["openCalls"] else "")
    memory = f"{one['memoryKb'] // 1024} MiB" if one["memoryKb"] else "-"
    cells = (one["server"], instance, one["state"], str(one["attached"]), calls, memory, str(one["pid"] or "-"))
    return tuple(map(printable, (*cells, one["protocolVersion"] or "-")))


# --- inspect --------------------------------------------------------------------------------------------------------


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
@options.json
def inspect_server(
    words: tuple[str, ...],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    network: tuple[str, ...],
    variables: tuple[str, ...],
) -> int:
    """Start an MCP server in a jail; show what it offers, what it was refused, and the grants that it would need."""
    for grant in network:
        check_grant(grant)
    if packages.package_command(words) is not None:
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
    told = trial.inspected(transport, sandbox, own)
    _report_inspection(told)
    return 0 if told["server"] is not None else 1


def _whole(word: str) -> str:
    """Paths are those of this folder, and the bundle of the inspection lies elsewhere."""
    if word.startswith(("./", "../", "~/")) and os.path.lexists(os.path.expanduser(word)):
        return os.path.abspath(os.path.expanduser(word))
    return word


def _own_folders(words: list[str]) -> list[str]:
    """The folders of the program itself: without them nothing could be started."""
    own = [trial.program_folder(word) for word in words if word.startswith("/") and os.path.isfile(word)]
    return [folder for folder in dict.fromkeys(own) if folder and not folder.startswith(("/usr/", "/bin", "/lib"))]


def _sandbox(own: list[str], reads: list[str], writes: list[str], network: tuple[str, ...]) -> dict[str, Any]:
    """What was granted, and the folders of the program itself."""
    sandbox: dict[str, Any] = {"filesystem": {"read": list(dict.fromkeys([*reads, *own])), "write": writes}}
    # With no network at all a program cannot make a socket, and nobody hears whom it wanted to reach.
    sandbox["network"] = {"allow": [*network, NOBODY]}
    return sandbox


def _report_inspection(told: dict[str, Any]) -> None:
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
    if told["grants"]:
        lines += ["it would need:", *document.yaml_text({"sandbox": told["grants"]}).splitlines()]
    emit(told, lines)
    if not server and not wants_json():
        write(*([told["error"]] if told["error"] else []), *told["said"], stream=sys.stderr)


def _line(item: dict[str, Any]) -> str:
    name = str(item.get("name") or item.get("uri"))
    about = " ".join(str(item.get("description") or item.get("uri") or "").split())
    return f"  {name}   {about[:_SHOWN]}".rstrip()


# --- import ---------------------------------------------------------------------------------------------------------


@click.command(name="import")
@click.argument("file", shell_complete=options.completed_path("file"))
@click.option("--write", is_flag=True, help="Add the documents to the bundle's goondan.yaml.")
@options.in_folder("The bundle's folder, for --write.  [default: here]")
@options.json
def import_file(file: str, write: bool, folder: str) -> int:
    """Convert the MCP servers of FILE, the JSON of another program, into Extension documents."""
    data = read_all(MAX_FILE) if file == FROM_STDIN else _read(file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise fail("E_USAGE", f"{file[:200]}: it is not UTF-8") from None
    found = importing.import_servers(importing.servers_of(parse_json(importing.plain_json(text))), base_tools())
    documents = [server.document for server in found if server.document is not None]
    written = add_to_bundle(documents, folder) if write else None
    _report_import(found, written)
    return 0 if documents else 1


def _read(path: str) -> bytes:
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as opened:
            data = opened.read(MAX_FILE + 1) or b""
    except (OSError, ValueError) as error:
        raise fail("E_USAGE", f"{path[:200]}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE:
        raise too_large(len(data), MAX_FILE)
    return data


def _report_import(found: list[importing.Imported], written: str | None) -> None:
    if wants_json():
        servers: list[dict[str, Any]] = [
            {
                "server": server.origin,
                "extension": server.name,
                "document": server.document,
                "attention": server.attention,
                "variables": server.variables,
            }
            for server in found
        ]
        write_json({"servers": servers} | ({"changed": written} if written is not None else {}))
        return
    if written is None:
        for server in found:
            if server.document is not None:  # the line before separates it from what stands in a file already
                write("---", *document.yaml_text(server.document).splitlines())
    for server in found:
        head = f"{server.origin}: {f'Extension/{server.name}' if server.document is not None else 'not converted'}"
        write(head, *(f"  - {text}" for text in server.attention), stream=sys.stderr)
    names = sorted({name for server in found for name in server.variables})
    lines = [f"set where the kernel starts: {' '.join(names)}"] if names else []
    if written is not None:
        lines.append(f"added to {written}")
    usable = [f"Extension/{server.name}" for server in found if server.document is not None]
    if usable:
        lines.append(f"an agent that is to have them names them in spec.extensions: {', '.join(usable)}")
    if lines:
        write("", *lines, stream=sys.stderr)


COMMANDS: Final[Mapping[str, click.Command]] = {
    "mcp add": add,
    "mcp inspect": inspect_server,
    "mcp list": list_servers,
    "mcp import": import_file,
}
