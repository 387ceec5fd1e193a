"""`gdn mcp import FILE`: the MCP servers that another program has in its JSON file, as Extension documents.

The documents go to stdout, and what needs attention to stderr. No value that may be a secret is in either.

Source: docs/mcp.md, "Servers of other programs".
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel.cli import options
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.mcp.imported import Imported

#: A list of servers that a person keeps is a few kilobytes; other programs keep more in the same file (bytes).
MAX_FILE: Final = 8 << 20


@click.command(name="import")
@click.argument("file", shell_complete=options.completed_path("file"))
@click.option("--write", is_flag=True, help="Add the documents to the bundle's goondan.yaml.")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    default=".",
    shell_complete=options.completed_path("dir"),
    help="The bundle's folder, for --write.  [default: here]",
)
@options.as_json
def command(file: str, write: bool, folder: str, as_json: bool) -> int:
    """Convert the MCP servers of FILE, the JSON of another program, into Extension documents."""
    from goondan.kernel.bundle.base import base_tools
    from goondan.kernel.cli.batch import parse_json
    from goondan.kernel.cli.lines import FROM_STDIN, read_all
    from goondan.kernel.mcp.foreign import plain_json, servers_of
    from goondan.kernel.mcp.imported import import_servers

    data = read_all(MAX_FILE) if file == FROM_STDIN else _read(file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise fail("E_USAGE", f"{file[:200]}: it is not UTF-8") from None
    found = import_servers(servers_of(parse_json(plain_json(text))), base_tools())
    written = _add(found, folder) if write else None
    _report(found, written, as_json)
    return 0 if any(server.document is not None for server in found) else 1


def _read(path: str) -> bytes:
    from goondan.schemas.wire.blobs import too_large

    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as opened:
            data = opened.read(MAX_FILE + 1) or b""
    except (OSError, ValueError) as error:
        raise fail("E_USAGE", f"{path[:200]}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE:
        raise too_large(len(data), MAX_FILE)
    return data


def _add(found: list[Imported], folder: str) -> str:
    """Put the documents into the bundle of a folder; the path of its goondan.yaml. Raises GoondanError E_INIT."""
    from goondan.kernel.cli.commands.mcp_document import add_to_bundle

    return add_to_bundle([server.document for server in found if server.document is not None], folder)


def _report(found: list[Imported], written: str | None, as_json: bool) -> None:
    from goondan.kernel.cli.output import write, write_json
    from goondan.kernel.mcp.document import yaml_text

    if as_json:
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
                write("---", *yaml_text(server.document).splitlines())
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
