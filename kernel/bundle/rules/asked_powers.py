"""The powers that a bundle asks for, read from its checked documents. Pure.

The requests in the bundle's documents count, before the operator's policy widens them and after the bundle's own agents
have narrowed them. Tools of packages are left out: only `gdn grant` accepts their requests.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from msgspec import Struct

from goondan.kernel.bundle.rules.checked import Checked, CheckedAgent, CheckedServer, CheckedTool
from goondan.kernel.bundle.rules.kinds import kinds, providers, server_rules
from goondan.kernel.bundle.rules.models import is_http_url
from goondan.kernel.bundle.rules.shape import VARIABLE, Document
from goondan.kernel.bundle.rules.variables import GRANTED, variables_of
from goondan.kernel.grants import granting, powers
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.bundle.launch import ExtensionSpec, Limits, ModelSpec, SandboxSpec
from goondan.schemas.bundle.resources import AgentPolicy, ModelBody, SwarmPolicy, ValueSource
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.models.origins import is_open, origin_of
from goondan.schemas.worker import grantable, hosts, receipts


def powers_of(
    checked: Checked,
    documents: Iterable[Document],
    root: str,
    env: Mapping[str, str],
    real: Callable[[str], str] = lambda path: path,
) -> list[powers.Power]:
    """The powers that the bundle asks for, each once, in the order in which a person should read them: the most
    dangerous first.

    `root` is the bundle's folder, `env` the user's environment: only which variables are set counts, and the address
    in one that a model's endpoint consists of. `real` resolves links: a path in the bundle can lead out of it.
    """
    agents = list(checked.agents.values())
    asked = [(tool, sandbox) for tool in checked.tools.values() if (sandbox := _asked(tool, agents)) is not None]
    asked += [pair for server in checked.servers.values() for pair in _of_server(server)]
    known = server_rules()
    models = [power for agent in agents for power in _model(agent, env)]
    parts: tuple[Iterable[powers.Power], ...] = (
        (_module(extension, root) for agent in agents for extension in agent.extensions if not extension.bundled),
        (power for power in models if isinstance(power, powers.OpenKey)),
        _variables(documents, agents),
        (powers.Variable(name, f"tool {tool.name}") for tool, sandbox in asked for name in sandbox.env),
        (power for tool, sandbox in asked for power in _folders(tool, sandbox, root, real)),
        (power for tool, sandbox in asked for power in _network(tool, sandbox)),
        (power for server in checked.servers.values() if known is not None for power in known.powers(server)),
        models,
        (
            power
            for kind in kinds().values()
            for one in checked.declared.get(kind.name, ())
            for power in kind.powers(one.document, one.body)
        ),
        (powers.Permission(tool.name, name) for tool, sandbox in asked for name in sandbox.permissions),
        (power for tool, sandbox in asked if not tool.bundled for power in _settings(tool, sandbox)),
        (power for agent in agents for power in _policy(agent, checked)),
        _beyond(checked.policy, SwarmPolicy(), _SWARM_LIMITS, f"Swarm/{checked.swarm}"),
    )
    return list(dict.fromkeys(power for part in parts for power in part))


def _variables(documents: Iterable[Document], agents: Iterable[CheckedAgent]) -> Iterable[powers.Power]:
    """Variables that texts of documents name, and those that keys of models come from."""
    for document in documents:
        kind = document.resource.partition("/")[0]
        for name, use in variables_of(document.node, kind, document.resource):
            if use != GRANTED:  # this is told with the other grants of the server
                yield powers.Variable(name, use)
    for agent in agents:
        body = agent.model_body
        for value in () if body is None else (body.api_key, *body.headers.values()):
            if isinstance(value, ValueSource) and value.value_from is not None:
                yield powers.Variable(value.value_from.env, "key")


def _policy(agent: CheckedAgent, checked: Checked) -> Iterable[powers.Power]:
    """The settings that an agent's policy opens, and its limits that are above the defaults."""
    resource = f"Agent/{agent.name}"
    for pattern in agent.body.policy.tool_calls.allow_registry:
        yield powers.Setting(resource, "allowRegistry", pattern)
    for pattern in _widening(agent, checked):
        yield powers.Setting(resource, "extensionsMayAdd", pattern)
    yield from _beyond(agent.body.policy, AgentPolicy(), _AGENT_LIMITS, resource)


#: What costs the person money, memory or disk.
_AGENT_LIMITS: Final = {"conversation_mb": "conversationMb"}
_SWARM_LIMITS: Final = {
    "max_steps_per_turn": "maxStepsPerTurn",
    "max_live_agents": "maxLiveAgents",
    "mailbox_mb": "mailboxMb",
    "max_open_events": "maxOpenEvents",
}


def _beyond(policy: Struct, usual: Struct, limits: Mapping[str, str], whose: str) -> Iterable[powers.Power]:
    """Limits of a policy that are above the defaults."""
    for name, key in limits.items():
        value = getattr(policy, name)
        if value > getattr(usual, name):
            yield powers.Setting(whose, f"policy.{key}", str(value))


def _module(extension: ExtensionSpec, root: str) -> powers.Module:
    total = hashlib.sha256()
    for path, digest in sorted((extension.modules or {}).items()):
        total.update(f"{path}\0{digest}\0".encode("utf-8", "surrogateescape"))
    return powers.Module(extension.name, posixpath.relpath(extension.entry, root), total.hexdigest())


