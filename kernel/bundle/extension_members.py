"""Finds members of `api` in an extension's source that do not exist. Pure: the module is not run.

It finds only what the text shows: attributes of the first parameter of `register`, in this function and in the
functions inside it, until the name gets another meaning.

Source: docs/extensions.md; requirement EXT-09.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from msgspec import Struct

from goondan.kernel.bundle.problems import did_you_mean
from goondan.schemas.bundle.extension_api import API_MEMBERS

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unknown(Struct, frozen=True):
    """A use of a member that does not exist."""

    #: The member as it is written: `api.events.listen`.
    name: str
    #: The line, from 1.
    line: int
    #: A member with a similar name.
    suggestion: str | None = None


def unknown_members(tree: ast.Module) -> list[Unknown]:
    """The unknown members in the order of the text, each name once."""
    found: dict[str, Unknown] = {}
    for node in tree.body:
        if isinstance(node, _Function) and node.name == "register":
            parameters = [*node.args.posonlyargs, *node.args.args]
            if parameters:
                for unknown in sorted(_in_function(node, parameters[0].arg), key=lambda unknown: unknown.line):
                    found.setdefault(unknown.name, unknown)
    return sorted(found.values(), key=lambda unknown: unknown.line)


def _in_function(function: _Function, api: str) -> Iterator[Unknown]:
    if api in _assigned(function.body):
        return  # it may be anything
    for node in _walk(function.body, api):
        if isinstance(node, ast.Attribute):
            unknown = _look(node, api)
            if unknown is not None:
                yield unknown


def _walk(body: list[ast.stmt], api: str) -> Iterator[ast.AST]:
    """Every node where the name still means the parameter."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.Lambda):
            inner = node.body if isinstance(node.body, list) else []
            if api in _parameters(node.args) or api in _assigned(inner):
                continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _parameters(given: ast.arguments) -> set[str]:
    named = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {argument.arg for argument in named if argument is not None}


def _assigned(body: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _look(node: ast.Attribute, api: str) -> Unknown | None:
    if isinstance(node.value, ast.Name) and node.value.id == api:
        if node.attr not in API_MEMBERS and not node.attr.startswith("__"):
            return Unknown(f"{api}.{node.attr}", node.lineno, did_you_mean(_snake(node.attr), API_MEMBERS))
        return None
    inner = node.value
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == api:
        members = API_MEMBERS.get(inner.attr)
        if members is not None and node.attr not in members and not node.attr.startswith("__"):
            return Unknown(f"{api}.{inner.attr}.{node.attr}", node.lineno, did_you_mean(_snake(node.attr), members))
    return None


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
