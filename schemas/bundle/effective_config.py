"""The effective configuration of an agent, changes of it by name, what it may reach, and whether its process can go on
with another one. Pure.

The broker judges changes against it, and agents run with it; both make it here, so they cannot differ.

Shape: `{swarm, agent, model: {provider, model}, prompt: {system}, tools: [{kind, name}], extensions: [{kind, name,
config}], policy: {maxStepsPerTurn}}`. References are in the order of the agent's document.

A `Change` says what becomes of it, by the names of tools and extensions instead of their places in a list. So it means
the same for every instance of the agent, beside every other change, and after the bundle has changed. A part of a
change that has nothing to act on does nothing.

The kernel and the agent decide by the same function whether a process can go on with another specification, or has to
be replaced: the kernel to know whom to replace, the agent because what it
is told may come before it is told to leave.

Source: requirements CONFIG-01 to CONFIG-03, PIPELINE-10, EXT-12, CATALOG-04, CATALOG-05, CALL-03; docs/design/tools.md
section 1; docs/design/turns.md section 9.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.schemas.bundle import address, json_values
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ExtensionSpec
from goondan.schemas.wire.frames import NO_PAYLOAD

#: A change of the order of a list is kept under this name; no tool and no extension can have it.
ORDER: Final = "#order"

#: The path of a part that a change touches: names from the outside in, such as `("tools", "bash")`.
Touched = tuple[str, ...]


class ListChange(Struct, frozen=True, omit_defaults=True):
    """A change of a list of names."""

    #: Names that are added at the end of the list.
    added: list[str] = []
    #: Names that are taken out.
    removed: list[str] = []
    #: The new order. A name that is not here stays behind the name that it stood behind.
    order: list[str] | None = None


class ConfigChange(Struct, frozen=True, omit_defaults=True):
    """A change of one value in one extension's `config`."""

    #: Name of the extension.
    extension: str
    #: The keys that lead to the value. Empty: the whole object.
    path: list[str]
    #: The new value.
    value: Any = None
    #: The value is taken out, and `value` has no meaning.
    removed: bool = False


class Prompt(Struct, frozen=True, omit_defaults=True):
    """The system prompt; None: there is none."""

    #: The text; None: there is none.
    system: str | None = None


class ModelName(Struct, frozen=True):
    """Which model of which provider is asked. As a change it means nothing to an agent with another provider."""

    #: The provider.
    provider: str
    #: The name of the model.
    model: str


class Change(Struct, frozen=True, omit_defaults=True):
    """A change of a configuration. None: nothing of that part."""

    #: The change of the list of tools. None: no change.
    tools: ListChange | None = None
    #: The change of the list of extensions. None: no change.
    extensions: ListChange | None = None
    #: The changes of configs of extensions.
    configs: list[ConfigChange] = msgspec.field(default_factory=list, name="edits")
    #: Another system prompt. None: no change.
    prompt: Prompt | None = None
    #: Another model. None: no change.
    model: ModelName | None = None
    #: Steps that a turn may take.
    max_steps: int | None = None