def _asked(tool: CheckedTool, agents: list[CheckedAgent]) -> SandboxSpec | None:
    """The bundle's request for a tool. For its own tool it is what the manifest says. For a bundled tool it is what the
    agents that can call it leave of that. None for tools of packages, and for bundled ones that no agent can call.
    """
    if tool.package:
        return None
    if not tool.bundled:
        return tool.sandbox
    left = [
        # Of what the operator's policy has added nothing counts.
        granting.narrow(tool.sandbox, granting.as_part(tool.narrowed[agent.name]))
        if agent.name in tool.narrowed
        else tool.sandbox
        for agent in agents
        if tool.name in agent.tools or tool.name in agent.brought or (not tool.brought and _lets_call(agent, tool))
    ]
    if not left:
        return None
    return left[0] if all(one == left[0] for one in left) else tool.sandbox


def _of_server(server: CheckedServer) -> Iterator[tuple[CheckedTool, SandboxSpec]]:
    """The requests for a server that runs in a jail. An http server is nothing but its endpoint."""
    if server.spec.transport == "stdio":
        yield server.tool, server.tool.sandbox
    for spec, sandbox in server.of_agents.values():
        if spec.transport == "stdio":
            yield server.tool, sandbox


def _lets_call(agent: CheckedAgent, tool: CheckedTool) -> bool:
    names = [build_tool_name(tool.name, export.name) for export in tool.body.exports]
    policy = agent.body.policy.tool_calls
    patterns = [*policy.allow_registry, *(policy.extensions_may_add or ())]
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _widening(agent: CheckedAgent, checked: Checked) -> Iterable[str]:
    """Patterns that let extensions add tools of packages; those of the bundle's own need none."""
    others = [tool for tool in checked.tools.values() if (tool.bundled and not tool.brought) or tool.package]
    names = [build_tool_name(tool.name, export.name) for tool in others for export in tool.body.exports]
    for pattern in agent.body.policy.tool_calls.extensions_may_add or ():
        if any(fnmatchcase(name, pattern) for name in names):
            yield pattern


def _folders(tool: CheckedTool, sandbox: SandboxSpec, root: str, real: Callable[[str], str]) -> Iterable[powers.Power]:
    """The real path counts, and not its spelling: a link in the bundle can lead anywhere."""
    venv = sandbox.python.venv
    for path in map(real, (*sandbox.filesystem.read, *([venv] if venv is not None else []))):
        if not grantable.within(path, root):
            yield powers.Folder(tool.name, "read", path)
    for path in map(real, sandbox.filesystem.write):
        yield powers.Folder(tool.name, "write", path)


def _network(tool: CheckedTool, sandbox: SandboxSpec) -> Iterable[powers.Power]:
    network = hosts.read_network(sandbox.network)
    if network.public:
        yield powers.Reach(tool.name, "public")
    for rule in network.rules:
        yield powers.Reach(tool.name, str(rule))


def _settings(tool: CheckedTool, sandbox: SandboxSpec) -> Iterable[powers.Power]:
    whose = f"Tool/{tool.name}"
    if sandbox.min_tier != receipts.STRONGEST:
        yield powers.Setting(whose, "minTier", sandbox.min_tier)
    for name, key in zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True):
        value = getattr(sandbox.limits, name)
        if value > getattr(granting.DEFAULTS.limits, name):
            yield powers.Setting(whose, f"limits.{key}", str(value))


# --- models ---------------------------------------------------------------------------------------------------------


def _model(agent: CheckedAgent, env: Mapping[str, str]) -> Iterable[powers.Power]:
    document, body, params = agent.model_document, agent.model_body, agent.body.model_config.params
    if document is None or body is None:
        return
    yield from _reached(document, body, params, agent.model, env)
    for other in agent.fallback:
        yield from _reached(other.document, other.body, {}, other.model, env)


def _reached(
    document: Document, body: ModelBody, params: Mapping[str, Any], model: ModelSpec | None, env: Mapping[str, str]
) -> Iterable[powers.Power]:
    """What a Model reaches, with which key. `params` are those of the agent that uses it."""
    if body.provider == "embedded" or body.provider in providers():
        return
    # Vendors take addresses of further servers in a request, which they then send parts of the conversation to.
    for named in _texts([body.params, params]):
        if (other := origin_of(named)) is not None:
            yield powers.Endpoint(other, "")
    if body.provider == "auto":
        yield powers.OwnModel(asleep=model is not None and model.provider == "embedded")
        return
    keys = _keys(document, body, env)
    origin = _origin(document, body, env)
    for key in keys or [""]:
        yield powers.Endpoint(origin, key)
    reached = origin_of(body.endpoint or "")
    if reached is not None and is_open(reached):
        for key in keys:
            yield powers.OpenKey(origin, key)
        if not keys and (body.api_key is not None or body.headers):
            yield powers.OpenKey(origin, "")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _keys(document: Document, body: ModelBody, env: Mapping[str, str]) -> list[str]:
    """The user's variables that make the key and the headers; empty when the bundle itself holds them, or there are
    none.
    """
    named = {name for name, use in variables_of(document.node, "Model", "") if use == "key"}
    for value in (body.api_key, *body.headers.values()):
        if isinstance(value, ValueSource) and value.value_from is not None:
            named.add(value.value_from.env)
    custom = BY_NAME[body.provider].key_variable
    if body.api_key is None and env.get(custom):
        named.add(custom)
    return sorted(named)


def _origin(document: Document, body: ModelBody, env: Mapping[str, str]) -> str:
    """Where requests go, in one spelling."""
    if body.endpoint is None:
        return origin_of(BY_NAME[body.provider].server) or ""
    written = document.scalar("spec", "endpoint")
    match = VARIABLE.match(written or "")
    if written is not None and match is not None and not match.group().startswith("$$"):
        rest = written[match.end() :]
        # The variable must hold the host by itself: `${NAME}.example` and `${NAME}//example` name another one.
        if is_http_url(env.get(match[1], "")) and (not rest or (rest.startswith("/") and not rest.startswith("//"))):
            return "${" + match[1] + "}"
    return origin_of(body.endpoint) or body.endpoint[:200]
