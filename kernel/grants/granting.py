"""The grants of the tools of a checked bundle, and how sandboxes are merged: what an agent leaves, what the operator
adds, and what goes beyond. An agent that would widen a grant is an error. Pure.

Requests are in the manifests. A tool of the bundle's own tree, and of @goondan/base, gets its request. A tool of
another package gets the defaults until its request was accepted for exactly this code. The operator's policy widens
grants. Agents narrow them: Agent.spec.sandbox for all of their tools, spec.tools[].sandbox for one tool.

`narrow` gives what both sides allow, field by field; what a part leaves out stays. Narrowing never gives more, in
whatever order it is done and however often (tests/unit/kernel/grants/test_merge.py). `widen` gives what either allows.
`beyond` says what a part names that a sandbox does not have: narrowing leaves it out, and validation calls it an error.

Isolation has an order of its own: `call` is narrower than `instance`. A shared jail has less (no workdir, no variables)
but is shared with everyone, so it is neither narrower nor wider than the others, and no agent changes to or from it.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from goondan.kernel.bundle.rules.checked import Checked, CheckedAgent, CheckedServer, CheckedTool
from goondan.kernel.bundle.rules.lookup import Files
from goondan.kernel.bundle.rules.problems import Path, Report, did_you_mean, shown
from goondan.kernel.bundle.rules.shape import Document
from goondan.kernel.bundle.rules.tools import check_sandbox, resolve_network
from goondan.schemas.bundle import address, resources
from goondan.schemas.bundle.launch import Filesystem, FolderGrants, Limits, PythonSpec, SandboxSpec
from goondan.schemas.worker import hosts
from goondan.schemas.worker.grantable import uncovered, unreadable, unwritable, within
from goondan.schemas.worker.receipts import STRONGEST, Tier, is_weaker

Status = Literal["own", "bundled", "nothing", "accepted", "pending", "changed"]


class Widening(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """What the operator adds to one tool."""

    #: The tool.
    tool: Annotated[str, Meta(min_length=1)]
    #: What it gets in addition.
    sandbox: resources.SandboxPart
    #: The bundle that it is for: its path as `identity` of kernel/paths.py gives it. None: any.
    bundle: Annotated[str, Meta(min_length=1)] | None = None


class Accepted(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A request that the operator has accepted. `digest` is of the package as it was then."""

    #: The tool of the package.
    tool: Annotated[str, Meta(min_length=1)]
    #: The digest of the package as it was then.
    digest: Annotated[str, Meta(min_length=1)]


