"""What a call begins with: the export that it names, its arguments, and the assistant message that it stands in. Pure.

The exports are those of every tool, narrowed for agents that narrow it. An agent that narrows the sandbox of a tool
(Agent.spec.sandbox, spec.tools[].sandbox) has entries of its own, and with them jails of its own: its generation is
another one, so even a shared jail is not shared with agents that have more.

Assistant messages are sent by an agent once, and handed to each jail once. An agent makes the calls of one message at a
time, so of each instance only the last message is kept for later calls of its step. Each call has its own.

Source: docs/design/sandbox.md section 1; requirements HANDLER-06, SCHEMA-07; docs/design/tools.md section 7;
schemas/WORKER.md "message".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Raw

from goondan.schemas.bundle.address import SEPARATOR, build_tool_name
from goondan.schemas.bundle.launch import ExportSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire import codec, errors, frames
from goondan.toolhost.calls import untrusted

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
    #: How long a call may take at most (milliseconds).
    longest_ms: float
    #: Whether the jail of the tool is for several instances, and so sees the workdir of none.
    is_blind: bool


def _entry(tool: ToolSpec, export: ExportSpec, checker: ArgumentChecker, generation: str) -> Entry:
    sandbox, server = tool.sandbox, tool.server
    if server is not None:
        return Entry(tool, export, checker, generation, server.total_s * 1000, server.scope == "instance")
    longest_ms = sandbox.limits.wall_seconds * 1000
    return Entry(tool, export, checker, generation, longest_ms, sandbox.isolation == "shared")


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
                self._everyone[name] = _entry(tool, export, checker, generation)
                for agent, sandbox in tool.narrowed.items():
                    narrow = msgspec.structs.replace(tool, sandbox=sandbox, cut_from=tool.sandbox.filesystem)
                    self._narrowed[agent, name] = _entry(narrow, export, checker, f"{generation}/{agent}")

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
        return _entry(found[0], ExportSpec(name=export), self._anything, found[1])


def arguments(entry: Entry, name: str, raw: Raw) -> Raw | frames.ToolError:
    """The arguments as the handler gets them, or why they are refused (HANDLER-06)."""
    data = bytes(raw)
    try:
        untrusted.check_json(data)
    except untrusted.Violation as violation:
        message = str(violation).replace("the output", "args").replace("the worker sent", "there are")
        return errors.tool_error("E_TOOL_INVALID_ARGS", message, name="ToolInputValidationError")
    given = msgspec.msgpack.decode(data)
    args, issues = entry.checker.apply(given, len(data))
    if issues:
        from goondan.schemas.bundle.arguments import invalid_arguments

        return invalid_arguments(name, issues, entry.export.parameters)
    return raw if args is given else Raw(codec.encode_value(args))


# --- messages ---------------------------------------------------------------------------------------------------------

#: Messages in all (bytes): what some hundred agents use at a time. The largest go first.
CACHE_BYTES: Final = 8 << 20
#: Instances whose message is kept. The oldest go first.
CACHED: Final = 1000
#: Messages that a worker keeps; WORKER.md says the same number.
WORKER_MESSAGES: Final = 8

#: (agent, instanceKey, messageId)
Name = tuple[str, str, str]


class MessageCache:
    """The last message of each instance."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        #: (agent, instanceKey) -> messageId, the message; the oldest first.
        self._kept: dict[tuple[str, str], tuple[str, bytes]] = {}

    def put(self, name: Name, message: bytes) -> None:
        """Keep a message, as the agent encoded it."""
        agent, key, message_id = name
        self._drop((agent, key))
        self._kept[agent, key] = message_id, message
        self._bytes += len(message)
        if len(self._kept) > CACHED:
            self._drop(next(iter(self._kept)))
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._drop(max(self._kept, key=lambda owner: len(self._kept[owner][1])))

    def _drop(self, owner: tuple[str, str]) -> None:
        _, message = self._kept.pop(owner, ("", b""))
        self._bytes -= len(message)

    def get(self, name: Name) -> bytes | None:
        """The message, if it is still here."""
        agent, key, message_id = name
        known, message = self._kept.get((agent, key), ("", None))
        return message if known == message_id else None


class SentMessages:
    """The messages that one worker has, and their names there. It drops the oldest beyond WORKER_MESSAGES."""

    __slots__ = ("_count", "_names")

    def __init__(self) -> None:
        self._names: dict[Name, str] = {}
        self._count = 0

    def name(self, name: Name, message: bytes | None) -> tuple[str | None, bool]:
        """The worker's name for a message, and whether the message must be sent first; None when the message is
        unknown.
        """
        known = self._names.get(name)
        if known is not None:
            return known, False
        if message is None:
            return None, False
        self._count += 1
        made = self._names[name] = f"m{self._count}"
        if len(self._names) > WORKER_MESSAGES:
            del self._names[next(iter(self._names))]
        return made, True
