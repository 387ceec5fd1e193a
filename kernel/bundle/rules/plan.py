"""A checked bundle to the launch specifications of everything that runs it; and what of a kernel that runs a new plan
affects.

The registry of every agent is all exports of the bundle's tools and of the bundled package, and of the tools that its
own extensions bring; its catalog is what `spec.tools` names, every export of each Tool in the order written. The
operator agent behind `gdn call` is added: its catalog is the whole registry without what extensions bring.

Values of variables and headers of servers go to tool hosts only: agents do not need them. A digest names what makes two
sessions of a server different, these values included, so an agent attaches anew when one of them changes.

An agent is affected by what it is told: its model, prompt, policy, extensions, and the tools that it can reach. Its
processes take that over at their next step, where they can (schemas/bundle/effective_config.py). A tool is affected by
its manifest, its grants and its code. Limits of the whole swarm are read once, when a broker or a tool host starts:
when they change, the kernel restarts in place.

Source: docs/design/bundle.md section 8; docs/design/tools.md sections 1 and 11; requirements CATALOG-01, CATALOG-02,
CATALOG-04, CATALOG-08, NAME-01, NAME-06, ITEM-04, ERROR-04, BASE-01, MCP-05 to MCP-09, MCP-22.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.kernel.bundle.rules.checked import Checked, CheckedAgent, CheckedServer, CheckedTool
from goondan.kernel.bundle.rules.kinds import brought, feature_extensions, server_rules, server_rules_of
from goondan.schemas.bundle import address, effective_config, launch
from goondan.schemas.wire import codec, frames

_OPERATOR_MODEL: Final = launch.ModelSpec(provider="embedded")
_ordered: Final = msgspec.msgpack.Encoder(order="deterministic")


def build_plan(
    checked: Checked,
    *,
    bundle: str,
    state_dir: str,
    revision: str,
    documents: Iterable[str],
    spawn_workdirs: Iterable[str] = (),
    digests: Mapping[str, str] | None = None,
    hidden: Iterable[str] = (),
) -> launch.KernelPlan:
    """The plan of a bundle without errors. `documents` are its files; `digests` those of the tools' folders, by their
    roots. Every path is absolute. `hidden`: see ToolHostSpec; `spawn_workdirs`: see KernelPlan.

    `entry_agent` is '' when the bundle has no agent: then only `gdn call` can use it.
    """
    tools = list(checked.tools.values())
    servers = {
        name: _server_tool(server, (digests or {}).get(server.tool.root, ""))
        for name, server in checked.servers.items()
    }
    registry = [item for tool in tools if not tool.brought for item in catalog_items(tool)]
    by_tool = {tool.name: [item.name for item in catalog_items(tool)] for tool in tools}
    agents = {
        name: with_parts(_agent(agent, checked, registry, by_tool, servers, state_dir, revision), agent)
        for name, agent in checked.agents.items()
    }
    agents[frames.OPERATOR_AGENT] = launch.AgentSpec(
        name=frames.OPERATOR_AGENT,
        model=_OPERATOR_MODEL,
        registry=registry,
        catalog=[item.name for item in registry],
        state_dir=state_dir,
        revision=revision,
        durability=checked.policy.durability,
        idle_s=checked.policy.agent_idle_seconds,
    )
    own_tools = (tool.root for tool in checked.runs_in_jails if tool.root and not tool.bundled)
    protected = sorted({*documents, *checked.files, *checked.extension_roots, *own_tools, *runtimes_of(checked)})
    return launch.KernelPlan(
        revision=revision,
        bundle=bundle,
        state_dir=state_dir,
        entry_agent=checked.entry_agent,
        agents=agents,
        toolhost=launch.ToolHostSpec(
            tools=[
                *(
                    replace(tool_spec(tool), digest=(digests or {}).get(tool.root, ""))
                    for tool in tools
                    if not tool.in_agent
                ),
                *servers.values(),
            ],
            state_dir=state_dir,
            revision=revision,
            protected=protected,
            hidden=list(hidden),
        ),
        protected=protected,
        max_live_agents=checked.policy.max_live_agents,
        agent_idle_s=checked.policy.agent_idle_seconds,
        swarm=checked.swarm,
        durability=checked.policy.durability,
        kept_agents=checked.policy.kept_agents,
        mailbox_mb=checked.policy.mailbox_mb,
        max_open_events=checked.policy.max_open_events,
        spawn_workdirs=list(spawn_workdirs),
        sharing_agents=_sharing(checked),
        parts={name: codec.to_raw(part) for name, part in checked.parts.items()},
    )


def with_parts(spec: launch.AgentSpec, agent: CheckedAgent) -> launch.AgentSpec:
    """The specification of an agent with the parts of features: `agent_spec` of each `bundle.py`. The last row of the
    table comes first, so a feature sees what those have that it wraps.
    """
    for adds in reversed(brought("agent_spec")):
        spec = adds(spec, agent)
    return spec


def replanned(plan: launch.KernelPlan, env: Mapping[str, str]) -> launch.KernelPlan:
    """The plan as features change it by the environment of the kernel: `replan` of each `bundle.py`. Raises
    GoondanError.
    """
    for changes in reversed(brought("replan")):
        plan = changes(plan, env)
    return plan


def _sharing(checked: Checked) -> list[str]:
    usual = checked.swarm_resource.get("spec", {}).get("workdir", "own")
    found = {name for name, agent in checked.agents.items() if (agent.body.workdir or usual) == "shared"}
    return sorted(found | {checked.entry_agent}) if found else []


def runtimes_of(checked: Checked) -> Iterator[str]:
    """The programs (or packages) and folders of libraries of JavaScript runtimes: no jail may change what the next one
    runs.
    """
    for tool in checked.tools.values():
        if tool.javascript is not None:
            yield from (tool.javascript.package or tool.javascript.program, *tool.javascript.libraries)


def catalog_items(tool: CheckedTool) -> list[launch.CatalogItem]:
    """What an agent knows of each export of a Tool."""
    return [
        launch.CatalogItem(
            name=address.build_tool_name(tool.name, export.name),
            description=export.description,
            parameters=export.parameters,
            source=launch.ToolSource("config", tool.name),
            error_message_limit=tool.body.error_message_limit,
            idempotent=export.idempotent,
            aliases=export.aliases,
            in_agent=tool.in_agent,
        )
        for export in tool.body.exports
    ]


def tool_spec(tool: CheckedTool) -> launch.ToolSpec:
    """What the tool host needs of a Tool."""
    return launch.ToolSpec(
        name=tool.name,
        entry=tool.entry,
        root=tool.root,
        exports=[
            launch.ExportSpec(
                name=export.name,
                parameters=export.parameters,
                idempotent=export.idempotent,
                background=export.background,
                aliases=export.aliases,
            )
            for export in tool.body.exports
        ],
        error_message_limit=tool.body.error_message_limit,
        sandbox=tool.granted or tool.sandbox,
        bundled=tool.bundled,
        narrowed=tool.narrowed,
        folders=tool.folders,
        javascript=tool.javascript,
        lack=tool.lack,
        lack_fix=tool.lack_fix,
    )


def _agent(
    agent: CheckedAgent,
    checked: Checked,
    registry: list[launch.CatalogItem],
    by_tool: Mapping[str, list[str]],
    servers: Mapping[str, launch.ToolSpec],
    state_dir: str,
    revision: str,
) -> launch.AgentSpec:
    if agent.model is None:
        raise AssertionError("an agent without a model is an error, and a bundle with errors has no plan")
    policy = checked.policy
    brought = [
        replace(item, source=launch.ToolSource("extension", _bringer(agent, name)))
        for name in agent.brought
        for item in catalog_items(checked.tools[name])
    ]
    return launch.AgentSpec(
        name=agent.name,
        model=agent.model,
        fallback=[fallback.model for fallback in agent.fallback],
        registry=[*registry, *brought] if brought else registry,
        catalog=[name for tool in agent.tools for name in by_tool[tool]],
        state_dir=state_dir,
        revision=revision,
        system=agent.system,
        max_steps_per_turn=policy.max_steps_per_turn,
        allow_registry=agent.body.policy.tool_calls.allow_registry,
        extensions=[_agent_extension(extension, agent.name, servers) for extension in agent.extensions],
        durability=policy.durability,
        idle_s=policy.agent_idle_seconds,
        stall_timeout_s=agent.body.policy.stall_timeout_s,
        conversation_mb=agent.body.policy.conversation_mb,
        traces=agent.body.policy.traces,
        request_timeout_ms=agent.body.policy.request_timeout_ms or policy.request_timeout_ms,
        resource={} if not agent.extensions else _agent_document(agent.resource) if agent.servers else agent.resource,
        swarm=checked.swarm_resource if agent.extensions else {},
        addable=[*_addable(agent, checked), *(item.name for item in brought)],
        dynamic=agent.dynamic,
        servers=[name for name, server in checked.servers.items() if agent.name in server.agents],
        output=agent.body.output,
        tool_choice=agent.body.tool_choice,
        parts=_parts(agent),
    )


def _parts(agent: CheckedAgent) -> dict[str, Raw]:
    """What features make of the agent's extensions, by their names."""
    found = ((known.feature, known.part(agent.extensions)) for known in feature_extensions())
    return {name: codec.to_raw(part) for name, part in found if part is not None}


