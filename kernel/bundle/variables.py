"""The environment variables that a bundle names, and where (pure). Their values are not looked at.

Source: design section 8 (`${NAME}`, `valueFrom: {env}`); sandbox.md section 1 (`sandbox.env`).
"""

from __future__ import annotations

from collections.abc import Iterable

from kernel.bundle.positions import Mapping, Node, Scalar, Sequence
from kernel.bundle.shape import VARIABLE, Document
from kernel.bundle.tools import VARIABLE_NAME


def wanted_variables(documents: Iterable[Document]) -> dict[str, str]:
    """Name -> the resource that names it first, such as `Model/default`. As the documents say; they may be wrong."""
    found: dict[str, str] = {}
    for document in documents:
        for name in _names(document.node):
            if VARIABLE_NAME.match(name):
                found.setdefault(name, document.resource or "the bundle")
    return found


def _names(node: Node, key: str = "") -> Iterable[str]:
    if isinstance(node, Mapping):
        for entry in node.entries.values():
            source = entry.value
            if key == "valueFrom" and entry.key == "env" and isinstance(source, Scalar):
                yield source.text
            elif key == "sandbox" and entry.key == "env" and isinstance(source, Sequence):
                yield from (item.text for item in source.items if isinstance(item, Scalar))
            else:
                yield from _names(source, entry.key)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from _names(item)
    elif isinstance(node, Scalar):
        yield from (match[1] for match in VARIABLE.finditer(node.text) if not match[0].startswith("$$"))
