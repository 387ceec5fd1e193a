"""MCP servers of a bundle: what the config of the bundled extension `mcp` says, and what the tool host is told of it.

Rules.
- A config is that of the Extension's own document, or one agent's own in the place of it. Without any config the
  extension does nothing, which is a warning.
- A server's prefix is `namePrefix`, else the Extension's name without a leading `mcp-`. No other server and no Tool has
  that name.
- A server runs in a jail as a Tool does. The jail shows files of the bundle that the command names. Any other path in
  the command has to be granted, unless it belongs to the system.
- The endpoint of an http server is a grant by itself.

Source: docs/design/tools.md section 11; requirements MCP-02 to MCP-10, MCP-15, MCP-19.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from goondan.features.mcp.bundle.document import PREFIX
from goondan.kernel.bundle.rules import shape, tools, variables
from goondan.kernel.bundle.rules.checked import CheckedServer, CheckedTool, ServerUse
from goondan.kernel.bundle.rules.lookup import Files
from goondan.kernel.bundle.rules.problems import Path, Report, shown
from goondan.kernel.grants.powers import Command, Power, Reach, ServerEndpoint
from goondan.schemas.bundle import address, launch, resources
from goondan.schemas.models.origins import origin_of
from goondan.schemas.worker.grantable import SYSTEM, within
from goondan.schemas.worker.hosts import BadHost, Rule, parse_login_rule, parse_rule, write_network
from goondan.schemas.worker.hosts import network as make_network
from goondan.schemas.worker.logins import is_redirect

#: The feature whose worker speaks with such servers.
_FEATURE: Final = "mcp"
#: The longest prefix (characters): 22 are left for the name of a tool.
MAX_PREFIX: Final = 40
#: Stands for the working directory of the instance, in a command and its variables. The tool host fills it in.
WORKDIR: Final = "${WORKDIR}"
#: Programs that get a package from the network and then run it. A jail without a network cannot.
_INSTALLERS: Final = frozenset(("npx", "pnpx", "bunx", "uvx", "pipx"))
#: What every jail has besides the folders of the system: the interpreter's installation, and a place of its own.
_IN_JAILS: Final = (sys.base_prefix, "/tmp")
#: The name of a header (RFC 9110), and what no value of one may have.
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_NOT_IN_HEADERS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
#: Keys of `transport` that only one kind has.
_KEYS: Final[dict[str, tuple[str, ...]]] = {"stdio": ("command", "env"), "http": ("endpoint", "headers", "oauth")}

#: Stands in agents for the value of a variable or a header.
_HIDDEN: Final = "***"
_SECRETS: Final = ("env", "headers")
_MISSING: Final = "required property is missing"
_ISSUE_PATH: Final = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.DOTALL)


def describe_faults(extension: str, config: Mapping[str, Any]) -> list[str]:
    """The faults of a config that fits the schema of the extension, worded as the schema's issues are."""
    if not config:
        return []
    faults = [f"config.{key}: {_MISSING}" for key in ("transport", "expose") if key not in config]
    prefix = SERVERS.prefix(extension, config)
    if not address.is_resource_name(prefix) or len(prefix) > MAX_PREFIX:
        where = "config.namePrefix" if "namePrefix" in config else "config"
        what = (
            "the prefix of its tools' names has at most {} characters: lowercase letters, digits, - and _, without __"
        )
        faults.append(f"{where}: {what.format(MAX_PREFIX)}")
    if "transport" in config:
        faults += _transport_faults(config["transport"], config.get("attach", {}).get("scope", "instance"))
        faults += _sandbox_faults(config)
    deadlines = config.get("deadlines", {})
    if deadlines.get("idleSeconds", 60) > deadlines.get("totalSeconds", 600):
        faults.append("config.deadlines: idleSeconds is more than totalSeconds")
    return faults


def _transport_faults(transport: Mapping[str, Any], scope: str) -> Iterator[str]:
    kind = transport["type"]
    for other, keys in _KEYS.items():
        for key in keys:
            if other != kind and key in transport:
                yield f"config.transport.{key}: a transport of type {kind} has none"
    yield from _stdio_faults(transport, scope) if kind == "stdio" else _http_faults(transport)


def _stdio_faults(transport: Mapping[str, Any], scope: str) -> Iterator[str]:
    command, env = transport.get("command"), transport.get("env", {})
    if not command:
        yield "config.transport.command: MCP stdio transport requires command"
    for name in env:
        if not variables.VARIABLE_NAME.match(name):
            yield f"config.transport.env: {shown(name)} is no name of an environment variable"
    texts = [*(command or ()), *env.values()]
    if any("\0" in text for text in texts):
        yield "config.transport: a text has a character that no command can have"
    if scope == "instance" and any(WORKDIR in text for text in texts):
        yield f"config.transport: {WORKDIR} needs attach.scope: agent; a server that agents share sees no workdir"


