"""Reads what extensions change of a step: its configuration (`step.config`) and its catalog of tools. Pure.

- A handler of `step.config` may change `tools`, `extensions` and `prompt` for its step. The rest is read-only
  (schemas/bundle/effective_config.py has the shape).
- Each item of a changed catalog must be an item, and callable.
- The source of a tool of an MCP server is `{"type": "mcp", "name": …, "mcp": {"extensionName": …, "serverName": …}}`.
  The older form is free, such as `{"type": "mcp", "extension": …}`, and is converted to the present one.

Source: requirements PIPELINE-10, CONFIG-03, EXT-12, RECONCILE-02, CATALOG-05, ITEM-02, ITEM-03,
ITEM-05, ITEM-07.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.machine.catalog import Catalog
from goondan.schemas.bundle.address import SEPARATOR, shown_tool_name
from goondan.schemas.bundle.effective_config import reference_name, tool_of
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec, ServerSource, ToolSource
from goondan.schemas.worker.servers import ALIAS


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


class Unreachable(MiddlewareError):
    """A tool was added that this agent cannot call. `suggestion` names the field to change."""

    def __init__(self, message: str, suggestion: str) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def read_items(items: Any, catalog: Catalog) -> list[CatalogItem]:
    """The items of a catalog. Raises MiddlewareError for an invalid item, Unreachable for a tool that
    cannot be called.
    """
    if not isinstance(items, list | tuple):
        raise MiddlewareError(f"tool_catalog is {type(items).__name__}, not a list")
    read: list[CatalogItem] = []
    for item in items:
        if not isinstance(item, CatalogItem):
            try:
                item = msgspec.convert(with_known_source(item), CatalogItem)
            except msgspec.ValidationError as error:
                raise MiddlewareError(f"tool_catalog has a bad item: {error}") from None
        shown = shown_tool_name(item.name)
        if not catalog.reaches(shown):
            raise Unreachable(*_refusal(shown, catalog))
        name = catalog.canonical(shown)
        read.append(item if name == shown else item.replace(name=name))
    return read


def _refusal(name: str, catalog: Catalog) -> tuple[str, str]:
    """The message and the suggestion for a tool that cannot be called."""
    item = catalog.registry.get(name)
    if item is None:
        message = f"tool_catalog names {name[:80]!r}, which no Tool of the bundle has and no extension has registered"
        return message, "Register it with api.tools.register before it is added, or correct the name."
    message = f"tool_catalog names {name!r}, which extensions of agent {catalog.agent} may not add"
    where = f"spec.tools of Agent/{catalog.agent}"
    tool = f"Tool/{item.source.name or name.partition(SEPARATOR)[0]}"
    if not catalog.widened:
        return message, f"Name {tool} in {where}. Bundled extensions add no tools to those of their agent."
    pattern = f"policy.toolCalls.extensionsMayAdd of Agent/{catalog.agent}"
    return message, f"Add {name!r} or a pattern for it to {pattern}, or name {tool} in {where}."


def source_of(given: Any, extension: str) -> ToolSource:
    """The source of a tool that `extension` registers: always the extension's own name, and the MCP server
    behind it.
    """
    if not isinstance(given, Mapping) or given.get("type") != ALIAS:
        return ToolSource("extension", extension)
    named = given.get(ALIAS)
    server = named.get("serverName") if isinstance(named, Mapping) else given.get("server")
    return ToolSource(ALIAS, extension, ServerSource(extension, server if isinstance(server, str) else None))


def with_known_source(item: Any) -> Any:
    """A catalog item as middleware writes it, with its source in the present form. An item without the older form is
    unchanged.
    """
    source = item.get("source") if isinstance(item, dict) else None
    if not isinstance(source, dict) or "name" in source or not isinstance(source.get("extension"), str):
        return item
    made = source_of(source, source["extension"])
    return {**item, "source": made}