def _bringer(agent: CheckedAgent, tool: str) -> str:
    """The first of the agent's extensions that brings this Tool."""
    return next(extension.name for extension in agent.extensions if tool in extension.tools)


def _addable(agent: CheckedAgent, checked: Checked) -> list[str]:
    """The tools that the agent's extensions may add to a step beyond spec.tools. Bundled ones add nothing.

    Source: docs/design/tools.md section 1.
    """
    if all(extension.bundled for extension in agent.extensions):
        return []
    patterns = agent.body.policy.tool_calls.extensions_may_add
    names = [
        address.build_tool_name(tool.name, export.name)
        for tool in checked.tools.values()
        if not tool.brought and (patterns is not None or not (tool.bundled or tool.package))
        for export in tool.body.exports
    ]
    if patterns is None:
        return names
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


# --- servers ---------------------------------------------------------------------------------------------------------


def _server_tool(server: CheckedServer, digest: str) -> launch.ToolSpec:
    """A server as a Tool of the tool host. `digest` is that of the folder that its command names."""
    tool = server.tool
    sandbox = tool.granted or tool.sandbox
    narrowed = {name: left for name, left in tool.narrowed.items() if name in server.agents}
    narrowed |= {name: own for name, (_, own) in server.of_agents.items()}
    shared = _with_digest(server.spec, sandbox, digest)
    servers: dict[str, launch.ServerSpec] = {}
    for name, left in narrowed.items():
        spec = server.of_agents[name][0] if name in server.of_agents else server.spec
        servers[name] = _with_digest(spec, left, digest)
    return launch.ToolSpec(
        name=tool.name,
        entry=tool.entry,
        root=tool.root,
        exports=[],
        error_message_limit=tool.body.error_message_limit,
        sandbox=sandbox,
        narrowed=narrowed,
        digest=digest,
        server=shared,
        servers=servers,
    )


