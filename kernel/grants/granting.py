"""The grants of the tools of a checked bundle, and how agents narrow them. An agent that would widen a grant is an
error.

Requests are in the manifests. A tool of the bundle's own tree, and of @goondan/base, gets its request. A tool of
another package gets the defaults until its request was accepted for exactly this code. The operator's policy widens
grants. Agents narrow them: Agent.spec.sandbox for all of their tools, spec.tools[].sandbox for one tool.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from goondan.kernel.bundle.checked import Checked, CheckedAgent
from goondan.kernel.bundle.lookup import Files
from goondan.kernel.bundle.problems import Path, Report, did_you_mean, shown
from goondan.kernel.bundle.servers import CheckedServer
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.tools import CheckedTool, check_sandbox, resolve_network
from goondan.kernel.grants.merge import (
    Excess,
    Part,
    as_part,
    beyond,
    meet_paths,
    narrow,
    requested,
    widen,
    without_grants,
)
from goondan.schemas.bundle import resources
from goondan.schemas.bundle.address import is_path
from goondan.schemas.bundle.launch import FolderGrants, Limits, SandboxSpec
from goondan.schemas.bundle.resources import BASE_PACKAGE
from goondan.schemas.worker.grantable import uncovered, unreadable, unwritable

Status = Literal["own", "bundled", "nothing", "accepted", "pending", "changed"]


class Rule(Struct, frozen=True):
    """One widening of a policy."""

    #: The tool that gets more.
    tool: str
    #: What it gets.
    sandbox: resources.SandboxPart
    #: The document of the policy.
    document: Document
    #: Its place in that document.
    at: Path
    #: The bundle that the rule is for. None: any bundle.
    bundle: str | None = None


class Pin(Struct, frozen=True):
    """What a policy gives the commands in a folder with a certain content."""

    #: The folder's name, for whoever reads the policy.
    folder: str
    #: Its content.
    digest: str
    #: What its commands get in addition.
    sandbox: resources.SandboxPart
    #: The document of the policy.
    document: Document
    #: Its place in that document.
    at: Path


class OpenedFolder(Struct, frozen=True):
    """A folder that a policy opens as a working directory of spawned instances."""

    #: The folder.
    path: str
    #: The document of the policy.
    document: Document
    #: Its place in that document.
    at: Path


class GrantContext(Struct, frozen=True, kw_only=True):
    """The facts by which grants are decided."""

    #: The widenings of the policy.
    rules: Sequence[Rule] = ()
    #: The digest that was accepted for each tool, by the tool's id.
    accepted: Mapping[str, str] = {}
    #: The folders that were pinned, by their content.
    pinned: Sequence[Pin] = ()
    #: The digest of each installed package, by its name. '': the package cannot be pinned.
    pins: Mapping[str, str] = {}
    #: Folders that no tool may write to or around.
    kept: Sequence[str] = ()
    #: Folders that no tool may see.
    hidden: Sequence[str] = ()
    #: The operator's home directory.
    home: str = ""
    #: The bundle.
    bundle: str = ""
    #: See KernelPlan.spawn_workdirs.
    opened: Sequence[OpenedFolder] = ()


def status(tool: CheckedTool, context: GrantContext) -> Status:
    """The state of a tool's request."""
    if tool.bundled or tool.package == BASE_PACKAGE:
        return "bundled"
    if not tool.package:
        return "own"
    if not requested(tool.sandbox):
        return "nothing"
    digest = context.accepted.get(tool.id)
    if digest is None:
        return "pending"
    return "accepted" if digest == context.pins.get(tool.package) else "changed"


def grant(checked: Checked, context: GrantContext, files: Files, report: Report) -> None:
    """Fill in `granted` and `narrowed` of every tool, and report what is wrong."""
    tools = {tool.name: tool for tool in checked.runs_in_jails}
    for tool in tools.values():
        # The bundled tools are read once, and checked again with every bundle.
        tool.granted, tool.narrowed, tool.folders = _granted(tool, tool.sandbox, context, files, report), {}, {}
    for server in checked.servers.values():
        for agent, (spec, sandbox) in server.of_agents.items():
            server.of_agents[agent] = (spec, _granted(server.tool, sandbox, context, files, report))
    _check_rules(tools, context, files, report)
    _check_pins(context, files, report)
    _check_opened(context, report)
    for one in checked.agents.values():
        _narrow(one, tools, files, report)
        for server in checked.servers.values():
            _narrow_own(one, server, files)
        _grant_folders(one, tools, context, files)


# --- what a tool gets -----------------------------------------------------------------------------------------------


