"""The exports that can be called, and with what: every export of every tool, narrowed for agents that narrow it. Pure.

An agent that narrows the sandbox of a tool (Agent.spec.sandbox, spec.tools[].sandbox) has entries of its own, and with
them jails of its own: its generation is another one, so even a shared jail is not shared with agents that have more.

Source: docs/design/sandbox.md section 1; requirements HANDLER-06, SCHEMA-07.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Raw

from goondan.schemas.bundle.address import SEPARATOR, build_tool_name
from goondan.schemas.bundle.launch import ExportSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolError
from goondan.toolhost.untrusted import Violation, check_json

if TYPE_CHECKING:
    from goondan.schemas.bundle.arguments import ArgumentChecker


class Entry(NamedTuple):
    """One export of one tool, ready to be called."""

    #: Its tool; `tool.sandbox` is what this caller's jail gets.
    tool: ToolSpec
    #: What the tool declares about it.
    export: ExportSpec
    #: Checks arguments.
    checker: ArgumentChecker
    #: Tells the tool from a tool of the same name in an earlier bundle, or for another agent.
    generation: str


class Exports:
    """The exports of a tool host."""

    def __init__(self, spec: ToolHostSpec, generations: Mapping[str, str]) -> None:
        """`generations` tells each tool from a tool of the same name in an earlier bundle."""
        # Imported now, while the probe's jail starts: the library that compiles schemas takes some 8 ms of each start.
        from goondan.schemas.bundle.arguments import compile_arguments

        self._anything = compile_arguments(None, {})

        self._servers: dict[str, tuple[ToolSpec, str]] = {}
        self._everyone: dict[str, Entry] = {}
        self._narrowed: dict[tuple[str, str], Entry] = {}
        for tool in spec.tools:
            generation = generations[tool.name]
            if tool.server is not None:
                self._servers[tool.name] = tool, generation
            for export in tool.exports:
                name = build_tool_name(tool.name, export.name)
                checker = compile_arguments(export.parameters, export.aliases)
                self._everyone[name] = Entry(tool, export, checker, generation)
                for agent, sandbox in tool.narrowed.items():
                    narrow = msgspec.structs.replace(tool, sandbox=sandbox, cut_from=tool.sandbox.filesystem)
                    entry = Entry(narrow, export, checker, f"{generation}/{agent}")
                    self._narrowed[agent, name] = entry

    def find(self, name: str | None, agent: str | None) -> Entry | None:
        """The export that `agent` calls by the full name of a tool; None when there is none."""
        if self._narrowed and (entry := self._narrowed.get((agent or "", name or ""))) is not None:
            return entry
        return self._everyone.get(name or "") or self._at_a_server(name or "", agent or "")

    def server(self, prefix: str, agent: str) -> tuple[ToolSpec, str] | None:
        """The server with that prefix as `agent` has it, and its generation; None when there is none.

        Agents that have it in the same way share its generation, and so its sessions.
        """
        found = self._servers.get(prefix)
        if found is None:
            return None
        tool, generation = found
        server = tool.servers.get(agent, tool.server)
        if server is None:
            return None
        if agent in tool.narrowed:
            sandbox, whole = tool.narrowed[agent], tool.sandbox.filesystem
            tool = msgspec.structs.replace(tool, sandbox=sandbox, cut_from=whole)
        own = f"{generation}/{agent}" if agent in tool.servers or agent in tool.narrowed else generation
        return msgspec.structs.replace(tool, server=server), server.digest or own

    def _at_a_server(self, name: str, agent: str) -> Entry | None:
        """An export of a server. Which ones it has is its own business: it answers for those that it has not."""
        prefix, separator, export = name.partition(SEPARATOR)
        found = self.server(prefix, agent) if separator and export else None
        if found is None:
            return None
        return Entry(found[0], ExportSpec(name=export), self._anything, found[1])


def arguments(entry: Entry, name: str, raw: Raw) -> Raw | ToolError:
    """The arguments as the handler gets them, or why they are refused (HANDLER-06)."""
    data = bytes(raw)
    try:
        check_json(data)
    except Violation as violation:
        message = str(violation).replace("the output", "args").replace("the worker sent", "there are")
        return tool_error("E_TOOL_INVALID_ARGS", message, name="ToolInputValidationError")
    given = msgspec.msgpack.decode(data)
    args, issues = entry.checker.apply(given, len(data))
    if issues:
        from goondan.schemas.bundle.arguments import invalid_arguments

        return invalid_arguments(name, issues, entry.export.parameters)
    return raw if args is given else Raw(encode_value(args))