def _http_faults(transport: Mapping[str, Any]) -> Iterator[str]:
    endpoint = transport.get("endpoint")
    if not endpoint:
        yield "config.transport.endpoint: MCP http transport requires endpoint"
    elif (fault := _endpoint_fault(endpoint)) is not None:
        yield f"config.transport.endpoint: {fault}"
    for name, value in transport.get("headers", {}).items():
        if not _HEADER.match(name) or _NOT_IN_HEADERS.search(value) or not value.isascii():
            yield f"config.transport.headers: {shown(name)} is no header, or its value is none that a header can have"

    yield from _oauth_faults(transport.get("oauth") or {}, transport.get("headers", {}))


def _oauth_faults(oauth: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[str]:
    if oauth and any(name.lower() == "authorization" for name in headers):
        yield "config.transport.oauth: the header Authorization is sent as it is, so nobody logs in"
    for text in oauth.get("hosts", ()):
        try:
            parse_login_rule(text)
        except BadHost as fault:
            yield f"config.transport.oauth.hosts: {shown(text)}: {fault}"
    if "clientSecret" in oauth and "clientId" not in oauth:
        yield "config.transport.oauth.clientSecret: it belongs to a clientId"
    if oauth.get("flow") == "clientCredentials" and not {"clientId", "clientSecret", "issuer"} <= oauth.keys():
        yield "config.transport.oauth: the flow clientCredentials needs clientId, clientSecret and issuer"
    if "issuer" in oauth and origin_of(oauth["issuer"]) is None:
        yield "config.transport.oauth.issuer: it is no http or https URL"
    if "redirectUri" in oauth and not is_redirect(oauth["redirectUri"]):
        yield "config.transport.oauth.redirectUri: it is no address that can be listened on here"


def _endpoint_fault(endpoint: str) -> str | None:
    try:
        parts = urlsplit(endpoint)
        if parts.username is not None or parts.password is not None or parts.fragment:
            return "a URL without user, password and fragment is wanted; a token belongs into headers"
        _rule(endpoint)
    except (ValueError, BadHost):
        return "it is no http or https URL"
    return None


def _rule(endpoint: str) -> Any:
    """The grant that an endpoint is. Raises ValueError, BadHost."""
    origin = origin_of(endpoint)
    if origin is None:
        raise ValueError("no origin")
    return parse_rule(origin.partition("://")[2])


def _sandbox_faults(config: Mapping[str, Any]) -> Iterator[str]:
    given = config.get("sandbox")
    if given is None:
        return
    if config["transport"]["type"] == "http":
        yield "config.sandbox: a server at an endpoint has no jail"
        return
    try:
        asked = msgspec.convert(given, resources.Sandbox)
    except msgspec.ValidationError as error:
        told = _ISSUE_PATH.match(str(error))
        where, what = (f".{told[2]}", told[1]) if told is not None and told[2] else ("", str(error))
        yield f"config.sandbox{where}: {what[0].lower()}{what[1:]}"
        return
    if asked.isolation != "instance":
        yield "config.sandbox.isolation: attach.scope says who shares a server"
    if asked.permissions:
        yield "config.sandbox.permissions: an MCP server asks the kernel for nothing; see grants"


def check_servers(
    uses: Iterable[tuple[str, ServerUse]],
    taken: Mapping[str, CheckedTool],
    reserved: frozenset[str],
    files: Files,
    report: Report,
) -> dict[str, CheckedServer]:
    """The servers of a bundle by their prefixes. `uses` are agents with the configs that they use. `reserved` are names
    of bundled Tools that a bundle has only with their extensions. No config has a fault by itself.
    """
    servers: dict[str, CheckedServer] = {}
    for agent, use in uses:
        if not use.config:
            message = "MCP Extension: config is missing"
            hint = f"Give Extension/{use.extension} a config, or leave it out; it does nothing."
            report.warn("W_CONFIG_UNUSED", message, use.document.place(*use.at), hint)
            continue
        prefix = SERVERS.prefix(use.extension, use.config)
        known = servers.get(prefix)
        if known is None:
            known = servers[prefix] = _server(prefix, use, files, report)
            _check_name(prefix, use, taken, reserved, report)
        elif known.spec.extension != use.extension:
            message = f"Extension/{use.extension} and Extension/{known.spec.extension} both have the prefix {prefix!r}"
            report.error("E_TOOL_NAME_CONFLICT", message, use.document.place(*use.at), _OTHER_PREFIX)
            continue
        elif use.config != known.use.config:
            own = _server(prefix, use, files, report)
            known.of_agents[agent] = (own.spec, _with_folder(own.tool, known.tool))
            known.uses += own.uses
        known.agents.append(agent)
    return servers


_OTHER_PREFIX: Final = "Give one of the two another namePrefix."


def _check_name(
    prefix: str, use: ServerUse, taken: Mapping[str, CheckedTool], reserved: frozenset[str], report: Report
) -> None:
    if prefix in taken or prefix in reserved:
        whose = "the Tool" if prefix in taken and not taken[prefix].bundled else "the bundled Tool"
        message = f"Extension/{use.extension} has the prefix {prefix!r}, which is the name of {whose}"
        hint = f"Give it another namePrefix, such as {prefix}-mcp."
        report.error("E_TOOL_NAME_CONFLICT", message, use.document.place(*use.at), hint)


def _server(prefix: str, use: ServerUse, files: Files, report: Report) -> CheckedServer:
    config = use.config
    transport, attach, expose = config["transport"], config.get("attach", {}), config["expose"]
    deadlines = config.get("deadlines", {})
    spec = launch.ServerSpec(
        extension=use.extension,
        transport=transport["type"],
        worker=_FEATURE,
        command=list(transport.get("command", ())),
        env=dict(transport.get("env", {})),
        endpoint=transport.get("endpoint"),
        headers=dict(transport.get("headers", {})),
        login=_login(transport.get("oauth")),
        login_secrets=_login_secrets(transport.get("oauth")),
        mode=attach.get("mode", "stateful"),
        scope=attach.get("scope", "instance"),
        tools=expose.get("tools", False) not in (False, []),
        resources=expose.get("resources", False),
        prompts=expose.get("prompts", False),
        grants=list(dict.fromkeys(config.get("grants", ()))),
        idle_s=float(deadlines.get("idleSeconds", 60)),
        total_s=float(deadlines.get("totalSeconds", 600)),
    )
    body = resources.ToolBody(entry="", exports=[])
    tool = CheckedTool(use.document, prefix, body, sandbox_at=(*use.at, "sandbox"))
    if spec.transport == "http":
        tool.sandbox = launch.SandboxSpec(
            network=write_network(make_network([_rule(spec.endpoint or ""), *login_rules(config)]))
        )
    else:
        asked = msgspec.convert(config.get("sandbox", {}), resources.Sandbox)
        tools.check_sandbox(asked, use.document, tool.sandbox_at, files, report)
        tool.sandbox = tools.resolve_sandbox(asked, files)
        spec = replace(spec, command=_resolve_command(spec.command, tool, use, files, report))
    return CheckedServer(tool, use, spec, uses=[use])


def _with_folder(own: CheckedTool, shared: CheckedTool) -> launch.SandboxSpec:
    """The sandbox of an agent's own config. The server's own folder is that of the first config, so the folder of
    another program is shown like any other.
    """
    filesystem = own.sandbox.filesystem
    if own.root in ("", shared.root) or any(within(own.root, one) for one in (*filesystem.read, *filesystem.write)):
        return own.sandbox
    return replace(own.sandbox, filesystem=replace(filesystem, read=[*filesystem.read, own.root]))


def login_rules(config: Mapping[str, Any]) -> list[Rule]:
    """The hosts that a login to a server may reach besides the server's own."""
    return [parse_login_rule(text) for text in (config["transport"].get("oauth") or {}).get("hosts", ())]


def _login(written: Any) -> dict[str, Any] | None:
    """A ServerLogin as the worker is told it."""
    if written is None:
        return None
    if written is False:
        return {"enabled": False}
    return {key: value for key, value in written.items() if key != "hosts"}


def _login_secrets(written: Any) -> list[str]:
    return [written["clientSecret"]] if written and "clientSecret" in written else []


def _resolve_command(command: list[str], tool: CheckedTool, use: ServerUse, files: Files, report: Report) -> list[str]:
    """The command with whole paths. Fills in what of the bundle its jail shows, and reports paths that it does not."""
    at: Path = (*use.at, "transport", "command")
    program = posixpath.basename(command[0])
    if program in _INSTALLERS and tool.sandbox.network == "none":
        message = f"{program} gets a package from the network when it starts, and a server never installs at its start"
        hint = "`gdn mcp add NAME -- COMMAND…` installs it once, and writes the command that runs it."
        report.warn("W_CONFIG_MCP_INSTALLS", message, use.document.place(*at, 0), hint)
    words: list[str] = []
    shows: list[str] = []
    for index, word in enumerate(command):
        option, equals, path = word.rpartition("=") if _is_named(word) else ("", "", word)
        if path.startswith(("./", "../")):
            found = files.find(path)
            if found.fault is None:
                path = found.path
            elif index == 0:
                message = f"the program {use.document.text(*at, index)} cannot be used: {found.fault}"
                hint = "A relative path means a file of the bundle."
                report.error("E_CONFIG_ENTRY", message, use.document.place(*at, index), hint)
        elif path.startswith("~/"):
            path = files.resolve(path)
        if path.startswith("/") and not path.startswith("//"):
            path = posixpath.normpath(path)
            if _is_of_bundle(path, files):
                shows.append(path)
            elif not _is_shown(path, tool.sandbox.filesystem):
                message = f"the command names {use.document.text(*at, index)}, which the server's jail does not show"
                hint = f"Grant it: sandbox: {{filesystem: {{read: [{shown(path)}]}}}} (or write)."
                report.error("E_CONFIG_INVALID_VALUE", message, use.document.place(*at, index), hint)
        words.append(f"{option}{equals}{path}")
    _show(shows, tool, files)
    return words


def _is_of_bundle(path: str, files: Files) -> bool:
    """Whether a path leads to something of the bundle, or to nothing yet. A link in the bundle can lead anywhere."""
    if not within(path, files.root):
        return False
    is_there = files.is_file(path) or files.is_folder(path)
    return not is_there or bool(files.find(posixpath.relpath(path, files.root)).path)


def _is_named(word: str) -> bool:
    """Whether this is an option with its value: `--root=/data`."""
    return word.startswith("-") and "=" in word


def _is_shown(path: str, granted: launch.Filesystem) -> bool:
    folders = (*SYSTEM, *_IN_JAILS, *granted.read, *granted.write)
    return any(within(path, folder) for folder in folders)


def _show(paths: list[str], tool: CheckedTool, files: Files) -> None:
    """Have the jail show these files and folders of the bundle. The first file's folder is the server's own, as the
    folder of a Tool's entry is: a change in it is a change of the server. A file in the bundle's root is shown alone.
    """
    filesystem = tool.sandbox.filesystem
    more: list[str] = []
    for path in paths:
        folder = posixpath.dirname(path)
        whole = path if folder == files.root or not files.is_file(path) else folder
        if not tool.root and files.is_file(path):
            tool.entry, tool.root = path, whole
        elif whole != tool.root and not any(within(whole, one) for one in (*filesystem.read, *filesystem.write)):
            more.append(whole)
    if more:
        more = list(dict.fromkeys(more))
        tool.sandbox = replace(tool.sandbox, filesystem=replace(filesystem, read=[*filesystem.read, *more]))


class McpServers:
    """What the core asks of servers in configs of an extension (kernel/bundle/rules/kinds.py)."""

    extension = "mcp"
    shown_by = "gdn mcp list"
    faults = staticmethod(describe_faults)
    check = staticmethod(check_servers)

    def prefix(self, extension: str, config: Mapping[str, Any]) -> str:
        """The prefix of the names of a server's tools (MCP-15)."""
        named = config.get("namePrefix")
        return named if isinstance(named, str) else extension.removeprefix(PREFIX)

    def powers(self, server: CheckedServer) -> Iterator[Power]:
        """The commands and endpoints of a server, as its documents write them."""
        name = server.tool.name
        for use in server.uses:
            at = (*use.at, "transport")
            if use.config["transport"]["type"] == "stdio":
                count = len(use.config["transport"]["command"])
                yield Command(name, shlex.join(use.document.written(*at, "command", index) for index in range(count)))
            else:
                written = use.document.written(*at, "endpoint")
                origin = None if shape.VARIABLE.search(written) else origin_of(written)
                yield ServerEndpoint(name, origin or written)
                for rule in login_rules(use.config):
                    yield Reach(name, str(rule))

    def without_values(self, holder: dict[str, Any]) -> dict[str, Any]:
        """A copy of an object with a `config` in which variables and headers of a transport have no values."""
        config = holder.get("config")
        transport = config.get("transport") if isinstance(config, dict) else None
        if not isinstance(config, dict) or not isinstance(transport, dict):
            return holder
        hidden = {
            key: dict.fromkeys(transport[key], _HIDDEN) for key in _SECRETS if isinstance(transport.get(key), dict)
        }
        oauth = transport.get("oauth")
        if isinstance(oauth, dict) and "clientSecret" in oauth:
            hidden["oauth"] = {**oauth, "clientSecret": _HIDDEN}
        return {**holder, "config": {**config, "transport": {**transport, **hidden}}}

    def trial(self, server: launch.ToolSpec, agent: str) -> dict[str, Any]:
        """The result of `gdn extension test` for a server, as this agent has it."""
        from goondan.features.mcp.bundle.trial import trial_of  # it talks to a kernel; a check of a bundle does not

        return trial_of(server, agent)


SERVERS: Final = McpServers()
