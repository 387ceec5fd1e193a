"""The description of the API in OpenAPI 3.1, made from the rows of its routes and the structs in them.

Routes of other features below the prefix are in it as far as they say what they are (`operation`).

Source: the OpenAPI specification, version 3.1.1; RFC 9457.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.features.serve.api.gate import Way
from goondan.features.serve.api.problems import Problem
from goondan.features.serve.api.routing import JSON, Asked
from goondan.kernel.cli.operations import Operation

_REF: Final = "#/components/schemas/{name}"
_STREAM: Final = "text/event-stream"
#: The header fields that a message takes.
_HEADERS: Final = {
    "Idempotency-Key": "Under the same key, the same token sends the same message, and gets the same answer.",
    "Last-Event-ID": "The id of the last event that came: the stream goes on behind it.",
    "Prefer": "`respond-async`: return when the message is accepted.",
}


def document(routes: Iterable[Way]) -> dict[str, Any]:
    """The document of these routes (pure)."""
    every = [(route, operation) for route in routes if (operation := route.operation)]
    told = [part for _, one in every for part in (one.get("body"), one.get("later"), *_kinds(one.get("answer")))]
    structs = [Problem, *filter(None, told)]
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REF)
    by_struct = dict(zip(map(id, structs), schemas, strict=True))
    paths: dict[str, Any] = {}
    for route, operation in every:
        method = min(route.methods).lower()
        paths.setdefault(route.path, {})[method] = _operation(route.path, route.role, operation, by_struct)
    return {
        "openapi": "3.1.1",
        "info": {"title": "A swarm of agents, as an HTTP service", "version": "1"},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _kinds(answer: Any) -> tuple[Any, ...]:
    """The types that an answer may have."""
    return answer if isinstance(answer, tuple) else () if answer is None else (answer,)


def _operation(path: str, role: str | None, row: Mapping[str, Any], schemas: Mapping[int, Any]) -> dict[str, Any]:
    kinds = [schemas[id(kind)] for kind in _kinds(row.get("answer"))]
    content: dict[str, Any] = {JSON: {"schema": {"oneOf": kinds} if len(kinds) > 1 else next(iter(kinds), {})}}
    if row.get("streams"):
        content = {_STREAM: {"schema": _TEXT}} | (content if kinds else {})
    problem = {"application/problem+json": {"schema": schemas[id(Problem)]}}
    told: dict[str, Any] = {
        "operationId": row["name"],
        "summary": row["summary"],
        "description": f"Takes a token with the role {role}.",
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)}", path)),
            *_parameters(row.get("query")),
            *(_header(name) for name in _HEADERS if row.get("streams") and (row.get("body") or name[0] == "L")),
        ],
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "It failed.", "content": problem},
        },
    }
    if (later := row.get("later")) is not None:
        content = {JSON: {"schema": schemas[id(later)]}}
        told["responses"]["202"] = {"description": "The answer is not here yet.", "content": content}
    if (body := row.get("body")) is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[id(body)]}}}
    return told


_TEXT: Final = {"type": "string"}


def _header(name: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": _HEADERS[name], "schema": _TEXT}


def _parameters(query: type[Struct] | None) -> Iterable[dict[str, Any]]:
    if query is None:
        return
    schema = msgspec.json.schema(query)
    found = schema["$defs"][query.__name__]
    for name, each in found["properties"].items():
        yield {"name": name, "in": "query", "required": name in found.get("required", ()), "schema": each}


async def tell(asked: Asked) -> dict[str, Any]:
    """The document of this door."""
    return document(asked.swarm.ways)


OPERATIONS: Final = (Operation("getOpenapi", "GET", "/openapi.json", "look", "This document.", tell),)
