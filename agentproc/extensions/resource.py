"""A document of the bundle as extensions read it. Pure.

Source: requirements EXT-03, EXT-10, PIPELINE-10, PIPELINE-26.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Resource(Mapping[str, Any]):
    """A document as it was written, by key or by attribute: `api.extension.spec.config`. Read-only.

    A missing field is None as an attribute, and KeyError as a key. An attribute may be written in snake_case:
    `spec.model_config` is `modelConfig`. An object inside is a Resource as well. The exception is `config`: it belongs
    to the extension and is a plain dict.
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
        value = self._fields.get(camel(name), self._fields.get(name))
        return Resource(value) if isinstance(value, dict) and name != "config" else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a resource is read-only")

    def __repr__(self) -> str:
        name = (self._fields.get("metadata") or {}).get("name")
        return f"Resource({self._fields.get('kind')}/{name})" if name else f"Resource({sorted(self._fields)})"


def camel(name: str) -> str:
    """`tool_catalog` as the documents write it: `toolCatalog`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
