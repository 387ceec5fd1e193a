"""The environment variables that a bundle names, and where (pure). Their values are not looked at.

Source: docs/design/bundle.md section 3; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from goondan.kernel.bundle.kinds import secret_use
from goondan.kernel.bundle.positions import Mapping, Node, Scalar, Sequence
from goondan.kernel.bundle.shape import VARIABLE, Document, kept_names

#: What the environment can have a value for.
VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


#: The use of a variable that the sandbox of an MCP server names.
GRANTED: Final = "server"
#: Stands in a path behind the list of names of a sandbox.
_NAMED: Final = "*"


def wanted_variables(documents: Iterable[Document]) -> dict[str, str]:
    """Name -> the resource that names it first, such as `Model/default`. As the documents say; they may be wrong."""
    found: dict[str, str] = {}
    for document in documents:
        for name, _ in variables_of(document.node, "", ""):
            found.setdefault(name, document.resource or "the bundle")
    return found


def variables_of(node: Node, kind: str, resource: str) -> Iterator[tuple[str, str]]:
    """Every variable that a document of `kind` names, and the use of its value: `tool NAME` for a Tool's sandbox.env,
    GRANTED for what an MCP server is granted, `key` for the key and the headers of a model, what a kind of a feature
    says of its secrets (kinds.py), else the kind of the document whose text it goes into.
    """
    for name, path in _names(node, ()):
        if not VARIABLE_NAME.match(name):
            continue
        if kind == "Tool" and path[:3] == ("spec", "sandbox", "env"):
            yield name, f"tool {resource.partition('/')[2]}"
        elif kind == "Model" and path[:2] in (("spec", "apiKey"), ("spec", "headers")):
            yield name, "key"
        elif (use := secret_use(kind, path)) is not None:
            yield name, use
        elif path[-1:] == (_NAMED,) and "config" in path:
            yield name, GRANTED
        else:
            yield name, kind


def names_any(node: Node, *path: str) -> bool:
    """Whether a document names a variable below these keys. Items of a list are not told apart."""
    return any(below[: len(path)] == path for _, below in _names(node, ()))


def _names(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names, each with the keys above it."""
    if isinstance(node, Mapping):
        for entry in node.entries.values():
            source, here = entry.value, (*path, entry.key)
            if path[-1:] == ("valueFrom",) and entry.key == "env" and isinstance(source, Scalar):
                yield source.text, here
                yield from _names(source, here)  # a name can itself be put in
            elif path[-1:] == ("sandbox",) and entry.key == "env" and isinstance(source, Sequence):
                yield from ((item.text, (*here, _NAMED)) for item in source.items if isinstance(item, Scalar))
                yield from _names(source, here)
            else:
                yield from _names(source, here)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from _names(item, path)
    elif isinstance(node, Scalar):
        kept = kept_names(path)
        names = (m[1] for m in VARIABLE.finditer(node.text) if not m[0].startswith("$$"))
        yield from ((name, path) for name in names if name not in kept)