def _granted(tool: CheckedTool, base: SandboxSpec, context: GrantContext, files: Files, report: Report) -> SandboxSpec:
    """What a tool gets of what is asked for it."""
    stands = status(tool, context)
    if stands in ("pending", "changed"):
        base = without_grants(base)
        asks = "; ".join(requested(tool.sandbox))
        why = "nobody has accepted that" if stands == "pending" else "it is not the code that was accepted"
        message = f"{tool.id} asks for {asks}, and gets the defaults: {why}"
        hint = f"Look at its code, then run `gdn grant accept {tool.id}`."
        report.warn("W_CONFIG_NOT_GRANTED", message, tool.document.place(*tool.sandbox_at), hint)
    elif not tool.bundled:
        for fault in dangers(base, context, tool.root):
            place = tool.document.place(*tool.sandbox_at, *fault.field)
            report.error("E_CONFIG_DANGEROUS", f"{fault.path} cannot be granted: {fault.reason}", place)
    for rule in context.rules:
        if _is_for(rule, tool, context):
            base = widen(base, resolve_part(rule.sandbox, files))
    return base


class Danger(Struct, frozen=True):
    """A path that must not be granted."""

    #: The path.
    path: str
    #: Why.
    reason: str
    #: Its place in the sandbox.
    field: tuple[str | int, ...]


def dangers(sandbox: SandboxSpec, context: GrantContext, own: str = "") -> list[Danger]:
    """The paths in a sandbox that must not be granted. `own` is the folder of the tool, if it is the sandbox of one
    tool.
    """
    found: list[Danger] = []
    for index, path in enumerate(sandbox.filesystem.read):
        reason = unreadable(path) or _reveals(path, context, own)
        if reason is not None:
            found.append(Danger(path, reason, ("filesystem", "read", index)))
    venv = sandbox.python.venv
    if venv is not None and (reason := _reveals(venv, context, own)) is not None:
        found.append(Danger(venv, reason, ("python", "venv")))
    for index, path in enumerate(sandbox.filesystem.write):
        reason = unwritable(path, context.kept, context.home)
        if reason is not None:
            found.append(Danger(path, reason, ("filesystem", "write", index)))
    return found


def _reveals(path: str, context: GrantContext, own: str) -> str | None:
    folder = uncovered(path, context.hidden, own)
    return None if folder is None else f"it lies in {folder}, where the kernel keeps its state or its sockets"


def _is_for(rule: Rule, tool: CheckedTool, context: GrantContext) -> bool:
    if rule.bundle is not None and rule.bundle != context.bundle:
        return False
    return rule.tool in ((tool.id, f"{BASE_PACKAGE}/{tool.name}") if tool.bundled else (tool.id,))


def _check_rules(tools: Mapping[str, CheckedTool], context: GrantContext, files: Files, report: Report) -> None:
    """Report rules of a policy that have no effect, and grants that not even the operator can give."""
    ids = [tool.id for tool in tools.values()]
    for rule in context.rules:
        at: Path = (*rule.at, "sandbox")
        check_sandbox(rule.sandbox, rule.document, at, files, report)
        if rule.sandbox.isolation is not None:
            message = "a policy does not change the isolation of a tool"
            report.error("E_CONFIG_INVALID_VALUE", message, rule.document.key(*at, "isolation"), "Remove the field.")
        for fault in dangers(widen(SandboxSpec(), resolve_part(rule.sandbox, files)), context):
            place = rule.document.place(*at, *fault.field[:2])
            report.error("E_CONFIG_DANGEROUS", f"{fault.path} cannot be granted: {fault.reason}", place)
        aimed = rule.bundle is None or rule.bundle == context.bundle
        if rule.bundle is not None and aimed and not any(_is_for(rule, tool, context) for tool in tools.values()):
            message = f"the bundle has no tool {shown(rule.tool)}"
            report.warn("W_CONFIG_UNUSED", message, rule.document.place(*rule.at, "tool"), did_you_mean(rule.tool, ids))


def _check_pins(context: GrantContext, files: Files, report: Report) -> None:
    """Report what is pinned and means nothing, or what not even the operator can give."""
    for pinned in context.pinned:
        at: Path = (*pinned.at, "sandbox")
        part = pinned.sandbox
        check_sandbox(part, pinned.document, at, files, report)
        if part.isolation is not None:
            message = "a pin does not change the isolation of the commands"
            report.error("E_CONFIG_INVALID_VALUE", message, pinned.document.key(*at, "isolation"), "Remove the field.")
        for fault in dangers(widen(SandboxSpec(), resolve_part(part, files)), context):
            place = pinned.document.place(*at, *fault.field[:2])
            report.error("E_CONFIG_DANGEROUS", f"{fault.path} cannot be granted: {fault.reason}", place)


def _check_opened(context: GrantContext, report: Report) -> None:
    """Report folders that a policy opens for spawned instances although no tool may write in them."""
    for opened in context.opened:
        place = opened.document.place(*opened.at)
        if not is_path(opened.path):
            message = f"{shown(opened.path)} is no absolute path"
            report.error(
                "E_CONFIG_INVALID_VALUE", message, place, "Write the folder's whole path, or one that begins with ~/."
            )
        elif (reason := unwritable(opened.path, context.kept, context.home)) is not None:
            report.error("E_CONFIG_DANGEROUS", f"{opened.path} cannot be opened: {reason}", place)


# --- what an agent leaves -------------------------------------------------------------------------------------------


