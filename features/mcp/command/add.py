"""`gdn mcp add NAME -- COMMAND…`: install a server's package once, and write the Extension that starts it.

The command is the one that people know (`npx -y PACKAGE`, `uvx PACKAGE`, `pip install PACKAGE`). The package is
installed in a jail that reaches the registry only, without scripts, into a folder of the bundle. What is started later
is the program itself. Its Extension goes behind the last document of goondan.yaml, as text.

The user's npm and pip say where packages come from. Nothing in this repository names a registry. The installers are
asked outside of any bundle: a file of a stranger's folder must not name another registry.

Source: docs/mcp.md, "Installing a server"; docs/design/commands.md section 12.
"""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from goondan.features.mcp.bundle.document import MAX_NAME, PREFIX, extension_document, yaml_text
from goondan.features.mcp.command.rules import packages
from goondan.kernel.bundle.documents import base_tools, load_documents
from goondan.kernel.bundle.rules import positions, problems
from goondan.kernel.cli import attach, options
from goondan.kernel.cli.commands.call import check_grant, perform
from goondan.kernel.cli.output import can_ask, confirmed, wants_json, write_json
from goondan.kernel.cli.output import write as say
from goondan.kernel.cli.placing import Placing, addition, check_name, read_bundle
from goondan.kernel.cli.rules.batch import ToolCall
from goondan.kernel.cli.session import over_session
from goondan.kernel.cli.state import locate
from goondan.kernel.paths import BUNDLE_FILE
from goondan.schemas.text.secret_values import VARIABLE
from goondan.schemas.wire.errors import GoondanError, fail

# --- registries of packages -------------------------------------------------------------------------------------------


#: How long npm or pip may take to print its settings (seconds); npm needs half of one.
ASK_S: Final = 30.0
#: Settings of npm that the jail's npm gets.
_NPM: Final = ("registry", "strict-ssl", "https-proxy", "proxy")
#: Settings of pip that the jail's pip gets. Those of `install` count more than those of all commands, those of the
#: environment most.
_PIP: Final = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "proxy",
    "pre",
    "prefer-binary",
)
_PIP_ORDER: Final = ("global", "install", ":env:")
#: pip's default, as pip has it: the index, and the host of its files.
_PIP_DEFAULT: Final = (
    "from pip._internal.models.index import PyPI; print(PyPI.simple_url); print(PyPI.file_storage_domain)"
)


class Source(Struct, frozen=True, kw_only=True):
    """Where a package comes from, and what installs it."""

    #: The installer's command: programs by their real paths.
    installer: list[str]
    #: Its settings, by their names.
    settings: dict[str, str]
    #: `HOST:PORT` of everything that it reaches.
    hosts: list[str]
    #: Paths that it reads, beside the system's.
    reads: list[str]
    #: A file of certificates to trust, if the user has one; it is one of `reads`.
    certificates: str | None = None


def source_of(command: packages.PackageCommand) -> Source:
    """Where the package of a command comes from on this machine. Raises GoondanError E_MCP_INSTALL."""
    return _npm_source(command.package) if command.registry == "npm" else _pip_source()


