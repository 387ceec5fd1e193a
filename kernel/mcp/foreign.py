"""The lists of MCP servers that other programs keep, as JSON. Pure.

Their forms differ in names only. The table is `mcpServers`, `servers`, `context_servers` or `mcp`. A program is
`command` with `args`, or one list, or an object. An address is `url`, `httpUrl`, `serverUrl` or `endpoint`. Comments
are taken, and commas before a closing bracket, because editors write them.
"""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.wire.errors import fail

#: More servers stand in no list that a person has written.
MAX_SERVERS: Final = 200
#: More arguments, variables or headers of one server are not taken.
MAX_PARTS: Final = 200

_TABLES: Final = ("mcpServers", "servers", "context_servers", "mcp")
_URLS: Final = ("url", "httpUrl", "serverUrl", "endpoint")
_KNOWN: Final = frozenset(
    {
        *_URLS,
        "command", "args", "env", "environment", "headers", "http_headers", "type", "transport", "disabled", "enabled",
        "cwd", "description", "name", "source",
    }
)  # fmt: skip
#: Lists of the only tools that are used.
_ONLY: Final = ("includeTools", "enabledTools")
_HTTP: Final = frozenset({"http", "https", "streamable-http", "streamable_http", "streamableHttp", "remote"})
#: A string, a comment, or a comma that only a closing bracket follows. What has no end goes to the end of the text, and
#: no part is looked at twice (`*+`): a hostile file would take years.
_JSONC: Final = re.compile(
    r'"(?:[^"\\]|\\.)*+(?:"|\Z)|//[^\n]*+|/\*(?>.*?(?:\*/|\Z))'
    r"|,(?=(?:\s|//[^\n]*+|/\*(?>.*?(?:\*/|\Z)))*+[}\]])",
    re.DOTALL,
)


class ForeignServer(Struct, frozen=True, kw_only=True):
    """One server as another program has it."""

    #: Its name there.
    name: str
    #: The program and its arguments; empty for one that is reached over HTTP.
    command: list[str] = []
    #: The variables that the program gets. They may be secrets.
    env: dict[str, str] = {}
    #: The URL of one that is reached over HTTP. It may hold a secret.
    url: str | None = None
    #: Headers of each request. They may be secrets.
    headers: dict[str, str] = {}
    #: It speaks the older transport, with one stream of events.
    sse: bool = False
    #: The other program does not start it.
    disabled: bool = False
    #: The folder that the program is started in.
    cwd: str | None = None
    #: The tools of it that are used there; empty: all.
    only: list[str] = []
    #: Keys that say something else.
    others: list[str] = []
    #: What was not understood, in words.
    faults: list[str] = []


def plain_json(text: str) -> str:
    """The text without comments and without commas that close a list."""

    def kept(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith('"'):
            return found
        return "" if found == "," else " "

    return _JSONC.sub(kept, text)


def servers_of(value: Any) -> list[ForeignServer]:
    """The servers in a decoded file, in its order. Raises GoondanError E_USAGE when there is no list of servers."""
    found: list[tuple[str, dict[str, Any]]] = []
    for table in _tables(value):
        found += [(name, server) for name, server in table.items() if isinstance(server, dict)]
    if not found:
        message = "no MCP servers in it: expected an object with `mcpServers`"
        raise fail("E_USAGE", message, suggestion='For example {"mcpServers": {"name": {"command": "…", "args": []}}}.')
    if len(found) > MAX_SERVERS:
        raise fail("E_USAGE", f"{len(found)} servers; at most {MAX_SERVERS} are taken")
    return [_server(name, server) for name, server in found]


def _tables(value: Any) -> list[dict[str, Any]]:
    """Every table of servers; the one of a project stands in the project."""
    if not isinstance(value, dict):
        return []
    found: list[dict[str, Any]] = []
    for key in _TABLES:
        table = value.get(key)
        if isinstance(table, dict):
            inner = table.get("servers") if key == "mcp" else None
            found.append(inner if isinstance(inner, dict) else table)
    projects = value.get("projects")
    if isinstance(projects, dict):
        for project in projects.values():
            table = project.get("mcpServers") if isinstance(project, dict) else None
            if isinstance(table, dict):
                found.append(table)
    if not found and value and all(_is_server(server) for server in value.values()):
        found.append(value)
    return found


def _is_server(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in ("command", *_URLS))


def _server(name: str, given: dict[str, Any]) -> ForeignServer:
    faults: list[str] = []
    command, env = _command(given, faults), _texts(given, ("env", "environment"), faults)
    if isinstance(inner := given.get("command"), dict):
        env = {**_texts(inner, ("env",), faults), **env}
    urls = [given[key] for key in _URLS if isinstance(given.get(key), str)]
    kind = given.get("type", given.get("transport"))
    if (isinstance(kind, str) and kind in _HTTP) or kind == "sse":
        command = []
    if not command and not urls:
        faults.append("it has neither a command nor a URL")
    return ForeignServer(
        name=name,
        command=command,
        env=env,
        url=None if command or not urls else urls[0],
        headers=_texts(given, ("headers", "http_headers"), faults),
        sse=kind == "sse",
        disabled=given.get("disabled") is True or given.get("enabled") is False,
        cwd=given["cwd"] if isinstance(given.get("cwd"), str) else None,
        only=_names(given),
        others=[key for key in given if key not in _KNOWN and not (key in _ONLY and _names(given))][:MAX_PARTS],
        faults=faults,
    )


def _names(given: dict[str, Any]) -> list[str]:
    """The tools that are named as the only ones."""
    for key in _ONLY:
        names = given.get(key)
        if (
            isinstance(names, list)
            and 0 < len(names) <= MAX_PARTS
            and all(isinstance(name, str) and name for name in names)
        ):
            return list(names)
    return []


def _command(given: dict[str, Any], faults: list[str]) -> list[str]:
    program: Any = given.get("command")
    args = given.get("args", [])
    if isinstance(program, dict):  # {path, args, env}
        program, args = program.get("path"), program.get("args", args)
    words = [*program] if isinstance(program, list) else [] if program is None else [program]
    words += args if isinstance(args, list) else [args]
    if any(not isinstance(word, str | int | float) or isinstance(word, bool) for word in words):
        faults.append("its command has a part that is no text")
        return []
    if len(words) > MAX_PARTS:
        faults.append(f"its command has more than {MAX_PARTS} parts")
        return []
    return [str(word) for word in words] if program else []


def _texts(given: dict[str, Any], keys: tuple[str, ...], faults: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in keys:
        table = given.get(key)
        if table is None:
            continue
        if not isinstance(table, dict) or len(table) > MAX_PARTS:
            faults.append(f"its `{key}` is no object of at most {MAX_PARTS} texts")
            continue
        for name, value in table.items():
            if isinstance(value, bool):
                value = str(value).lower()
            if isinstance(value, str | int | float):
                found[name] = str(value)
            else:
                faults.append(f"`{key}` has a value that is no text: {name}")
    return found