def _narrow(agent: CheckedAgent, tools: Mapping[str, CheckedTool], files: Files, report: Report) -> None:
    cap = agent.body.sandbox
    whole = None if cap is None else resolve_part(cap, files)
    if cap is not None and whole is not None:
        at: Path = ("spec", "sandbox")
        check_sandbox(cap, agent.document, at, files, report)
        _check_cap(agent, whole, [tools[name] for name in agent.tools if name in tools], report)
    for name, tool in tools.items():
        if tool.granted is None:
            continue
        left = tool.granted if whole is None else narrow(tool.granted, whole)
        own = _own_part(agent, tool, files, report) if name in agent.uses else None
        if own is not None:
            left = narrow(left, own)
        if left != tool.granted:
            tool.narrowed = {**tool.narrowed, agent.name: left}


def _narrow_own(agent: CheckedAgent, server: CheckedServer, files: Files) -> None:
    """One agent's own config of a server, under the agent's own sandbox."""
    own, cap = server.of_agents.get(agent.name), agent.body.sandbox
    if own is not None and cap is not None:
        server.of_agents[agent.name] = (own[0], narrow(own[1], resolve_part(cap, files)))


def _grant_folders(agent: CheckedAgent, tools: Mapping[str, CheckedTool], context: GrantContext, files: Files) -> None:
    """What the calls of this agent get by the folders that they name, for tools that take one.

    The folders that configs of other agents name are none of its own. What it narrows, it narrows of pins as well.
    """
    for tool in (tools[name] for name in agent.brought if tools[name].takes_folder):
        left = tool.narrowed.get(agent.name, tool.granted or tool.sandbox)
        given = [rule.sandbox for rule in context.rules if _is_for(rule, tool, context)]
        named = [path for part in given for path in resolve_part(part, files).read or []]
        read = meet_paths(left.filesystem.read, [*agent.named_folders, *named])
        own = replace(left, filesystem=replace(left.filesystem, read=read))
        if own != tool.granted:
            tool.narrowed = {**tool.narrowed, agent.name: own}
        cap = agent.body.sandbox
        pinned = {}
        for pin in context.pinned:
            gets = widen(own, resolve_part(pin.sandbox, files))
            pinned[pin.digest] = gets if cap is None else narrow(gets, resolve_part(cap, files))
        tool.folders = {**tool.folders, agent.name: FolderGrants(workdir=without_grants(own), pinned=pinned)}


def _own_part(agent: CheckedAgent, tool: CheckedTool, files: Files, report: Report) -> Part | None:
    """One agent's narrowing of one tool (spec.tools[]), checked against the grant or the request of the tool."""
    index = agent.uses[tool.name]
    use = agent.body.tools[index]
    if isinstance(use, str) or use.sandbox is None:
        return None
    at: Path = ("spec", "tools", index, "sandbox")
    check_sandbox(use.sandbox, agent.document, at, files, report)
    part = resolve_part(use.sandbox, files)
    has = widen(tool.granted or tool.sandbox, as_part(tool.sandbox))
    for excess in beyond(part, has):
        message = f"{excess.what} is more than {tool.id} has ({excess.name})"
        report.error("E_CONFIG_WIDENING", message, agent.document.place(*at, *excess.field))
    return part


def _check_cap(agent: CheckedAgent, part: Part, tools: Sequence[CheckedTool], report: Report) -> None:
    """Report parts of an agent's own sandbox that none of its tools has: they would change nothing."""
    missing: list[set[Excess]] = []
    for tool in tools:
        has = widen(tool.granted or tool.sandbox, as_part(tool.sandbox))
        missing.append({Excess(excess.field, _thing(excess.what)) for excess in beyond(part, has)})
    nowhere = set.intersection(*missing) if missing else set()
    for excess in sorted(nowhere, key=lambda found: (found.name, found.what)):
        if excess.name == "isolation":
            continue  # a cap on isolation is only for the tools that it fits
        message = f"{excess.what} is more than any of this agent's tools has ({excess.name})"
        report.error("E_CONFIG_WIDENING", message, agent.document.place("spec", "sandbox", *excess.field))


def _thing(what: str) -> str:
    """`5 instead of 3` names the same thing for tools with different limits."""
    return what.partition(" instead of ")[0]


def resolve_part(part: resources.SandboxPart, files: Files) -> Part:
    """A part of a manifest, with absolute paths."""
    read = part.filesystem.read if part.filesystem is not None else None
    write = part.filesystem.write if part.filesystem is not None else None
    venv = part.python.venv if part.python is not None else None
    limits = {} if part.limits is None else {name: getattr(part.limits, name) for name in Limits.__struct_fields__}
    return Part(
        isolation=part.isolation,
        network=resolve_network(part.network),
        read=None if read is None else [files.resolve(path) for path in read],
        write=None if write is None else [files.resolve(path) for path in write],
        env=part.env,
        permissions=part.permissions,
        says_venv=part.python is not None,
        venv=None if venv is None else files.resolve(venv),
        limits={name: value for name, value in limits.items() if value is not None},
        min_tier=part.min_tier,
    )
