"""Objects that extensions keep in memory: `api.ext_state()` and `api.instance.shared`. Both are empty in a new process.

Source: requirements STATE-01 to STATE-06.
"""

from __future__ import annotations

from typing import Any


class ExtState(dict[str, Any]):
    """One extension's own object. A key may be written as an attribute: `state.count` is `state["count"]`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name, None)


class InstanceApi:
    """`api.instance`. `shared` is one object for all extensions of the agent instance. Begin your keys with the name of
    your extension (`guard:data`), and check that another extension's key is there before you use it.
    """

    __slots__ = ("_shared",)

    def __init__(self, shared: dict[str, Any]) -> None:
        self._shared = shared

    @property
    def shared(self) -> dict[str, Any]:
        """The object."""
        return self._shared
