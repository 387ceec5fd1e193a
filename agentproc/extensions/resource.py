"""A document of the bundle as extensions read it. Pure.

Source: requirements EXT-03, EXT-10, PIPELINE-10, PIPELINE-26.
"""

from __future__ import annotations

from typing import Any, NoReturn


class Resource(dict[str, Any]):
    """A document as it was written, by key or by attribute: `api.extension.spec.config`. Read-only.

    A missing field is None as an attribute, and KeyError as a key. An attribute may be written in snake_case:
    `spec.model_config` is `modelConfig`. An object inside is a Resource as well. The exception is `config`: it belongs
    to the extension and is a plain dict.

    It is a dict, so that `json.dumps` and everything else that wants one takes it. A copy of it is a plain dict.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(camel(name), self.get(name))
        return Resource(value) if isinstance(value, dict) and name != "config" else value

    def _read_only(self, *args: Any, **fields: Any) -> NoReturn:
        raise AttributeError("a resource is read-only")

    __setattr__ = __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _read_only

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[list[tuple[str, Any]]]]:
        return dict, (list(self.items()),)

    def __repr__(self) -> str:
        name = (self.get("metadata") or {}).get("name")
        return f"Resource({self.get('kind')}/{name})" if name else f"Resource({sorted(self)})"


def camel(name: str) -> str:
    """`tool_catalog` as the documents write it: `toolCatalog`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
