"""The effective configuration of an agent, as its extensions see it. Pure.

A handler of `step.config` may change `tools`, `extensions` and `prompt` for its step; the rest is there to be read.

Shape: `{swarm, agent, model: {provider, model}, prompt: {system}, tools: [{kind, name}], extensions: [{kind, name,
config}], policy: {maxStepsPerTurn}}`. References are in the order of the agent's document.

Source: requirements PIPELINE-10, CONFIG-03, EXT-12, RECONCILE-02.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentproc.catalog import Catalog
from agentproc.extensions.pipeline import MiddlewareError
from schemas.address import parse_tool_name, shown_tool_name
from schemas.launch import AgentSpec, CatalogItem, ExtensionSpec


def effective_config(spec: AgentSpec) -> dict[str, Any]:
    """What an agent runs with."""
    registry = {item.name: item for item in spec.registry}
    tools = dict.fromkeys(_tool_of(registry[name]) for name in spec.catalog if name in registry)
    return {
        "swarm": (spec.swarm.get("metadata") or {}).get("name", ""),
        "agent": spec.name,
        "model": {"provider": spec.model.provider, "model": spec.model.model},
        "prompt": {"system": spec.system},
        "tools": [{"kind": "Tool", "name": name} for name in (*tools, *spec.dynamic)],
        "extensions": [{"kind": "Extension", "name": item.name, "config": item.config} for item in spec.extensions],
        "policy": {"maxStepsPerTurn": spec.max_steps_per_turn},
    }


def wanted_extensions(config: Mapping[str, Any], known: Mapping[str, ExtensionSpec]) -> list[ExtensionSpec]:
    """The extensions that a configuration lists, in its order. `known` are those that the agent may have.

    Raises MiddlewareError.
    """
    wanted: dict[str, ExtensionSpec] = {}
    for given in _list(config, "extensions"):
        name = _name(given, "Extension")
        spec = known.get(name)
        if spec is None:
            raise MiddlewareError(f"effective_config.extensions names Extension/{name}, which the agent does not have")
        if name in wanted:
            raise MiddlewareError(f"effective_config.extensions names Extension/{name} twice")
        own = given.get("config") if isinstance(given, Mapping) else None
        if own is not None and not isinstance(own, dict):
            raise MiddlewareError(f"effective_config.extensions: the config of Extension/{name} is no object")
        wanted[name] = spec if own is None or own == spec.config else _with_config(spec, own)
    return list(wanted.values())


def wanted_tools(config: Mapping[str, Any], catalog: Catalog) -> list[CatalogItem]:
    """The tools that a configuration lists, in its order: all exports of a Tool, or one that an extension has
    registered (`skills.list`, `skills__list`). Raises MiddlewareError.
    """
    by_tool: dict[str, list[CatalogItem]] = {}
    for item in catalog.registry.values():
        if item.source.type == "config":
            by_tool.setdefault(_tool_of(item), []).append(item)
    wanted: dict[str, CatalogItem] = {}
    for given in _list(config, "tools"):
        name = _name(given, "Tool")
        shown = shown_tool_name(name)
        registered = catalog.registered(shown)
        if name in by_tool:
            wanted.update({item.name: item for item in by_tool[name]})
        elif registered is not None:
            wanted[shown] = registered
        elif not catalog.may_come(shown):
            raise MiddlewareError(f"effective_config.tools names Tool/{name}, which there is not")
    return list(wanted.values())


def wanted_system(config: Mapping[str, Any]) -> str | None:
    """The system prompt of a configuration. Raises MiddlewareError."""
    prompt = config.get("prompt")
    system = prompt.get("system") if isinstance(prompt, Mapping) else None
    if not isinstance(prompt, Mapping) or not isinstance(system, str | None):
        raise MiddlewareError("effective_config.prompt is {system}, and system a text or nothing")
    return system


def _tool_of(item: CatalogItem) -> str:
    """The Tool whose export it is."""
    named = parse_tool_name(item.name)
    return item.source.name or (item.name if named is None else named.resource_name)


def _with_config(spec: ExtensionSpec, config: dict[str, Any]) -> ExtensionSpec:
    resource = {**spec.resource, "spec": {**(spec.resource.get("spec") or {}), "config": config}}
    return msgspec.structs.replace(spec, config=config, resource=resource)


def _list(config: Mapping[str, Any], field: str) -> Sequence[Any]:
    given = config.get(field)
    if not isinstance(given, list | tuple):
        raise MiddlewareError(f"effective_config.{field} is {type(given).__name__}, not a list")
    return given


def _name(given: Any, kind: str) -> str:
    """The name in a reference: `Kind/name`, `{kind, name}` or `{ref: Kind/name}` (EXT-12)."""
    ref = given.get("ref") if isinstance(given, Mapping) and "ref" in given else given
    if isinstance(ref, Mapping):
        found, name = ref.get("kind"), ref.get("name")
    elif isinstance(ref, str):
        found, _, name = ref.partition("/")
    else:
        found, name = None, None
    if found != kind or not isinstance(name, str) or not name:
        raise MiddlewareError(f"effective_config: {str(given)[:100]} is no reference to one {kind}")
    return name