def _with_digest(spec: launch.ServerSpec, sandbox: launch.SandboxSpec, folder: str) -> launch.ServerSpec:
    total = hashlib.sha256(_ordered.encode([replace(spec, digest=""), sandbox, folder])).hexdigest()
    return replace(spec, digest=total)


def _agent_extension(
    extension: launch.ExtensionSpec, agent: str, tools: Mapping[str, launch.ToolSpec]
) -> launch.ExtensionSpec:
    """What an agent is told of one of its extensions. `tools` are those of the tool host that are servers."""
    known = server_rules_of(extension.entry, extension.bundled)
    if known is None or not extension.config:
        return extension
    tool = tools[known.prefix(extension.name, extension.config)]
    spec = tool.servers.get(agent) or tool.server
    document = dict(extension.resource)
    document["spec"] = known.without_values(document["spec"])
    return replace(
        extension,
        resource=document,
        config=document["spec"]["config"],
        server=tool.name,
        server_digest="" if spec is None else spec.digest,
    )


def _agent_document(document: dict[str, Any]) -> dict[str, Any]:
    """The document of an agent that has servers, without the values in its own configs of these."""
    body, known = document.get("spec"), server_rules()
    uses = body.get("extensions") if isinstance(body, dict) else None
    if known is None or not isinstance(body, dict) or not isinstance(uses, list):
        return document
    shown = [known.without_values(use) if isinstance(use, dict) else use for use in uses]
    return {**document, "spec": {**body, "extensions": shown}}