class LiveChanges(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `config.changed`, and `config` of `welcome`."""

    #: The number of the last change, or of the last that was taken back.
    revision: int = 0
    #: The digest of what the bundle says, which the changes are for.
    base: str = ""
    #: Every change that is in force for the instance, in order.
    changes: list[Change] = []
    #: What the bundle says of the agent from now on (bundle.launch.AgentSpec, msgpack). Nil when that has not changed.
    #: A step thus never mixes the bundle of one moment with the changes of another.
    spec: Raw = NO_PAYLOAD


class Applied(Struct, frozen=True):
    """A configuration after changes."""

    #: Names of tools, in their order.
    tools: list[str]
    #: Names of extensions, in their order.
    extensions: list[str]
    #: The `config` of each extension, by its name.
    configs: dict[str, dict[str, Any]]
    #: The system prompt.
    system: str | None
    #: The model.
    model: ModelName
    #: Steps that a turn may take.
    max_steps: int


def effective_config(spec: AgentSpec) -> dict[str, Any]:
    """What the bundle makes an agent run with."""
    return shown(spec, declared(spec))


def declared(spec: AgentSpec) -> Applied:
    """The same in the form that changes are applied to."""
    registry = {item.name: item for item in spec.registry}
    tools = dict.fromkeys(tool_of(registry[name]) for name in spec.catalog if name in registry)
    return Applied(
        list(dict.fromkeys((*tools, *spec.dynamic))),
        [item.name for item in spec.extensions],
        {item.name: item.config for item in spec.extensions},
        spec.system,
        ModelName(spec.model.provider, spec.model.model),
        spec.max_steps_per_turn,
    )


def digest_of(spec: AgentSpec) -> str:
    """Names what the bundle makes an agent run with (16 hexadecimal digits): another one is another configuration."""
    encoded = msgspec.json.encode(effective_config(spec), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def shown(spec: AgentSpec, applied: Applied) -> dict[str, Any]:
    """A configuration as extensions see it and changes address it."""
    return {
        "swarm": (spec.swarm.get("metadata") or {}).get("name", ""),
        "agent": spec.name,
        "model": {"provider": applied.model.provider, "model": applied.model.model},
        "prompt": {"system": applied.system},
        "tools": [{"kind": "Tool", "name": name} for name in applied.tools],
        "extensions": [
            {"kind": "Extension", "name": name, "config": applied.configs[name]} for name in applied.extensions
        ],
        "policy": {"maxStepsPerTurn": applied.max_steps},
    }


def apply_changes(base: Applied, changes: Iterable[Change]) -> Applied:
    """The configuration with these changes, in their order. `base` stays as it is.

    Extensions that `base` does not have cannot come by a change.
    """
    tools, extensions, system = base.tools, base.extensions, base.system
    model, max_steps = base.model, base.max_steps
    configs = dict(base.configs)
    for change in changes:
        if change.tools is not None:
            tools = change_list(tools, change.tools)
        if change.extensions is not None:
            extensions = [name for name in change_list(extensions, change.extensions) if name in configs]
        for one in change.configs:
            if one.extension in configs:
                configs[one.extension] = _changed(configs[one.extension], one)
        if change.prompt is not None:
            system = change.prompt.system
        if change.model is not None and change.model.provider == model.provider:
            model = change.model
        if change.max_steps is not None:
            max_steps = change.max_steps
    return Applied(tools, extensions, configs, system, model, max_steps)


def change_list(names: Sequence[str], change: ListChange) -> list[str]:
    """A list of names after a change."""
    kept = [name for name in names if name not in change.removed]
    kept += [name for name in change.added if name not in kept]
    if change.order is None:
        return kept
    made = [name for name in change.order if name in kept]
    for at, name in enumerate(kept):
        if name not in made:
            made.insert(made.index(kept[at - 1]) + 1 if at else 0, name)
    return made


def change_of(before: Applied, after: Applied) -> Change:
    """The changes that lead from one configuration to another. Parts that both have in common are not among them."""
    changed = [
        one
        for name in after.extensions
        for one in _differences(name, [], before.configs.get(name, {}), after.configs[name])
    ]
    return Change(
        tools=_list_change(before.tools, after.tools),
        extensions=_list_change(before.extensions, after.extensions),
        configs=changed,
        prompt=None if before.system == after.system else Prompt(after.system),
        model=None if before.model == after.model else after.model,
        max_steps=None if before.max_steps == after.max_steps else after.max_steps,
    )


def touches(change: Change) -> set[Touched]:
    """What a change touches. Two changes of which neither touches what the other does can be made in either order."""
    touched: set[Touched] = {("extensions", one.extension, "config", *one.path) for one in change.configs}
    for kind, changed in (("tools", change.tools), ("extensions", change.extensions)):
        if changed is not None:
            touched |= {(kind, name) for name in (*changed.added, *changed.removed)}
            if changed.order is not None:
                touched.add((kind, ORDER))
    if change.prompt is not None:
        touched.add(("prompt", "system"))
    if change.model is not None:
        touched.add(("model", "model"))
    if change.max_steps is not None:
        touched.add(("policy", "maxStepsPerTurn"))
    return touched


def overlap(one: Iterable[Touched], other: Iterable[Touched]) -> Touched | None:
    """Something that both touch, the whole or a part of it; None: there is nothing."""
    others = list(other)
    for touched in sorted(one):
        for known in others:
            length = min(len(touched), len(known))
            if touched[:length] == known[:length]:
                return max(touched, known, key=len)
    return None


def tool_of(item: CatalogItem) -> str:
    """The Tool whose export it is."""
    named = address.parse_tool_name(item.name)
    return item.source.name or (item.name if named is None else named.resource_name)


def reference_name(given: Any, kind: str) -> str:
    """The name in a reference: `Kind/name`, `{kind, name}` or `{ref: Kind/name}` (EXT-12). Raises ValueError."""
    ref = given.get("ref") if isinstance(given, Mapping) and "ref" in given else given
    if isinstance(ref, Mapping):
        found, name = ref.get("kind"), ref.get("name")
    elif isinstance(ref, str):
        found, _, name = ref.partition("/")
    else:
        found, name = None, None
    if found != kind or not isinstance(name, str) or not name:
        raise ValueError(f"{str(given)[:100]} is no reference to one {kind}")
    return name


def _list_change(before: Sequence[str], after: Sequence[str]) -> ListChange | None:
    if list(before) == list(after):
        return None
    change = ListChange([name for name in after if name not in before], [name for name in before if name not in after])
    if change_list(before, change) == list(after):
        return change
    return msgspec.structs.replace(change, order=list(after))


def _differences(extension: str, path: list[str], before: Any, after: Any) -> Iterable[ConfigChange]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - after.keys():
            yield ConfigChange(extension, [*path, key], removed=True)
        for key, value in after.items():
            if key not in before:
                yield ConfigChange(extension, [*path, key], value)
            else:
                yield from _differences(extension, [*path, key], before[key], value)
    elif not json_values.same_json(before, after):
        yield ConfigChange(extension, path, after)


def _changed(config: dict[str, Any], change: ConfigChange) -> dict[str, Any]:
    """A copy of `config` with a change; a path that leads through no object is made one."""
    if not change.path:
        return dict(change.value) if isinstance(change.value, Mapping) else config
    made = dict(config)
    key, *rest = change.path
    if not rest:
        if change.removed:
            made.pop(key, None)
        else:
            made[key] = change.value
        return made
    inner = made.get(key)
    if not isinstance(inner, dict):
        if change.removed:
            return config
        inner = {}
    made[key] = _changed(inner, msgspec.structs.replace(change, path=rest))
    return made


# --- what an agent may reach ------------------------------------------------------------------------------------------


def reachable_tools(spec: AgentSpec) -> frozenset[str]:
    """The tools that `spec.tools` names, those that the policy opens to the model, and those that the agent's
    extensions may add.
    """
    opened = {item.name for item in spec.registry if any(fnmatchcase(item.name, p) for p in spec.allow_registry)}
    return frozenset(spec.catalog) | opened | frozenset(spec.addable)


def server_of(tool: str | None, servers: Container[str]) -> str | None:
    """The MCP server among `servers` (prefixes) that a tool of this name belongs to; None when there is none.

    All tools of a server whose prefix AgentSpec.servers has may be called. Which those are, only the server knows.
    """
    prefix, separator, export = (tool or "").partition(address.SEPARATOR)
    return prefix if separator and export and prefix in servers else None


# --- another specification for the same process -----------------------------------------------------------------------

#: What a process takes over at its next step. Everything else of a specification is read when a process, or a turn,
#: begins: the model and its connection, the file of the conversation.
_TAKEN: Final = (
    "system", "max_steps_per_turn", "registry", "catalog", "allow_registry", "addable", "dynamic", "extensions",
    "resource", "swarm", "revision", "parts",
)  # fmt: skip


def can_follow(old: AgentSpec, new: AgentSpec) -> bool:
    """Whether a process that runs `old` can run its next step with `new`.

    It cannot where code of an extension is another: Python cannot take a module back. Nor can an agent get its first
    extension that way: a turn that was begun without any has no place for one. Such a process has no memory of
    extensions that it could lose.
    """
    if replace(old, **{name: getattr(new, name) for name in _TAKEN}) != new:
        return False
    if new.extensions and not old.extensions:
        return False
    known = {extension.name: _code(extension) for extension in old.extensions}
    return all(known.get(extension.name, _code(extension)) == _code(extension) for extension in new.extensions)


def _code(extension: ExtensionSpec) -> tuple[Any, ...]:
    """Names the code of an extension. The folder is no part of it where the content is: a kernel may run a copy."""
    if extension.modules is None:
        return extension.entry, extension.bundled
    return posixpath.basename(extension.entry), extension.modules
