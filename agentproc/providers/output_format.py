"""How a model is told the form of its answer, and which tools it has to call. Pure.

A vendor has a way of its own for a schema, or the model is offered a tool `answer`, which it has to call. Its arguments
are the answer. A call of `answer` beside other calls is dropped, because the model has to read their results first.

Source: docs/design/structured-answers.md sections 1, 2 and 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from msgspec import json
from msgspec.structs import replace

from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, OutputSpec, ToolChoice

#: The name of the tool. No tool of a catalog can have it: theirs have two underscores.
ANSWER_TOOL: Final = "answer"
#: The keywords that vendors take in a schema that their models are held to.
_KEYWORDS: Final = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "items", "enum", "const", "description", "title",
        "anyOf", "$ref", "$defs",
    )
)  # fmt: skip
#: The most subschemas of such a schema.
_MAX_NODES: Final = 5000
#: What a server names that refuses the vendor's way.
_NAMES_FORMAT: Final = re.compile(
    r"response_format|json_schema|output_config|output_format|text\.format|structured output"
)


class OutputWay:
    """The way of one vendor's requests. `has_own` tells whether the vendor's own way takes a schema."""

    def __init__(self, has_own: Callable[[dict[str, Any]], bool]) -> None:
        self._has_own = has_own
        self._refused = False
        self._spec: OutputSpec | None = None
        self._own = False
        self._tool: CatalogItem | None = None

    def own_schema(self, request: ModelRequest) -> dict[str, Any] | None:
        """The schema for the vendor's own way; None when the request has none, or offers the tool."""
        return request.output.schema if request.output is not None and not self._by_tool(request.output) else None

    def tools(self, request: ModelRequest) -> list[CatalogItem]:
        """The tools of the request, `answer` last."""
        if request.output is None or not self._by_tool(request.output):
            return request.tools
        if self._tool is None:
            self._tool = CatalogItem(
                name=ANSWER_TOOL,
                description="Give your final answer: call this alone, once, when nothing else is left to do.",
                parameters=request.output.schema,
            )
        return [*request.tools, self._tool]

    def choice(self, request: ModelRequest) -> ToolChoice | None:
        """Which tools the model has to call. None: the request does not say."""
        wanted = request.tool_choice
        if request.output is None or not self._by_tool(request.output):
            return wanted if request.tools else None
        if wanted == "none":
            return ForcedTool(ANSWER_TOOL)
        return wanted if isinstance(wanted, ForcedTool) else "required"

    def gives_up(self, request: ModelRequest, words: str) -> bool:
        """A server has refused the request with these words. Whether it refuses the vendor's own way: from now on the
        tool is offered.
        """
        refused = self.own_schema(request) is not None and _NAMES_FORMAT.search(words.lower()) is not None
        self._refused = self._refused or refused
        return refused

    def _by_tool(self, spec: OutputSpec) -> bool:
        if spec is not self._spec:
            self._spec, self._tool = spec, None
            self._own = spec.via == "auto" and self._has_own(spec.schema)
        return self._refused or not self._own


def answered(answer: ModelAnswer) -> ModelAnswer:
    """The answer of a model that may have called `answer`."""
    others = [call for call in answer.calls if call.name != ANSWER_TOOL]
    if len(others) == len(answer.calls):
        return answer
    text = answer.text
    if not others:
        last = answer.calls[-1]
        text = json.encode(last.args).decode() if last.broken is None else f"(unreadable arguments: {last.broken})"
    return replace(answer, calls=others, text=text, metadata=None)


def is_closed(schema: dict[str, Any], *, all_required: bool) -> bool:
    """Whether vendors hold a model to this schema: only the usual keywords, and objects without further properties.
    `all_required`: every property is required, and a type may be a list.
    """
    todo: list[Any] = [schema]
    for _ in range(_MAX_NODES):
        if not todo:
            return True
        node = todo.pop()
        if not isinstance(node, dict) or node.keys() - _KEYWORDS:
            return False
        kind, properties = node.get("type"), node.get("properties", {})
        if not isinstance(properties, dict) or (isinstance(kind, list) and not all_required):
            return False
        if (kind == "object" or properties) and node.get("additionalProperties") is not False:
            return False
        if all_required and set(node.get("required", [])) != set(properties):
            return False
        todo += [*properties.values(), *node.get("anyOf", []), *node.get("$defs", {}).values()]
        todo += [node["items"]] if "items" in node else []
    return False
