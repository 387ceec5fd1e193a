"""What an extension's `register(api)` gets.

Names follow the specification in snake_case (design section 12). The v0.9 spelling `api.pipelines` is not offered yet
and says so.

Source: design sections 9 and 12; requirements EXT-03, EXT-09 to EXT-11, PIPELINE-01, PIPELINE-02, DYNAMIC-01,
DYNAMIC-02, DYNAMIC-04.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentproc.extensions.dynamic_tools import DynamicTools, Handler
from agentproc.extensions.logger import ConsoleLogger
from agentproc.extensions.pipeline import Middleware, Pipeline
from schemas.errors import fail
from schemas.launch import ExtensionSpec


class Resource(Mapping[str, Any]):
    """A document as it was written, by key or by attribute: `api.extension.spec.config`. A field that is not there is
    None as an attribute and KeyError as a key. Read-only.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._fields.get(_camel(name), self._fields.get(name))
        return Resource(value) if name in ("metadata", "spec") and isinstance(value, dict) else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a resource is read-only")

    def __repr__(self) -> str:
        return f"Resource({self._fields.get('kind')}/{(self._fields.get('metadata') or {}).get('name')})"


class PipelineApi:
    """`api.pipeline`."""

    __slots__ = ("_extension", "_pipeline")

    def __init__(self, pipeline: Pipeline, extension: str) -> None:
        self._pipeline = pipeline
        self._extension = extension

    def register(self, kind: str, handler: Middleware, *, priority: int = 0) -> None:
        """Put middleware around every `turn`, `step` or `toolCall` that begins from now on; a lower priority is further
        out. Raises GoondanError E_USAGE.
        """
        self._pipeline.register(kind, handler, extension=self._extension, priority=priority)


class ToolsApi:
    """`api.tools`."""

    __slots__ = ("_exposed", "_extension", "_tools")

    def __init__(self, tools: DynamicTools, extension: str, exposed: bool) -> None:
        self._tools = tools
        self._extension = extension
        self._exposed = exposed

    def register(self, item: Any, handler: Handler | None = None) -> None:
        """Offer a tool from the next step on: `register(item, handler)` with {name, description, parameters}, or
        `register(definition)` with the handler inside. Raises GoondanError E_USAGE, E_CONFIG_SCHEMA,
        E_TOOL_NAME_CONFLICT.
        """
        self._tools.register(item, handler, extension=self._extension, exposed=self._exposed)

    def unregister(self, name: str) -> None:
        """Take a tool of this extension out; an unknown name is ignored."""
        self._tools.unregister(name, extension=self._extension)


class ExtensionApi:
    """One extension's view of its agent."""

    __slots__ = ("agent_name", "extension", "instance_key", "logger", "pipeline", "tools")

    def __init__(
        self, spec: ExtensionSpec, pipeline: Pipeline, tools: DynamicTools, *, agent: str, instance_key: str
    ) -> None:
        self.extension = Resource(spec.resource)
        self.pipeline = PipelineApi(pipeline, spec.name)
        self.tools = ToolsApi(tools, spec.name, spec.exposes_tools)
        self.logger = ConsoleLogger(spec.name)
        self.agent_name = agent
        self.instance_key = instance_key

    @property
    def pipelines(self) -> Any:
        """The v0.9 spelling. Raises GoondanError E_CONFIG_UNSUPPORTED."""
        message = "api.pipelines (mutate, wrap) is not implemented yet"
        raise fail("E_CONFIG_UNSUPPORTED", message, suggestion="Use api.pipeline.register(kind, handler).")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
