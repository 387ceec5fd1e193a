"""Which servers are asked by the handshake first, because they end when they are asked otherwise. Pure.

A server of the handshake era need not know `server/discover`, and some end instead of answering with an error. So a
server that ended before it had said what it offers begins with the handshake at its next start, which is that of
whoever attaches next. When that start fails too, the end had another reason, and the next one begins as usual.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.launch import ToolSpec

#: Servers that are remembered.
MAX_KNOWN: Final = 1024


class Eras:
    """What one tool host has learned of its servers."""

    def __init__(self) -> None:
        self._handshake_first: dict[tuple[str, str], None] = {}

    def ended_early(self, tool: ToolSpec) -> None:
        """This server has ended before it had said what it offers."""
        name = _name(tool)
        if name in self._handshake_first:
            del self._handshake_first[name]
            return
        self._handshake_first[name] = None
        if len(self._handshake_first) > MAX_KNOWN:
            del self._handshake_first[next(iter(self._handshake_first))]

    def handshake_first(self, tool: ToolSpec) -> bool:
        """Whether the next start of this server begins with the handshake."""
        return _name(tool) in self._handshake_first


def _name(tool: ToolSpec) -> tuple[str, str]:
    """A server by its prefix, and by what it is: another command is another server."""
    return tool.name, "" if tool.server is None else tool.server.digest
