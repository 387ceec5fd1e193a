"""The lists of MCP servers that other programs keep, as Extension documents, and what needs attention. Pure.

Their forms differ in names only. The table is `mcpServers`, `servers`, `context_servers` or `mcp`. A program is
`command` with `args`, or one list, or an object. An address is `url`, `httpUrl`, `serverUrl` or `endpoint`. Comments
are taken, and commas before a closing bracket, because editors write them.

Nothing that may be a secret is in a document or in the remarks: its place has `${NAME}`, and the remark names NAME.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from shlex import quote
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from goondan.features.mcp.bundle.document import extension_document, usable_name
from goondan.features.mcp.command.rules.packages import PackageCommand, package_command
from goondan.schemas.text import secret_values
from goondan.schemas.wire.errors import fail

# --- their lists ----------------------------------------------------------------------------------------------------

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


# --- their servers as documents -------------------------------------------------------------------------------------

#: An argument of which the part behind `=` has a name.
_NAMED: Final = re.compile(r"(--?[A-Za-z][\w.-]*|[A-Za-z_]\w*)=(.*)", re.DOTALL)
#: `Name: value`, as programs take headers.
_HEADER: Final = re.compile(r"([A-Za-z][A-Za-z0-9-]*):\s*(.*)", re.DOTALL)
#: Options of programs that take a header or a variable behind them.
_TAKES_PAIR: Final = frozenset({"-H", "--header", "-e", "--env"})
#: The folder that a program is for, in other programs' words.
_WORKSPACE: Final = re.compile(r"\$\{(workspaceFolder|workspaceRoot|CLAUDE_PROJECT_DIR)\}")
_CONTAINERS: Final = frozenset({"docker", "podman", "nerdctl"})
#: Keys of other programs that say which calls need no question.
_CONSENT: Final = frozenset({"autoApprove", "alwaysAllow", "trust", "autoApproved"})
_FILTERS: Final = frozenset({"includeTools", "excludeTools", "disabledTools", "enabledTools", "tools"})
_TIMES: Final = frozenset({"timeout", "startup_timeout_sec", "tool_timeout_sec", "timeoutMs"})


class Imported(Struct, frozen=True):
    """One server, converted."""

    #: Its name in the file that it comes from.
    origin: str
    #: The name of the Extension.
    name: str
    #: The Extension document; None when it cannot be converted.
    document: dict[str, Any] | None
    #: What needs a person's attention, one thing each.
    attention: list[str]
    #: The variables that have to be set where the kernel starts.
    variables: list[str]


def import_servers(servers: Iterable[ForeignServer], taken: Container[str]) -> list[Imported]:
    """The servers as Extension documents. `taken`: names that tools have, so no prefix may be one of them."""
    listed = list(servers)
    shared = _shared_values(listed)
    names: set[str] = set()
    found = []
    for server in listed:
        name = usable_name(server.name, taken, names)
        names.add(name)
        found.append(_Conversion(server, name, shared).done())
    return found


def _shared_values(servers: list[ForeignServer]) -> dict[str, set[str]]:
    """Name of a variable -> its different values in the file: two servers may mean two things by API_KEY."""
    found: dict[str, set[str]] = {}
    for server in servers:
        for key, value in server.env.items():
            if not secret_values.REFERENCE.search(value):
                found.setdefault(key, set()).add(value)
    return found


class _Conversion:
    """The conversion of one server."""

    def __init__(self, server: ForeignServer, name: str, values: dict[str, set[str]]) -> None:
        self._server = server
        self._name = name
        self._values = values
        self._attention = list(server.faults)
        self._variables: dict[str, None] = {}
        self._env: dict[str, str] = {}
        self._in_workdir = False
        self._hides = False  # its command has an argument that may be a secret

    def done(self) -> Imported:
        """The document and the remarks."""
        server = self._server
        transport = self._http(server.url) if server.url is not None else self._stdio() if server.command else None
        self._others()
        document = None
        if transport is not None:
            scope = "agent" if self._in_workdir else "instance"
            document = extension_document(self._name, transport, scope=scope, tools=list(server.only) or True)
        return Imported(server.name, self._name, document, self._attention, list(self._variables))

    # --- the two transports

    def _stdio(self) -> dict[str, Any]:
        server = self._server
        for name, value in server.env.items():
            self._variable(name, value)
        command = self._command([self._in_own_words(word) for word in server.command])
        self._of_program(server.command)
        if server.cwd is not None:
            self._say("it is started in a folder of its own there (`cwd`); here it is started in its workdir, or in /")
        return {"type": "stdio", "command": command} | ({"env": self._env} if self._env else {})

    def _http(self, url: str) -> dict[str, Any] | None:
        server = self._server
        if server.sse:
            self._say(
                "it is said to speak the older transport (sse), which is not spoken here; most such servers have the "
                "newer one at another path, often /mcp: ask its makers and change `endpoint`"
            )
        endpoint = self._endpoint(url)
        if endpoint is None:
            self._say("its URL is no URL of http or https")
            return None
        headers = {name: self._header(name, value) for name, value in server.headers.items()}
        return {"type": "http", "endpoint": endpoint} | ({"headers": headers} if headers else {})

    def _endpoint(self, url: str) -> str | None:
        try:
            parts = urlsplit(secret_values.REFERENCE.sub("", url).strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            return None
        if parts.scheme not in ("http", "https") or not host:
            return None
        if "${" in url:
            self._say("its URL has a variable, which an endpoint cannot have; it is left out: complete `endpoint`")
        if parts.username is not None or parts.query or parts.fragment:
            self._say(
                "its URL has a user or a query, which may be a secret, so they are left out; `headers` can hold secrets"
            )
        path = parts.path
        if secret_values.url_secret(urlunsplit((parts.scheme, "host", parts.path, "", ""))) is not None:
            path = "/".join(
                "REPLACE-ME" if secret_values.looks_secret(part) else part for part in parts.path.split("/")
            )
            self._say("a part of its URL may be a secret; REPLACE-ME stands there")
        where = f"[{host}]" if ":" in host else host
        return urlunsplit((parts.scheme, where if port is None else f"{where}:{port}", path, "", ""))

    def _header(self, name: str, value: str) -> str:
        scheme, rest = secret_values.without_scheme(value)
        return scheme + self._value(rest, name, secret_values.variable_name(self._name, name))

    # --- texts that may be secrets

    def _variable(self, name: str, value: str) -> None:
        """Take one variable over."""
        if secret_values.VARIABLE.fullmatch(name) is None:
            self._say(f"`env` has a name that no variable can have, which is left out: {name}")
            return
        own = name if len(self._values.get(name, ())) < 2 else secret_values.variable_name(self._name, name)
        self._env[name] = self._value(value, name, own)

    def _value(self, value: str, name: str, variable: str) -> str:
        """The value, or what stands in its place."""
        if not secret_values.REFERENCE.search(value):
            bare = re.fullmatch(r"\$([A-Za-z_]\w*)", value)
            if bare is not None:
                return self._need(bare.group(1))
            return value if secret_values.is_harmless(name, value) else self._hidden(name, variable)
        rest = secret_values.REFERENCE.sub("", value)
        if (
            rest.strip(" :/@")
            and not secret_values.is_harmless("", rest.strip(" :/@"))
            and secret_values.without_scheme(value)[0] == ""
        ):
            return self._hidden(name, variable)
        return secret_values.REFERENCE.sub(lambda match: self._reference(match.group(1)), value)

    def _reference(self, inside: str) -> str:
        name, remark = secret_values.own_reference(inside)
        if remark is not None:
            self._say(f"{name} {remark}: set it")
        return self._need(name)

    def _hidden(self, what: str, variable: str) -> str:
        self._say(f"{what}: its value is not copied, it may be a secret; set {variable} where the kernel starts")
        return self._need(variable)

    def _need(self, name: str) -> str:
        self._variables[name] = None
        return f"${{{name}}}"

    # --- the command

    def _in_own_words(self, word: str) -> str:
        if _WORKSPACE.search(word):
            self._in_workdir = True
        return _WORKSPACE.sub("${WORKDIR}", word)

    def _command(self, words: list[str]) -> list[str]:
        """The command. A secret among its words comes from the environment, by way of a shell."""
        shell: list[str] = []
        hidden = False
        before = ""
        for word in words:
            text = self._without_secret(word, before)
            hidden |= text is not None
            shell.append(quote(word) if text is None else text)
            before = word
        if not hidden:
            return words
        self._hides = True
        self._say(
            "a shell puts the secret into its command line, where the other processes of its jail can read it; if the "
            "program takes it from a variable, say so there"
        )
        return ["/bin/sh", "-c", f"exec {' '.join(shell)}"]

    def _without_secret(self, word: str, before: str) -> str | None:
        """The word as a shell reads it, when it may hold a secret; None when it is to stay as it is."""
        pair = _NAMED.fullmatch(word)
        if before in _TAKES_PAIR and (header := _HEADER.fullmatch(word)) is not None:
            scheme, rest = secret_values.without_scheme(header.group(2))
            return self._in_shell(f"{header.group(1)}: {scheme}", rest, header.group(1))
        if pair is not None and (
            secret_values.is_secret_name(pair.group(1)) or secret_values.looks_secret(pair.group(2))
        ):
            if secret_values.is_harmless("", pair.group(2)):
                return None
            return self._in_shell(f"{pair.group(1)}=", pair.group(2), pair.group(1))
        if secret_values.REFERENCE.search(word.replace("${WORKDIR}", "")):
            return self._in_shell("", word, before if before.startswith("-") else "ARGUMENT")
        if (
            before.startswith("-")
            and secret_values.is_secret_name(before)
            and not word.startswith("-")
            and "=" not in before
        ):
            return None if secret_values.is_harmless("", word) else self._in_shell("", word, before)
        if pair is None and not word.startswith("-") and secret_values.looks_secret(word):
            return self._in_shell("", word, before if before.startswith("-") else "ARGUMENT")
        return None

    def _in_shell(self, kept: str, secret: str, what: str) -> str:
        whole = re.fullmatch(r"\$\{([^{}$]+)\}", secret)
        if whole is not None:
            name, remark = secret_values.own_reference(whole.group(1))
            if remark is not None:
                self._say(f"{name} {remark}: set it")
            self._env[name] = self._need(name)
        else:
            name = secret_values.variable_name(self._name, what)
            while name in self._env:
                name += "_2"
            self._env[name] = self._hidden(f"the argument {what.strip('-') or 'of its command'}", name)
        return f'{quote(kept) if kept else ""}"${{{name}}}"'

    # --- what else to say

    def _of_program(self, command: list[str]) -> None:
        program = command[0].rsplit("/", 1)[-1].removesuffix(".cmd").removesuffix(".exe")
        found = package_command(command)
        if found is not None:
            self._say(
                f"{program} would install at each start, and nothing is installed at a start here; this installs it "
                f"once: gdn mcp add {self._name.removeprefix('mcp-')} -- {self._installing(found)}"
            )
        elif program in _CONTAINERS:
            self._say(f"{program} cannot be started in a jail; start the program of the image directly")
        elif command[0].startswith(("/", "~", "./", "../")) or "/" in command[0]:
            self._say("its program lies outside of the system's folders: grant its folder in sandbox.filesystem.read")
        if command[0][1:2] == ":" or command[0].endswith((".exe", ".cmd", ".bat")):
            self._say("its program is one of another operating system")
        paths = [word for word in command[1:] if word.startswith(("/", "~/")) and not secret_values.looks_secret(word)]
        if paths:
            self._say(
                f"{len(paths)} of its arguments are paths outside of its workdir, seen only when granted: "
                "sandbox.filesystem.read or .write"
            )

    def _installing(self, found: PackageCommand) -> str:
        """The command for `gdn mcp add`, without arguments when one of them may be a secret."""
        arguments = ["..."] if self._hides and found.arguments else found.arguments
        return " ".join(map(quote, [*found.words[: len(found.words) - len(found.arguments)], *arguments]))

    def _others(self) -> None:
        server = self._server
        if server.disabled:
            self._say("it is switched off there; name it in no agent's spec.extensions to leave it so")
        for key in server.others:
            if key in _CONSENT:
                self._say(f"`{key}` is not taken over: which calls a person is asked about is your agent's policy")
            elif key in _FILTERS:
                self._say(f"`{key}` is not taken over: choose the tools under expose.tools")
            elif key in _TIMES:
                self._say(f"`{key}` is not taken over: calls have the limits of the Extension's config")
            elif key == "envFile":
                self._say("`envFile` is not read: name its variables in env, as ${NAME}")
            else:
                self._say(f"`{key}` is not known here and was left out")

    def _say(self, text: str) -> None:
        if text not in self._attention:
            self._attention.append(text)
