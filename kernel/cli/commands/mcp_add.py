"""`gdn mcp add NAME -- COMMAND…`: install a server's package once, and write the Extension that starts it.

The command is the one that people know (`npx -y PACKAGE`, `uvx PACKAGE`, `pip install PACKAGE`). The package is
installed in a jail that reaches the registry only, without scripts, into a folder of the bundle. What is started later
is the program itself.

Source: docs/mcp.md, "Installing a server"; docs/design/commands.md section 12.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel import mcp
from goondan.kernel.cli import options
from goondan.kernel.cli.commands.call import check_grant, perform
from goondan.kernel.cli.output import write as say
from goondan.kernel.cli.output import write_json
from goondan.kernel.mcp.document import MAX_NAME, PREFIX, extension_document, yaml_text
from goondan.kernel.mcp.installing import CALL, MODULE, Installed, arguments, bundle_text, program_of
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goondan.kernel.mcp.packages import PackageCommand

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
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    default=".",
    shell_complete=options.completed_path("dir"),
    help="The bundle's folder.  [default: here]",
)
@options.as_json
def command(
    name: str,
    words: tuple[str, ...],
    variables: tuple[str, ...],
    network: tuple[str, ...],
    allow_net: tuple[str, ...],
    replace: bool,
    agent: str | None,
    write: bool,
    folder: str,
    as_json: bool,
) -> int:
    """Install the package of an MCP server, pinned, and write its Extension document."""
    from goondan.kernel.bundle.base import base_tools
    from goondan.kernel.cli.commands.new_resource import check_name
    from goondan.kernel.mcp.packages import package_command
    from goondan.schemas.text.secret_values import VARIABLE

    name = name.removeprefix(PREFIX)
    check_name(name, "Extension", base_tools(), fits=len(name) <= MAX_NAME)
    known = {} if words else known_server(name)
    found = package_command(words or known["command"])
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
    _report(found, installed, document, folder, agent, write=write, as_json=as_json)
    for variable in [one for one in asked if one not in os.environ]:
        say(f"it needs {variable}: set it where the kernel starts", stream=sys.stderr)
    return 0


def known_server(name: str) -> dict[str, Any]:
    """How a server that is known by its name is installed and run: `command`, `env`, `values`, `sandbox`, `scope`.

    Raises GoondanError E_USAGE.
    """
    with open(os.path.join(os.path.dirname(mcp.__file__), "known_servers.json"), encoding="utf-8") as file:
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


def _install(found: PackageCommand, target: str, allow_net: tuple[str, ...]) -> Installed:
    """Install into the folder. Raises GoondanError E_MCP_INSTALL."""
    import msgspec

    from goondan.kernel.mcp.registries import reachable, source_of

    source = source_of(found)
    grants, via = reachable(source.hosts)
    say(f"installing {found.package}, from {', '.join(source.hosts) or 'folders'}", stream=sys.stderr)
    text = bundle_text(target, [*grants, *allow_net], source.reads)
    asked = arguments(found, target, source.installer, source.settings, via, source.certificates)
    result = _called(text, asked)
    if result.get("status") != "ok":
        error = result.get("error") or {}
        raise fail("E_MCP_INSTALL", f"{found.package}: {error.get('message')}", suggestion=error.get("suggestion"))
    try:
        return msgspec.convert(result.get("output"), Installed)
    except msgspec.ValidationError as error:
        raise fail("E_MCP_INSTALL", f"the installer's jail gave no answer: {error}") from None


def _called(bundle: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Make the installing call in a bundle and a kernel of its own, of which nothing is left."""
    import asyncio

    from goondan.kernel.cli.attach import attach_or_start, locate
    from goondan.kernel.cli.batch import ToolCall
    from goondan.kernel.cli.options import DEFAULT_INSTANCE
    from goondan.kernel.cli.session import Session
    from goondan.kernel.mcp import jailed_install

    # Beside everything of the user's: no policy widens this jail, and no record of trust is made.
    with tempfile.TemporaryDirectory(prefix="goondan-mcp-") as own:
        os.environ["GOONDAN_STATE_ROOT"] = os.path.join(own, "state")
        place = os.path.join(own, "bundle")
        os.makedirs(os.path.join(place, os.path.dirname(MODULE)))
        shutil.copyfile(jailed_install.__file__, os.path.join(place, MODULE))
        with open(os.path.join(place, "goondan.yaml"), "w") as file:
            file.write(bundle)
        kernel = attach_or_start(locate(place, trust=True), ())
        try:

            async def go() -> dict[str, Any]:
                async with Session(kernel) as session:
                    return await perform(
                        session, ToolCall(tool=CALL, args=asked, instance=DEFAULT_INSTANCE, workdir=None)
                    )

            return asyncio.run(go())
        finally:
            kernel.finish()


def _transport(found: PackageCommand, installed: Installed, name: str, target: str) -> tuple[dict[str, Any], list[str]]:
    """How the installed program is started, and what its jail reads. Raises GoondanError E_MCP_INSTALL."""
    from goondan.kernel.mcp.registries import interpreter_reads, node_command

    program = program_of(found, installed)
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


def _stdio(command: list[str], found: PackageCommand) -> dict[str, Any]:
    return {"type": "stdio", "command": [*command, *found.arguments]}


def _is_script_of_node(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return path.endswith((".js", ".mjs", ".cjs")) or (head.startswith(b"#!") and b"node" in head.split(b"\n", 1)[0])


def _report(
    found: PackageCommand,
    installed: Installed,
    document: dict[str, Any],
    folder: str,
    agent: str | None,
    *,
    write: bool,
    as_json: bool,
) -> None:
    from goondan.kernel.cli.commands.mcp_document import add_to_bundle, entry_agent
    from goondan.kernel.cli.consent import can_ask, confirmed

    name = document["metadata"]["name"]
    notes = [
        f"{found.package} {installed.version}, {installed.packages} packages, in {FOLDER}/{name.removeprefix('mcp-')}"
    ]
    if installed.scripts:
        notes.append(f"scripts that were not run: {', '.join(installed.scripts)}")
    text = yaml_text(document).splitlines()
    changed = None
    if as_json:
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