# --- what a new plan changes -----------------------------------------------------------------------------------------

#: Fields of a plan that a broker or a tool host takes only when it starts.
_WHOLE: Final = (
    "state_dir", "max_live_agents", "agent_idle_s", "durability", "kept_agents", "mailbox_mb", "max_open_events",
    "spawn_workdirs",
)  # fmt: skip
_WHOLE_HOST: Final = ("state_dir", "max_jails", "jail_idle_s")


class Difference(Struct, frozen=True, kw_only=True):
    """What a new revision changes."""

    #: The agents that changed, came or went.
    agents: list[str] = []
    #: The tools that changed, came or went.
    tools: list[str] = []
    #: The agents whose processes cannot go on with the new revision.
    replaced: list[str] = []
    #: The setting for which the whole kernel has to restart. None: there is none.
    whole: str | None = None
    #: A change for which no process has to restart: for example of the entry agent, of the files that jails may not
    #: write, or of what features have in the plan. Who is concerned by the last is told.
    quiet: bool = False

    @property
    def nothing(self) -> bool:
        """Whether everything can go on as it is."""
        return not (self.agents or self.tools or self.whole or self.quiet)


def difference(old: launch.KernelPlan, new: launch.KernelPlan) -> Difference:
    """What `new` changes in a kernel that runs `old`."""
    whole = next((name for name in _WHOLE if getattr(old, name) != getattr(new, name)), None) or next(
        (name for name in _WHOLE_HOST if getattr(old.toolhost, name) != getattr(new.toolhost, name)), None
    )
    if whole is None and _variables(new) - _variables(old):
        whole = "sandbox.env"  # a tool host gets the values when it starts
    return Difference(
        agents=_changed(_agents(old), _agents(new)),
        tools=_changed(_tools(old), _tools(new)),
        replaced=sorted(
            name
            for name, spec in old.agents.items()
            if name not in new.agents or not effective_config.can_follow(spec, new.agents[name])
        ),
        whole=whole,
        quiet=_quiet(old) != _quiet(new),
    )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _quiet(plan: launch.KernelPlan) -> tuple[Any, ...]:
    return plan.swarm, plan.entry_agent, plan.protected, plan.parts


def _variables(plan: launch.KernelPlan) -> set[str]:
    return {name for tool in plan.toolhost.tools for name in tool.variables}


def _agents(plan: launch.KernelPlan) -> dict[str, Any]:
    return {name: _told(spec, plan.private_copy) for name, spec in plan.agents.items() if name != frames.OPERATOR_AGENT}


def _told(spec: launch.AgentSpec, copy: str) -> launch.AgentSpec:
    """The tools that an agent uses: those of the registry that it can reach, or the whole registry when extensions may
    look at it.
    """
    extensions = [replace(one, entry=one.entry.removeprefix(copy)) for one in spec.extensions]
    registry = spec.registry
    if not extensions:
        registry = [
            item
            for item in registry
            if item.name in spec.catalog or any(fnmatchcase(item.name, pattern) for pattern in spec.allow_registry)
        ]
    return replace(spec, registry=registry, extensions=extensions, revision="")


def _tools(plan: launch.KernelPlan) -> dict[str, launch.ToolSpec]:
    copy = plan.private_copy
    return {
        tool.name: replace(tool, entry=tool.entry.removeprefix(copy), root=tool.root.removeprefix(copy))
        for tool in plan.toolhost.tools
    }