class PinnedFolder(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """A folder that the operator has looked at. Commands in one with just this content get what the Tool that runs them
    was granted, and what stands here.
    """

    #: Its name, for whoever reads the policy.
    folder: Annotated[str, Meta(min_length=1)]
    #: Its content (schemas/system/digests.py).
    digest: Annotated[str, Meta(min_length=1)]
    #: What its commands get in addition.
    sandbox: resources.SandboxPart = resources.SandboxPart()


class SpawnPolicy(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """What agents may give to instances that they spawn. `workdirs`: folders that those may work in, or below."""

    #: Folders that such instances may work in, or below.
    workdirs: list[Annotated[str, Meta(min_length=1)]] = []


class Policy(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """Everything that operators have decided, in one file."""

    #: What tools get in addition.
    widen: list[Widening] = []
    #: The packaged tools that were accepted.
    accepted: list[Accepted] = []
    #: The folders that were pinned.
    pinned: list[PinnedFolder] = []
    #: Where spawned instances may work.
    spawn: SpawnPolicy = SpawnPolicy()


class GrantContext(Struct, frozen=True, kw_only=True):
    """The facts by which grants are decided."""

    #: The policies, each with its document.
    policies: Sequence[tuple[Document, Policy]] = ()
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

    @property
    def accepted(self) -> dict[str, str]:
        """The digest that was accepted for each tool, by the tool's id."""
        return {item.tool: item.digest for _, policy in self.policies for item in policy.accepted}

    @property
    def pinned(self) -> list[PinnedFolder]:
        """The folders that were pinned."""
        return [item for _, policy in self.policies for item in policy.pinned]

    @property
    def spawn_workdirs(self) -> list[str]:
        """See KernelPlan."""
        return [path for _, policy in self.policies for path in policy.spawn.workdirs]

    def widenings(self, tool: CheckedTool) -> list[resources.SandboxPart]:
        """What policies add to a tool."""
        every = (item for _, policy in self.policies for item in policy.widen if self.is_meant(item))
        return [item.sandbox for item in every if item.tool in _names_of(tool)]

    def is_meant(self, item: Widening) -> bool:
        """Whether a widening is for this bundle."""
        return item.bundle in (None, self.bundle)


def _names_of(tool: CheckedTool) -> tuple[str, ...]:
    """What a policy may call a tool."""
    return (tool.id, f"{resources.BASE_PACKAGE}/{tool.name}") if tool.bundled else (tool.id,)


def status(tool: CheckedTool, context: GrantContext) -> Status:
    """The state of a tool's request."""
    if tool.bundled or tool.package == resources.BASE_PACKAGE:
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
    for document, policy in context.policies:
        _check_policy(document, policy, tools, context, files, report)
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
    for part in context.widenings(tool):
        base = widen(base, resolve_part(part, files))
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


def _check_policy(
    document: Document,
    policy: Policy,
    tools: Mapping[str, CheckedTool],
    context: GrantContext,
    files: Files,
    report: Report,
) -> None:
    """Report what has no effect in a policy, and what not even the operator can give."""
    decisions: list[tuple[str, str, Path, resources.SandboxPart]] = [
        *(("a policy", "a tool", ("widen", number), item.sandbox) for number, item in enumerate(policy.widen)),
        *(("a pin", "the commands", ("pinned", number), item.sandbox) for number, item in enumerate(policy.pinned)),
    ]
    for what, whose, item_at, part in decisions:
        at = (*item_at, "sandbox")
        check_sandbox(part, document, at, files, report)
        if part.isolation is not None:
            message = f"{what} does not change the isolation of {whose}"
            report.error("E_CONFIG_INVALID_VALUE", message, document.key(*at, "isolation"), "Remove the field.")
        for fault in dangers(widen(SandboxSpec(), resolve_part(part, files)), context):
            message = f"{fault.path} cannot be granted: {fault.reason}"
            report.error("E_CONFIG_DANGEROUS", message, document.place(*at, *fault.field[:2]))
    for number, item in enumerate(policy.widen):
        is_unused = not any(item.tool in _names_of(tool) for tool in tools.values())
        if is_unused and item.bundle is not None and context.is_meant(item):
            hint = did_you_mean(item.tool, [tool.id for tool in tools.values()])
            place = document.place("widen", number, "tool")
            report.warn("W_CONFIG_UNUSED", f"the bundle has no tool {shown(item.tool)}", place, hint)
    for number, path in enumerate(policy.spawn.workdirs):
        place = document.place("spawn", "workdirs", number)
        if not address.is_path(path):
            hint = "Write the folder's whole path, or one that begins with ~/."
            report.error("E_CONFIG_INVALID_VALUE", f"{shown(path)} is no absolute path", place, hint)
        elif (reason := unwritable(path, context.kept, context.home)) is not None:
            report.error("E_CONFIG_DANGEROUS", f"{path} cannot be opened: {reason}", place)


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
        named = [path for part in context.widenings(tool) for path in resolve_part(part, files).read or []]
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


Isolation = Literal["shared", "instance", "call"]


class Part(Struct, frozen=True, kw_only=True):
    """A part of a sandbox, with absolute paths. None: the part does not say."""

    #: How calls are kept apart.
    isolation: Isolation | None = None
    #: What may be reached.
    network: Any = None
    #: What may be read.
    read: list[str] | None = None
    #: What may be written.
    write: list[str] | None = None
    #: Variables of the environment.
    env: list[str] | None = None
    #: What handlers may ask of the bus.
    permissions: list[Literal["agents", "restart", "tools"]] | None = None
    #: The part says something about `venv`. Without it `venv` does not count.
    says_venv: bool = False
    #: The virtual environment.
    venv: str | None = None
    #: Limits, by the names of their attributes.
    limits: dict[str, int] = {}
    #: The tier that the tool needs at least.
    min_tier: Tier | None = None


class Excess(Struct, frozen=True):
    """A part names something that a sandbox does not have. `field` is its place in the part, as it is written."""

    #: Its place in the part, as it is written.
    field: tuple[str | int, ...]
    #: What there is too much.
    what: str

    @property
    def name(self) -> str:
        """The field without its number in a list."""
        return ".".join(step for step in self.field if isinstance(step, str))


#: What a tool gets that asks for nothing.
DEFAULTS = SandboxSpec()


def narrow(base: SandboxSpec, part: Part) -> SandboxSpec:
    """What `base` allows and `part` leaves."""
    files = base.filesystem
    write = files.write if part.write is None else meet_paths(files.write, part.write)
    # A place that can be written can be read. A place that may no longer be written stays readable unless `read` says
    # else.
    read = [*files.read, *files.write]
    if part.read is not None:
        read = meet_paths(read, [*part.read, *(part.write or [])])
    limits = {name: min(getattr(base.limits, name), value) for name, value in part.limits.items()}
    venv = base.python.venv
    if part.says_venv and part.venv != venv:
        venv = None
    return replace(
        base,
        isolation="call" if part.isolation == "call" and base.isolation == "instance" else base.isolation,
        network=base.network if part.network is None else _meet_networks(base.network, part.network),
        filesystem=Filesystem(read=_outside(read, write), write=write),
        env=base.env if part.env is None else [name for name in base.env if name in part.env],
        permissions=base.permissions
        if part.permissions is None
        else [name for name in base.permissions if name in part.permissions],
        python=PythonSpec(venv=venv),
        limits=replace(base.limits, **limits),
        min_tier=_tier(part, base, weaker=False),
    )


def widen(base: SandboxSpec, part: Part) -> SandboxSpec:
    """What `base` or `part` allows. Isolation stays, and a shared jail gets no variables and no permissions."""
    files = base.filesystem
    write = join_paths([*files.write, *(part.write or [])])
    limits = {name: max(getattr(base.limits, name), value) for name, value in part.limits.items()}
    alone = base.isolation != "shared"
    return replace(
        base,
        network=base.network if part.network is None else _join_networks(base.network, part.network),
        filesystem=Filesystem(read=_outside(join_paths([*files.read, *(part.read or [])]), write), write=write),
        env=sorted({*base.env, *(part.env or [])}) if alone and part.env else base.env,
        permissions=sorted({*base.permissions, *(part.permissions or [])})
        if alone and part.permissions
        else base.permissions,
        python=PythonSpec(venv=base.python.venv or part.venv),
        limits=replace(base.limits, **limits),
        min_tier=_tier(part, base, weaker=True),
    )


def beyond(part: Part, base: SandboxSpec) -> list[Excess]:
    """What `part` names that `base` does not have."""
    found: list[Excess] = []
    if part.isolation not in (None, base.isolation) and (part.isolation, base.isolation) != ("call", "instance"):
        found.append(Excess(("isolation",), f"{part.isolation} instead of {base.isolation}"))
    if part.network is not None:
        more = hosts.beyond(hosts.read_network(part.network), hosts.read_network(base.network))
        found += [Excess(("network",), rule) for rule in more]
    files = base.filesystem
    found += _not_inside(("filesystem", "read"), part.read or [], [*files.read, *files.write])
    found += _not_inside(("filesystem", "write"), part.write or [], files.write)
    found += [Excess(("env", at), name) for at, name in enumerate(part.env or []) if name not in base.env]
    found += [
        Excess(("permissions", at), name)
        for at, name in enumerate(part.permissions or [])
        if name not in base.permissions
    ]
    if part.says_venv and part.venv is not None and part.venv != base.python.venv:
        found.append(Excess(("python", "venv"), part.venv))
    spelled = dict(zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True))
    for name, value in part.limits.items():
        if value > getattr(base.limits, name):
            found.append(Excess(("limits", spelled[name]), f"{value} instead of {getattr(base.limits, name)}"))
    if part.min_tier is not None and is_weaker(part.min_tier, base.min_tier):
        found.append(Excess(("minTier",), f"{part.min_tier} instead of {base.min_tier}"))
    return found


def _not_inside(field: tuple[str, ...], paths: Iterable[str], folders: Iterable[str]) -> list[Excess]:
    there = list(folders)
    return [
        Excess((*field, at), path) for at, path in enumerate(paths) if not any(within(path, folder) for folder in there)
    ]


def as_part(sandbox: SandboxSpec) -> Part:
    """A whole sandbox as a part that says everything but the isolation."""
    return Part(
        network=sandbox.network,
        read=sandbox.filesystem.read,
        write=sandbox.filesystem.write,
        env=sandbox.env,
        permissions=sandbox.permissions,
        says_venv=True,
        venv=sandbox.python.venv,
        limits={name: getattr(sandbox.limits, name) for name in Limits.__struct_fields__},
        min_tier=sandbox.min_tier,
    )


def without_grants(request: SandboxSpec) -> SandboxSpec:
    """The grant of a tool whose request nobody has accepted: the defaults, and less where it asks for less."""
    return narrow(request, as_part(DEFAULTS))


def requested(request: SandboxSpec) -> list[str]:
    """The parts of a request beyond the defaults, each in words that a person decides on."""
    found: list[str] = []
    network = hosts.read_network(request.network)
    if not network.none:
        found.append(f"network: {network}")
    found += [f"read: {path}" for path in request.filesystem.read]
    found += [f"write: {path}" for path in request.filesystem.write]
    found += [f"env: {name}" for name in request.env]
    found += [f"permission: {name}" for name in request.permissions]
    if request.python.venv is not None:
        found.append(f"python.venv: {request.python.venv}")
    for name, key in zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True):
        if getattr(request.limits, name) > getattr(DEFAULTS.limits, name):
            found.append(f"limits.{key}: {getattr(request.limits, name)}")
    if request.min_tier != STRONGEST:
        found.append(f"minTier: {request.min_tier}")
    return found


def _tier(part: Part, base: SandboxSpec, *, weaker: bool) -> Tier:
    """The tier of `part`, if it has one that is weaker (or, without `weaker`, stronger) than that of `base`."""
    wanted = base.min_tier if part.min_tier is None else part.min_tier
    first, second = (wanted, base.min_tier) if weaker else (base.min_tier, wanted)
    return wanted if is_weaker(first, second) else base.min_tier


# --- fields ---------------------------------------------------------------------------------------------------------


def meet_paths(one: Iterable[str], other: Iterable[str]) -> list[str]:
    """The places that lie in both."""
    there = list(other)
    both = [b if within(b, a) else a for a in one for b in there if within(a, b) or within(b, a)]
    return join_paths(both)


def join_paths(paths: Iterable[str]) -> list[str]:
    """Every place once, without those inside another."""
    every = sorted(set(paths))
    return [path for path in every if not any(other != path and within(path, other) for other in every)]


def _outside(read: Iterable[str], write: Iterable[str]) -> list[str]:
    """The places to read that are not below a place to write: what can be written can be read as well."""
    writable = list(write)
    return [path for path in join_paths(read) if not any(within(path, folder) for folder in writable)]


def _meet_networks(one: Any, other: Any) -> Any:
    return hosts.write_network(hosts.meet(hosts.read_network(one), hosts.read_network(other)))


def _join_networks(one: Any, other: Any) -> Any:
    return hosts.write_network(hosts.join(hosts.read_network(one), hosts.read_network(other)))
