"""Reads the configurations that handlers of `step.config` return (schemas/effective_config.py has the shape). Pure.

A handler may change `tools`, `extensions` and `prompt` for its step. The rest is read-only.

Source: requirements PIPELINE-10, CONFIG-03, EXT-12, RECONCILE-02.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from goondan.agentproc.catalog import Catalog
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.schemas.address import shown_tool_name
from goondan.schemas.effective_config import reference_name, tool_of
from goondan.schemas.launch import CatalogItem, ExtensionSpec


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
        wanted[name] = spec if own is None or own == spec.config else with_config(spec, own)
    return list(wanted.values())


def wanted_tools(config: Mapping[str, Any], catalog: Catalog) -> list[CatalogItem]:
    """The tools that a configuration lists, in its order: all exports of a Tool, or one that an extension has
    registered (`skills.list`, `skills__list`). Raises MiddlewareError.
    """
    by_tool: dict[str, list[CatalogItem]] = {}
    for item in catalog.registry.values():
        if item.source.type == "config":
            by_tool.setdefault(tool_of(item), []).append(item)
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


def check_rest(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check that everything else is unchanged; `known` is the configuration in force. Raises MiddlewareError."""
    for key in {*config, *known} - {"tools", "extensions", "prompt"}:
        if config.get(key) != known.get(key):
            message = f"effective_config.{str(key)[:80]} is not for step.config; it may change tools, extensions and"
            raise MiddlewareError(f"{message} prompt.system")
    prompt, own = config["prompt"], known["prompt"]
    if any(prompt.get(key) != own.get(key) for key in {*prompt, *own} - {"system"}):
        raise MiddlewareError("effective_config.prompt is {system}; step.config may change nothing else of it")


def with_config(spec: ExtensionSpec, config: dict[str, Any]) -> ExtensionSpec:
    """The extension with another `config`, which is also set in its document."""
    resource = {**spec.resource, "spec": {**(spec.resource.get("spec") or {}), "config": config}}
    return msgspec.structs.replace(spec, config=config, resource=resource)


def _list(config: Mapping[str, Any], field: str) -> Sequence[Any]:
    given = config.get(field)
    if not isinstance(given, list | tuple):
        raise MiddlewareError(f"effective_config.{field} is {type(given).__name__}, not a list")
    return given


def _name(given: Any, kind: str) -> str:
    try:
        return reference_name(given, kind)
    except ValueError as error:
        raise MiddlewareError(f"effective_config: {error}") from None
