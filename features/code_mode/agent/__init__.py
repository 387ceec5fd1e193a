"""Scripts of code mode: their calls are made like the model's own.

A script asks for a call (`tool.ask`). The call is one more call of the step: it passes the step's catalog, middleware,
validation, approval and budget, and stands in the trace below the script. Its result is the answer, and goes nowhere
else. It is no message of the conversation. The tool host may have given the output to the script already; it is noted
here before what the script asks next, because both come the same way. After a lost connection it may come later.

What the calls of a running script have come to stands in a file, for the process that finds the script without its
agent. The file is mapped into memory. So a note costs no system call, and it outlives the end of the process. It does
not outlive a loss of power: a script that makes a thousand calls cannot wait for the disk before each. After a loss of
power the trace has what was stored before (agentproc/turn/notes.py).

Source: docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

import logging
import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw

from goondan.agentproc.calls.asks import Asked
from goondan.agentproc.machine.catalog import StepCatalog, best
from goondan.agentproc.machine.messages import ToolCallPart
from goondan.agentproc.machine.turn import RunTool
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, Call, Done, Start, TurnCore, TurnPart
from goondan.features.code_mode import wire
from goondan.features.code_mode.agent.scripts import MAX_SHOWN_ARGS, Record, Scripts, inner_id, told
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, is_bundled
from goondan.schemas.wire.errors import cut_message, for_model
from goondan.schemas.wire.frames import OPERATOR_AGENT, ErrorPayload, Frame, ToolError, ToolResult

#: Tools that one answer describes at most.
MAX_FOUND: Final = 50
_NOTHING: Final = Raw(b"\xc0")


class ScriptCalls(TurnPart):
    """The scripts of one turn."""

    def __init__(self, turn: TurnCore, log: ScriptLog) -> None:
        self._turn = turn
        self._log = log
        self._scripts = Scripts()
        self._actions: dict[str, RunTool] = {}
        self._names: tuple[StepCatalog, dict[str, str]] | None = None
        self.asks = {wire.TOOL: self._make_call, wire.TOOLS: self._find}

    def call(self, call: Call, done: Done, start: Start) -> None:
        """A call is about to be made. A script is registered, so that it may make calls from now on.

        What a script of an earlier incarnation has heard from its calls was in the process that is gone, so it cannot
        go on: its outcome is unknown.
        """
        action = call.action
        unread = action.broken is not None and call.args == action.part.args
        if call.tool != wire.CODE_TOOL or unread or not has_code_mode(self._turn.spec):
            start(call, done)
        elif action.again:
            done(self._lost(call.id))
        else:
            self._scripts.begin(call.id)
            self._actions[call.id] = action
            start(call, partial(self._script_ended, call.id, done))

    def _lost(self, script: str) -> ToolResult:
        call_id = f"{self._turn.turn_id}/{script}"
        records = self._log.read(call_id)
        open_ = {one.number for one in records} - {one.number for one in records if one.outcome != "began"}
        self._turn.calls.cancel_unseen([call_id, *(inner_id(call_id, number) for number in sorted(open_))])
        self._log.clear()
        message = "The script was running when the agent's process ended; what came of it is not known."
        error = ToolError(message=_with(message, told(records)), name="AgentLost", code="E_TOOL_OUTCOME_UNKNOWN")
        return ToolResult(status="error", error=error)

    def _script_ended(self, script: str, done: Done, result: ToolResult) -> None:
        if self._scripts.is_running(script):
            if result.error is not None:
                records = self._log.read(f"{self._turn.turn_id}/{script}")
                result.error.message = _with(result.error.message, told(records))
            self._give_up(script)
        done(result)

    def drop(self, tool_call_id: str) -> None:
        """A call is given up. If it is a script, its open calls are given up with it."""
        if self._scripts.is_running(tool_call_id):
            self._give_up(tool_call_id)

    def _give_up(self, script: str) -> None:
        """The script is over, in whatever way: give up its open calls."""
        left = self._scripts.over(script)
        action = self._actions.pop(script)
        self._turn.calls.drop_calls([inner_id(script, number) for number in left])
        ended = ToolResult(status="error", error=_ENDED)
        for number in left:
            part = ToolCallPart(inner_id(script, number), action.part.tool_name, {})
            self._note_end(script, part, ended)
        if not self._actions:
            self._log.clear()

    # --- questions

    def _make_call(self, asked: Asked) -> None:
        """One call. Raises GoondanError."""
        call: wire.InnerCall = asked.read(wire.InnerCall)
        script, name = self._script_of(asked), self._name(call.name)
        number = self._scripts.call(script, name)
        outer = self._actions[script]
        part = ToolCallPart(inner_id(script, number), name, {} if call.args is None else call.args)
        noted = self._turn.notes.inner_began(script, part, self._turn.instance.clock(), self._turn.calls.catalog)
        self._turn.noted()
        self._log.add(asked.call_id, Record(number, "began", name, cut_message(noted, MAX_SHOWN_ARGS)))
        action = RunTool(part, outer.message, within=script, question=asked.frame_id)
        self._turn.calls.make_call(action, partial(self._ended, asked, script, number, part))

    def _ended(self, asked: Asked, script: str, number: int, part: ToolCallPart, result: ToolResult) -> None:
        if not self._scripts.ended(script, number):
            return
        self._log.add(asked.call_id, Record(number, result.status))
        self._note_end(script, part, result)
        if result.error is not None:
            asked.refuse(_payload(result.error))
        elif asked.open:  # else the tool host has answered it with this
            asked.answer(_encoded(result))

    def _find(self, asked: Asked) -> None:
        """A look into the catalog. Raises GoondanError."""
        query: wire.ToolsQuery = asked.read(wire.ToolsQuery)
        self._scripts.search(self._script_of(asked))
        items = [item for item in self._turn.calls.catalog.items if item.name != wire.CODE_TOOL]
        limit = max(0, min(query.limit, MAX_FOUND))
        if query.query is not None:
            found = best(items, query.query, limit)
        else:
            wanted = {self._name(name) for name in query.names[:MAX_FOUND]}
            found = [item for item in items if item.name in wanted]
        told_ = [wire.FoundTool(item.name, item.description, item.parameters) for item in found]
        asked.answer(Raw(msgspec.msgpack.encode(wire.FoundTools(told_, len(items)))))

    # --- inside

    def _note_end(self, script: str, part: ToolCallPart, result: ToolResult) -> None:
        self._turn.notes.inner_ended(script, part, result, self._turn.instance.clock())
        self._turn.noted()

    def _script_of(self, asked: Asked) -> str:
        return asked.call_id.removeprefix(f"{self._turn.turn_id}/")

    def _name(self, name: str) -> str:
        """The tool that a script means: by its full name, or by the name with `_` for what no identifier has."""
        catalog = self._turn.calls.catalog
        if name in catalog:
            return name
        if self._names is None or self._names[0] is not catalog:
            self._names = (catalog, identifiers(catalog.items))
        return self._names[1].get(name, name)


def has_code_mode(spec: AgentSpec) -> bool:
    """Whether scripts of this agent may call its tools."""
    return spec.name == OPERATOR_AGENT or any(
        is_bundled(wire.EXTENSION, extension.entry, extension.bundled) for extension in spec.extensions
    )


def identifiers(items: list[CatalogItem]) -> dict[str, str]:
    """The names of tools that are no identifiers, each under the identifier that scripts write. One that two tools
    could have is left out.
    """
    found: dict[str, str | None] = {}
    for item in items:
        if not item.name.isidentifier():
            written = "".join(letter if letter.isalnum() else "_" for letter in item.name)
            found[written] = None if written in found else item.name
    return {written: name for written, name in found.items() if name is not None}


_ENDED: Final = ToolError(message="the script ended before its call", name="CallEnded", code="E_CALL_ENDED")


def _encoded(result: ToolResult) -> Raw:
    status: Any = result.status
    output = _NOTHING if result.output is None and status == "ok" else result.output
    return Raw(msgspec.msgpack.encode(wire.InnerResult(status, output, result.handle)))


def _payload(error: ToolError) -> ErrorPayload:
    error = for_model(error)  # the model's script prints what it likes
    return ErrorPayload(
        error.code or "E_TOOL",
        error.message,
        suggestion=error.suggestion,
        help_url=error.help_url,
        name="ToolCallError",
    )


def _with(message: str, more: str) -> str:
    return f"{message} {more}" if more else message


class CodeMode(AgentFeature):
    """Code mode in the process of an agent instance."""

    name = "code_mode"

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self._log = ScriptLog(instance.place.instance_dir)

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        """Whether scripts of this agent may call its tools."""
        return has_code_mode(spec)

    def begin(self, turn: TurnCore) -> TurnPart:
        """Make the calls of the scripts of a turn."""
        return ScriptCalls(turn, self._log)

    def close(self) -> None:
        """The process ends."""
        self._log.close()


FEATURE: Final = CodeMode


# --- what the calls of a running script have come to, in a file -------------------------------------------------------


#: The file, beside the conversation. Behind its last line are zeros.
FILE: Final = "script-calls.jsonl"
#: How much is reserved on the disk at a time (bytes): what is mapped and cannot be written would end the process.
STEP: Final = 256 << 10
#: More is not written or read (bytes): scripts of MAX_INNER_CALLS calls with long names and arguments.
MAX_SIZE: Final = 16 << 20

log = logging.getLogger("agentproc")

_Line = tuple[str, Record]
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


class ScriptLog:
    """The file of one agent instance. It is made at the first call of a script, and empty when no script runs."""

    def __init__(self, folder: str | Path) -> None:
        self._path = os.path.join(folder, FILE)
        self._map: mmap.mmap | None = None
        self._at = 0
        self._broken = False

    def add(self, call_id: str, record: Record) -> None:
        """Write down what has become of a call of the script with this callId. Nothing is raised: a call does not fail
        for want of a note.
        """
        line = _encode((call_id, record)) + b"\n"
        try:
            room = self._room(len(line))
        except (OSError, ValueError) as error:
            if not self._broken:
                log.warning("the calls of a script cannot be written down: %s", error)
            self._broken = True
            return
        room[self._at : self._at + len(line)] = line
        self._at += len(line)

    def _room(self, size: int) -> mmap.mmap:
        """The mapping, with room for so many bytes more. Raises OSError, and ValueError for a file that is full."""
        mapped = self._map
        if mapped is not None and self._at + size <= len(mapped):
            return mapped
        reserved = (self._at + size + STEP - 1) // STEP * STEP
        if reserved > MAX_SIZE:
            raise ValueError(f"they would take more than {MAX_SIZE} bytes")
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if mapped is None:
                self._at = len(_written(self._path))
                reserved = max(reserved, (self._at + size + STEP - 1) // STEP * STEP)
            os.posix_fallocate(fd, 0, reserved)
            made = mmap.mmap(fd, reserved)
        finally:
            os.close(fd)
        if mapped is not None:
            mapped.close()
        self._map = made
        return made

    def read(self, call_id: str) -> list[Record]:
        """What was written down about the calls of this script, in order. A line that was cut off is left out."""
        found = []
        for line in _written(self._path).splitlines():
            try:
                name, record = _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if name == call_id:
                found.append(record)
        return found

    def clear(self) -> None:
        """No script runs any more."""
        try:
            if self._map is not None:
                self._map[: self._at] = bytes(self._at)
            elif os.path.exists(self._path):
                os.truncate(self._path, 0)
        except OSError as error:
            log.warning("the calls of a script cannot be forgotten: %s", error)
        self._at = 0

    def close(self) -> None:
        """Close the file."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _written(path: str) -> bytes:
    """The lines of a file; b"" when there is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SIZE)
    except OSError:
        return b""
    return data.partition(b"\0")[0]