def reachable(hosts: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Grants for these `HOST:PORT`, and where a name has to be reached by its address: `HOST:PORT` -> `ADDRESS:PORT`.

    A jail reaches a granted name at public addresses and in private networks. Where this machine's resolver gives
    another one (a proxy of its own, a test network), the address itself is granted.
    """
    grants, via = [], {}
    for target in dict.fromkeys(hosts):
        host, _, port = target.rpartition(":")
        grants.append(target)
        with suppress(OSError, ValueError):
            found = [
                str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            ]
            if found and found[0] != host.strip("[]") and not any(ipaddress.ip_address(one).is_global for one in found):
                address = f"[{found[0]}]" if ":" in found[0] else found[0]
                grants.append(f"{address}:{port}")
                via[target] = f"{address}:{port}"
    return grants, via


# --- npm


def _npm_source(package: str) -> Source:
    node, npm = _program("node"), _program("npm")
    scope = package.partition("/")[0] if package.startswith("@") else None
    keys = [*_NPM, "cafile", *([f"{scope}:registry"] if scope is not None else [])]
    told = npm_settings(_ask([node, npm, "config", "get", *keys]))
    settings = {name: value for name, value in told.items() if name != "cafile"}
    urls = [value for name, value in settings.items() if name in ("registry", f"{scope}:registry")]
    proxies = [value for name, value in settings.items() if name.endswith("proxy")]
    hosts = hosts_of(proxies or urls)
    if not hosts:
        raise fail("E_MCP_INSTALL", "npm has no registry", suggestion="`npm config get registry` has to print one.")
    certificates = _certificates(told.get("cafile"), "NODE_EXTRA_CA_CERTS")
    reads = [*_outside_system(node), *_outside_system(npm), *([certificates] if certificates else [])]
    return Source(installer=[node, npm], settings=settings, hosts=hosts, reads=reads, certificates=certificates)


def npm_settings(text: str) -> dict[str, str]:
    """What `npm config get KEY KEY…` prints, without what is not set."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and value.strip() not in ("", "null", "undefined"):
            found[name.strip()] = value.strip()
    return found


# --- pip


def _pip_source() -> Source:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    ask = [python, "-I", "-m", "pip"]
    told = pip_settings(_ask([*ask, "config", "list"]))
    certificates = _certificates(told.pop("cert", None), "PIP_CERT", "SSL_CERT_FILE")
    urls = [url for key in ("index-url", "extra-index-url", "find-links") for url in told.get(key, "").split()]
    if "index-url" not in told and told.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        default, files = ([*_ask([python, "-I", "-c", _PIP_DEFAULT]).split(), "", ""])[:2]
        if not default:
            hint = "`pip config set global.index-url URL` names one."
            raise fail("E_MCP_INSTALL", "pip does not say which index it uses", suggestion=hint)
        urls += [default, f"https://{files}/"]
    folders = [os.path.realpath(path) for url in urls if (path := _local(url)) and os.path.exists(path)]
    proxies = [told["proxy"]] if "proxy" in told else []
    settings = {name: value for name, value in told.items() if name in _PIP}
    if certificates is not None:
        settings["cert"] = certificates
    reads = [*_outside_system(python), *folders, *([certificates] if certificates else [])]
    hosts = hosts_of(proxies or [url for url in urls if _local(url) is None])
    return Source(installer=[python, "-I"], settings=settings, hosts=hosts, reads=reads, certificates=certificates)


def pip_settings(text: str) -> dict[str, str]:
    """What `pip config list` prints, with what counts most of each setting."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        section, dot, name = key.rpartition(".")
        if equals and dot:
            with suppress(ValueError, SyntaxError):
                found.setdefault(section, {})[name] = " ".join(str(ast.literal_eval(value)).split())
    return {name: value for section in _PIP_ORDER for name, value in found.get(section, {}).items()}


# --- both


def hosts_of(urls: Iterable[str]) -> list[str]:
    """`HOST:PORT` of each URL of http or https, each once."""
    found = []
    for url in urls:
        with suppress(ValueError):
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
            if parts.hostname and port is not None:
                found.append(f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}")
    return list(dict.fromkeys(found))


def interpreter_reads() -> list[str]:
    """What a program of a virtual environment reads of the Python that it was made with."""
    return _outside_system(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def node_command() -> tuple[str, list[str]]:
    """How node is started in a jail, and what has to be granted for it. Raises GoondanError E_MCP_INSTALL."""
    node = _program("node")
    reads = _outside_system(node)
    return (node, reads) if reads else ("node", [])


def _local(url: str) -> str | None:
    """The folder that a URL or a path names; None for what is elsewhere. Files of an index lie beside its `simple`."""
    path = urlsplit(url).path if url.startswith("file://") else url if url.startswith("/") else None
    return os.path.dirname(path.rstrip("/")) if path and path.rstrip("/").endswith("/simple") else path


def _certificates(configured: str | None, *variables: str) -> str | None:
    named = [configured, *(os.environ.get(name) for name in variables)]
    found = next((path for path in named if path and os.path.isfile(path)), None)
    return None if found is None else os.path.realpath(found)


def _outside_system(program: str) -> list[str]:
    """The prefix of a program that is not of the system: `/opt/node` of `/opt/node/bin/node`."""
    if program.startswith(("/usr/", "/bin/", "/lib/")) and not program.startswith("/usr/local/"):
        return []
    parts = program.split("/")
    for folder in ("bin", "lib"):
        if folder in parts[2:-1]:
            return ["/".join(parts[: parts.index(folder, 2)])]
    return [os.path.dirname(program)]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise fail("E_MCP_INSTALL", f"there is no {name}", suggestion="Install Node.js, which brings node and npm.")
    return os.path.realpath(found)


def _ask(words: list[str]) -> str:
    """What an installer prints about itself, in a folder without files. Raises GoondanError E_MCP_INSTALL."""
    with tempfile.TemporaryDirectory(prefix="goondan-ask-") as empty:
        try:
            done = subprocess.run(
                words, cwd=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _no_answer(words, str(error)) from None
    if done.returncode != 0:
        raise _no_answer(words, (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
    return done.stdout


def _no_answer(words: list[str], why: Any) -> GoondanError:
    said = why if isinstance(why, str) else " ".join(why)
    return fail(
        "E_MCP_INSTALL", f"{os.path.basename(words[1] if len(words) > 1 else words[0])} gives no answer: {said[:300]}"
    )


#: The tool that installs; it runs in a jail, from a copy.
_INSTALLER: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "jail", "install.py")
#: The servers that are known by their names.
_KNOWN: Final = os.path.join(os.path.dirname(__file__), "known_servers.json")
#: The folder of a bundle that installed servers lie in, each in a folder of its own.
FOLDER: Final = "mcp"
#: The first bytes of a file, in which a script names its interpreter.
_HEAD: Final = 128


@click.command(
    name="add",
    epilog="COMMAND is npx -y PACKAGE, uvx PACKAGE, pipx run PACKAGE or pip install PACKAGE. Some names need none.",
)
@click.argument("name")
@click.argument("words", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--env", "variables", metavar="NAME", multiple=True, help="The server gets this variable of yours.")
@click.option("--net", "network", metavar="HOST:PORT", multiple=True, help="The server may reach this host.")
@click.option("--allow-net", metavar="HOST:PORT", multiple=True, help="The installer may reach this host, too.")
@click.option("--replace", is_flag=True, help="Install anew what is there already.")
@click.option("--agent", metavar="AGENT", help="The agent that gets it.  [default: the entry agent]")
@click.option("--write", is_flag=True, help="Add it to goondan.yaml without asking.")
@options.in_folder("The bundle's folder.  [default: here]")
@options.json
def add(
    name: str,
    words: tuple[str, ...],
    variables: tuple[str, ...],
    network: tuple[str, ...],
    allow_net: tuple[str, ...],
    replace: bool,
    agent: str | None,
    write: bool,
    folder: str,
) -> int:
    """Install the package of an MCP server, pinned, and write its Extension document."""
    name = name.removeprefix(PREFIX)
    check_name(name, "Extension", base_tools(), fits=len(name) <= MAX_NAME)
    known = {} if words else known_server(name)
    found = packages.package_command(words or known["command"])
    if found is None:
        hint = "Write npx -y PACKAGE, uvx PACKAGE, pipx run PACKAGE or pip install PACKAGE, as its makers do."
        raise fail("E_USAGE", "this command installs no package of a registry", suggestion=hint)
    for grant in (*network, *allow_net):
        check_grant(grant)
    for variable in variables:
        if VARIABLE.fullmatch(variable) is None:
            raise fail("E_USAGE", f"{variable[:100]!r} is no name of an environment variable")
    folder = os.path.realpath(os.path.expanduser(folder))
    if not os.path.isdir(folder):
        raise fail("E_USAGE", f"{folder} is no folder")
    with _place(folder, name, replace) as target:
        installed = _install(found, target, allow_net)
        transport, reads = _transport(found, installed, name, target)
    asked = [*known.get("env", ()), *variables]
    if env := {**known.get("values", {}), **{variable: f"${{{variable}}}" for variable in asked}}:
        transport["env"] = env
    sandbox: dict[str, Any] = {"filesystem": {"read": reads}, **known.get("sandbox", {})}
    if network:
        sandbox["network"] = {"allow": list(network)}
    in_workdir = any("${WORKDIR}" in word for word in (*found.arguments, *env.values()))
    scope = known.get("scope", "agent" if in_workdir else "instance")
    document = extension_document(f"{PREFIX}{name}", transport, scope=scope, sandbox=sandbox)
    _report(found, installed, document, folder, agent, write=write)
    for variable in [one for one in asked if one not in os.environ]:
        say(f"it needs {variable}: set it where the kernel starts", stream=sys.stderr)
    return 0


def known_server(name: str) -> dict[str, Any]:
    """How a server that is known by its name is installed and run: `command`, `env`, `values`, `sandbox`, `scope`.

    Raises GoondanError E_USAGE.
    """
    with open(_KNOWN, encoding="utf-8") as file:
        known: dict[str, dict[str, Any]] = json.load(file)
    if name not in known:
        hint = f"Say how it is installed: gdn mcp add {name} -- npx -y PACKAGE. Known are {', '.join(known)}."
        raise fail("E_USAGE", f"no server is known by the name {name[:100]!r}", suggestion=hint)
    return known[name]


@contextmanager
def _place(folder: str, name: str, replace: bool) -> Iterator[str]:
    """The folder to install into, empty. What was there before comes back when something fails."""
    above = os.path.join(folder, FOLDER)
    target, before = os.path.join(above, name), os.path.join(above, f".{name}.before")
    if os.path.islink(above) or os.path.islink(target):
        raise fail("E_INIT", f"{above} or {target} is a link", suggestion="Remove it, or name another folder.")
    if os.path.lexists(target) and not replace:
        raise fail("E_INIT", f"already there: {target}", suggestion="Give --replace to install it anew.")
    try:
        os.makedirs(above, exist_ok=True)
        ignore = os.path.join(above, ".gitignore")
        if not os.path.lexists(ignore):
            with open(ignore, "x") as file:
                file.write("*\n")
        shutil.rmtree(before, ignore_errors=True)
        if os.path.lexists(target):
            os.rename(target, before)
        os.mkdir(target)
    except OSError as error:
        raise fail("E_INIT", f"{error.filename}: {error.strerror}") from None
    try:
        yield target
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        if os.path.lexists(before):
            os.rename(before, target)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _install(found: packages.PackageCommand, target: str, allow_net: tuple[str, ...]) -> packages.Installed:
    """Install into the folder. Raises GoondanError E_MCP_INSTALL."""
    source = source_of(found)
    grants, via = reachable(source.hosts)
    say(f"installing {found.package}, from {', '.join(source.hosts) or 'folders'}", stream=sys.stderr)
    text = packages.bundle_text(target, [*grants, *allow_net], source.reads)
    asked = packages.arguments(found, target, source.installer, source.settings, via, source.certificates)
    result = _called(text, asked)
    if result.get("status") != "ok":
        error = result.get("error") or {}
        raise fail("E_MCP_INSTALL", f"{found.package}: {error.get('message')}", suggestion=error.get("suggestion"))
    try:
        return msgspec.convert(result.get("output"), packages.Installed)
    except msgspec.ValidationError as error:
        raise fail("E_MCP_INSTALL", f"the installer's jail gave no answer: {error}") from None


def _called(bundle: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Make the installing call in a bundle and a kernel of its own, of which nothing is left."""
    # Beside everything of the user's: no policy widens this jail, and no record of trust is made.
    with tempfile.TemporaryDirectory(prefix="goondan-mcp-") as own:
        os.environ["GOONDAN_STATE_ROOT"] = os.path.join(own, "state")
        place = os.path.join(own, "bundle")
        os.makedirs(os.path.join(place, os.path.dirname(packages.MODULE)))
        shutil.copyfile(_INSTALLER, os.path.join(place, packages.MODULE))
        with open(os.path.join(place, "goondan.yaml"), "w") as file:
            file.write(bundle)
        call = ToolCall(tool=packages.CALL, args=asked, instance=options.DEFAULT_INSTANCE, workdir=None)
        with attach.attach_or_start(locate(place, trust=True), ()) as kernel:
            return over_session(kernel, lambda session: perform(session, call))


def _transport(
    found: packages.PackageCommand, installed: packages.Installed, name: str, target: str
) -> tuple[dict[str, Any], list[str]]:
    """How the installed program is started, and what its jail reads. Raises GoondanError E_MCP_INSTALL."""
    program = packages.program_of(found, installed)
    if program is None:
        has = ", ".join(sorted(installed.programs)) or "none"
        hint = "Name one: npx -y -p PACKAGE PROGRAM, or uvx --from PACKAGE PROGRAM." if installed.programs else None
        raise fail(
            "E_MCP_INSTALL", f"{found.package} does not say which program is meant; it has: {has}", suggestion=hint
        )
    path = os.path.realpath(os.path.join(target, program))
    # A package may say anything about its programs, and hold any link.
    if not path.startswith(target + "/") or not os.path.isfile(path):
        raise fail("E_MCP_INSTALL", f"the program of {found.package} is no file of its folder: {program[:200]}")
    inside = f"./{FOLDER}/{name}"
    shown = f"{inside}/{os.path.relpath(path, target)}"
    if found.registry == "pypi":
        return _stdio([f"{inside}/venv/bin/python", shown], found), [inside, *interpreter_reads()]
    if not _is_script_of_node(path):
        return _stdio([shown], found), [inside]
    node, reads = node_command()
    return _stdio([node, shown], found), [inside, *reads]


def _stdio(command: list[str], found: packages.PackageCommand) -> dict[str, Any]:
    return {"type": "stdio", "command": [*command, *found.arguments]}


def _is_script_of_node(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return path.endswith((".js", ".mjs", ".cjs")) or (head.startswith(b"#!") and b"node" in head.split(b"\n", 1)[0])


def _report(
    found: packages.PackageCommand,
    installed: packages.Installed,
    document: dict[str, Any],
    folder: str,
    agent: str | None,
    *,
    write: bool,
) -> None:

    name = document["metadata"]["name"]
    notes = [
        f"{found.package} {installed.version}, {installed.packages} packages, in {FOLDER}/{name.removeprefix('mcp-')}"
    ]
    if installed.scripts:
        notes.append(f"scripts that were not run: {', '.join(installed.scripts)}")
    text = yaml_text(document).splitlines()
    changed = None
    if wants_json():
        changed = add_to_bundle([document], folder, agent or entry_agent(folder)) if write else None
        told: dict[str, Any] = {"package": found.package, "version": installed.version, "document": document}
        told |= {"scriptsNotRun": installed.scripts, "packages": installed.packages}
        write_json(told | ({"changed": changed} if changed is not None else {}))
        return
    say(*notes, stream=sys.stderr)
    has_bundle = os.path.lexists(os.path.join(folder, "goondan.yaml"))
    whose = agent or (entry_agent(folder) if has_bundle else None)
    what = f"Extension/{name}" if whose is None else f"Extension/{name}, for Agent/{whose},"
    if not write and has_bundle and can_ask():
        say(*text, stream=sys.stderr)
        write = confirmed(f"Add {what} to {os.path.join(folder, 'goondan.yaml')}? [y/N]")
        if not write:
            return
    if write:
        changed = add_to_bundle([document], folder, whose)
        say(f"added {what} to {changed}", stream=sys.stderr)
    else:
        say("---", *text)
    if whose is None or not write:
        say(f"an agent that is to have it names Extension/{name} in spec.extensions", stream=sys.stderr)


# --- into goondan.yaml ----------------------------------------------------------------------------------------------


def add_to_bundle(documents: Sequence[Mapping[str, Any]], folder: str, agent: str | None = None) -> str:
    """Add documents to the bundle of a folder, all or none, and have an agent name them; the path of its goondan.yaml.

    Raises GoondanError E_INIT: there is no bundle, it has one of them already, it has no such agent, or it cannot be
    written.
    """
    folder = os.path.expanduser(folder)
    path = os.path.join(folder, BUNDLE_FILE)
    before = None
    for document in documents:
        before = read_bundle(path, document["metadata"]["name"], "Extension")
    if before is None:
        raise fail("E_INIT", f"there is no {path}", suggestion="Begin with `gdn init`, or name the folder with --dir.")
    data = before
    for document in documents:
        data += addition(path, data, yaml_text(document).encode())
        if agent is not None:
            data = naming(path, data, agent, document["metadata"]["name"])
    with Placing(folder) as placing:
        if agent is None:
            placing.append(BUNDLE_FILE, before, data[len(before) :])
        else:
            placing.write({BUNDLE_FILE: data}, replace=True)
    return path


def entry_agent(folder: str) -> str | None:
    """The agent of a folder's goondan.yaml that people speak to, by its name; None when the file does not have it."""
    path = os.path.realpath(os.path.join(folder, "goondan.yaml"))
    every = [positions.plain(one.node) for one in load_documents(path, problems.Report()).documents]
    documents = [one for one in every if isinstance(one, dict) and isinstance(one.get("spec"), dict)]
    agents = [_name(one) for one in documents if one.get("kind") == "Agent"]
    entries = [str(one["spec"].get("entryAgent")) for one in documents if one.get("kind") == "Swarm"]
    entry = entries[0].removeprefix("Agent/") if entries else agents[0] if len(agents) == 1 else None
    return entry if entry in agents else None


def naming(path: str, data: bytes, agent: str, extension: str) -> bytes:
    """The text of a goondan.yaml with one more name in an agent's `spec.extensions`; all else stays as it is written.

    Raises GoondanError E_INIT.
    """
    text, ref = str(positions.decode(data)), f"Extension/{extension}"
    for node in positions.compose(text, positions.Allowance()).documents:
        spec = node.get("spec") if isinstance(node, positions.Mapping) else None
        value = positions.plain(node)
        if not isinstance(spec, positions.Mapping) or value.get("kind") != "Agent" or _name(value) != agent:
            continue
        listed = spec.get("extensions")
        places = listed.items if isinstance(listed, positions.Sequence) else [] if listed else [*spec.entries.values()]
        if not places:
            break
        lines = text.splitlines(keepends=True)
        line, at = places[0].line - 1, places[0].column - 1
        before, new = lines[line][:at], f"extensions: [{ref}]" if listed is None else ref
        # In a list or an object on one line it stands before the others, else on a line above.
        lines[line] = before + new + (", " if before.strip(" -") else f"\n{before}") + lines[line][at:]
        made = "".join(lines)
        wanted = {**value["spec"], "extensions": [ref, *value["spec"].get("extensions", ())]}
        if {**value, "spec": wanted} in map(positions.plain, positions.compose(made, positions.Allowance()).documents):
            return made.encode()
    hint = f"Name {ref} in the spec.extensions of the agent that is to have it."
    raise fail("E_INIT", f"{path}: {ref} cannot be added to Agent/{agent[:100]}", suggestion=hint)


def _name(document: Mapping[str, Any]) -> Any:
    metadata = document.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None
