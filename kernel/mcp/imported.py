"""A server of another program's list as an Extension document, and what a person has to know about it. Pure.

Nothing that may be a secret is in the document or in the remarks: its place has `${NAME}`, and the remark names NAME.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from shlex import quote
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from goondan.kernel.mcp.document import extension_document, usable_name
from goondan.kernel.mcp.foreign import ForeignServer
from goondan.kernel.mcp.packages import PackageCommand, package_command
from goondan.schemas.text.secret_values import (
    REFERENCE,
    VARIABLE,
    is_harmless,
    is_secret_name,
    looks_secret,
    own_reference,
    url_secret,
    variable_name,
    without_scheme,
)

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
            if not REFERENCE.search(value):
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
            parts = urlsplit(REFERENCE.sub("", url).strip())
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
        if url_secret(urlunsplit((parts.scheme, "host", parts.path, "", ""))) is not None:
            path = "/".join("REPLACE-ME" if looks_secret(part) else part for part in parts.path.split("/"))
            self._say("a part of its URL may be a secret; REPLACE-ME stands there")
        where = f"[{host}]" if ":" in host else host
        return urlunsplit((parts.scheme, where if port is None else f"{where}:{port}", path, "", ""))

    def _header(self, name: str, value: str) -> str:
        scheme, rest = without_scheme(value)
        return scheme + self._value(rest, name, variable_name(self._name, name))

    # --- texts that may be secrets

    def _variable(self, name: str, value: str) -> None:
        """Take one variable over."""
        if VARIABLE.fullmatch(name) is None:
            self._say(f"`env` has a name that no variable can have, which is left out: {name}")
            return
        own = name if len(self._values.get(name, ())) < 2 else variable_name(self._name, name)
        self._env[name] = self._value(value, name, own)

    def _value(self, value: str, name: str, variable: str) -> str:
        """The value, or what stands in its place."""
        if not REFERENCE.search(value):
            bare = re.fullmatch(r"\$([A-Za-z_]\w*)", value)
            if bare is not None:
                return self._need(bare.group(1))
            return value if is_harmless(name, value) else self._hidden(name, variable)
        rest = REFERENCE.sub("", value)
        if rest.strip(" :/@") and not is_harmless("", rest.strip(" :/@")) and without_scheme(value)[0] == "":
            return self._hidden(name, variable)
        return REFERENCE.sub(lambda match: self._reference(match.group(1)), value)

    def _reference(self, inside: str) -> str:
        name, remark = own_reference(inside)
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
            scheme, rest = without_scheme(header.group(2))
            return self._in_shell(f"{header.group(1)}: {scheme}", rest, header.group(1))
        if pair is not None and (is_secret_name(pair.group(1)) or looks_secret(pair.group(2))):
            if is_harmless("", pair.group(2)):
                return None
            return self._in_shell(f"{pair.group(1)}=", pair.group(2), pair.group(1))
        if REFERENCE.search(word.replace("${WORKDIR}", "")):
            return self._in_shell("", word, before if before.startswith("-") else "ARGUMENT")
        if before.startswith("-") and is_secret_name(before) and not word.startswith("-") and "=" not in before:
            return None if is_harmless("", word) else self._in_shell("", word, before)
        if pair is None and not word.startswith("-") and looks_secret(word):
            return self._in_shell("", word, before if before.startswith("-") else "ARGUMENT")
        return None

    def _in_shell(self, kept: str, secret: str, what: str) -> str:
        whole = re.fullmatch(r"\$\{([^{}$]+)\}", secret)
        if whole is not None:
            name, remark = own_reference(whole.group(1))
            if remark is not None:
                self._say(f"{name} {remark}: set it")
            self._env[name] = self._need(name)
        else:
            name = variable_name(self._name, what)
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
        paths = [word for word in command[1:] if word.startswith(("/", "~/")) and not looks_secret(word)]
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
