"""A tool whose entry is a program: it is started for each call, reads one JSON text, and writes one.

    {"export": "count", "input": {…}, "ctx": {"agentName": …, …}}          one line on its standard input
    {"output": …} or {"error": {"message": …, "code"?: …, …}}              on its standard output

What it writes to standard error is logged. A status other than 0 is an error of the call. A program says nothing else:
no progress, no questions to agents, no pending work.

Source: docs/design/tools.md section 13; schemas/WORKER.md section 11.
"""

from __future__ import annotations

import errno
import json
import posix

from .api import ToolError
from .processes import Process, Stream, signal_name
from .running import MAX_LINE

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .api import ToolContext

#: The most of what a program printed that is shown in an error (characters).
SHOWN = 200
#: Where `#!` ends at the latest, as Linux reads it (bytes).
FIRST_BYTES = 256
_ELF, _MACHINE_AT = b"\x7fELF", 18
_NO_LOADER = "Its loader is not in its jail: link the program statically, or against what the system has in /usr."


class NoProgram(Exception):
    """A file that cannot be run here."""


class Executable(dict[str, "Callable[[ToolContext, Any], Any]"]):
    """The handlers of a program. It has one for every export: which there are is in the tool's document."""

    def __init__(self, entry: str) -> None:
        """`entry` is the program's absolute path. Raises NoProgram, OSError."""
        super().__init__()
        check(entry)
        self._entry = entry

    def __missing__(self, export: str) -> Callable[[ToolContext, Any], Any]:
        return lambda ctx, given: run(self._entry, export, ctx, given)


def check(entry: str) -> None:
    """Look at the file as Linux will when it starts it. Raises NoProgram, OSError."""
    name = entry.rpartition("/")[2]
    if not posix.access(entry, posix.X_OK):
        raise NoProgram(f"{name} is not executable: chmod +x {name}")
    first = _first_bytes(entry)
    line = first[2:].partition(b"\n")[0].replace(b"\t", b" ") if first.startswith(b"#!") else b""
    interpreter = line.strip(b" ").partition(b" ")[0]
    if interpreter:
        if not posix.access(interpreter, posix.X_OK):
            named = interpreter.decode("utf-8", "replace").replace("\r", "\\r")
            raise NoProgram(f"the first line of {name} names {named}, and its jail has no such program")
    elif not first.startswith(_ELF):
        raise NoProgram(
            f"{name} is no program: it has neither #! and an interpreter in its first line nor machine code"
        )
    elif _machine(first) != _machine(_first_bytes("/proc/self/exe")):
        raise NoProgram(f"{name} is a program for another kind of machine, and this one is {posix.uname().machine}")


def _first_bytes(path: str) -> bytes:
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, FIRST_BYTES)
    finally:
        posix.close(fd)


def _machine(first: bytes) -> bytes:
    """For which machines a program of ELF is: 32 or 64 bits, the order of bytes, and its number."""
    return first[4:6] + first[_MACHINE_AT : _MACHINE_AT + 2]


def run(entry: str, export: str, ctx: ToolContext, input: Any) -> Any:
    """Run the program for one call. Returns its output. Raises ToolError, OSError, Cancelled."""
    path, name = entry.encode("utf-8", "surrogateescape"), entry.rpartition("/")[2]
    printed, log = _Printed(ctx.output_limit), _Log(ctx)
    process = Process(
        ctx, [printed, log], given=request(export, ctx, input), keep=bool(ctx._call.frame.get("background"))
    )
    try:
        status = process.run(path, [path], dict(posix.environ))
    except OSError as error:
        hint = _NO_LOADER if error.errno == errno.ENOENT else None
        code = errno.errorcode.get(error.errno or 0)
        raise ToolError(f"{name} cannot be started: {error.strerror}", code=code, suggestion=hint) from None
    log.take(b"")
    return result(bytes(printed.data), posix.waitstatus_to_exitcode(status), name, log.last)


def request(export: str, ctx: ToolContext, input: Any) -> bytes:
    """What the program reads: JSON on one line."""
    call = ctx._call
    known = {
        "agentName": ctx.agent_name,
        "instanceKey": ctx.instance_key,
        "turnId": ctx.turn_id,
        "toolCallId": ctx.tool_call_id,
        "workdir": ctx.workdir,
        "message": call.worker.message_of(call),
        "remainingMs": ctx.remaining_ms,
        "outputLimit": ctx.output_limit,
    }
    asked = {"export": export, "input": input, "ctx": known}
    return json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class _Printed(Stream):
    """What the program writes to standard output, up to a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.data = bytearray()
        self._limit = limit

    def take(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > self._limit:
            text = f"the program wrote more than {self._limit} bytes to standard output (outputMb)"
            raise ToolError(text, code="E_TOOL_LIMIT")


class _Log(Stream):
    """What the program writes to standard error: lines of the log."""

    def __init__(self, ctx: ToolContext) -> None:
        super().__init__()
        #: The last line that says something.
        self.last = ""
        self._logger = ctx.logger
        self._rest = b""

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_LINE):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            text = line[: MAX_LINE + 1].decode("utf-8", "replace")
            self._logger.warning(text)
            self.last = text.strip() or self.last


def result(data: bytes, code: int, name: str, last: str) -> Any:
    """The output of a program that wrote `data` and ended with `code`: its status, or a signal's number below 0. `last`
    is the last line of its log. Raises ToolError.
    """
    fault = None
    try:
        value = _read(data)
    except ValueError as reason:
        fault, value = str(reason), {}
    error = value.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str) and "output" not in value:
        said = {key: error[key] for key in ("code", "suggestion") if isinstance(error.get(key), str)}
        raise ToolError(error["message"], **said, help_url=error.get("helpUrl"))
    if code != 0:
        how = f"ended with status {code}" if code > 0 else f"was ended by {signal_name(-code)}"
        raise ToolError(f"{name} {how}" + (f": {last}" if last else ""))
    if fault is None and "output" in value and "error" not in value:
        return value["output"]
    fault = fault or 'it is neither {"output": …} nor {"error": {"message": …}}'
    first = data.strip().partition(b"\n")[0].decode("utf-8", "replace")
    begins = f". It begins: {first[:SHOWN]}{'…' if len(first) > SHOWN else ''}" if first else ""
    raise ToolError(f"{name} wrote no result to standard output: {fault}{begins}", code="E_TOOL_BAD_OUTPUT")


def _read(data: bytes) -> dict[str, Any]:
    """The JSON object that a program wrote. Raises ValueError."""
    if not data.strip():
        raise ValueError("there is nothing")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return made
