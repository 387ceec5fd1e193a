"""`gdn call`: tool calls by hand, through a real agent process, a real broker and a real jail.

When no kernel runs, one is started for as long as calls need it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from goondan.kernel.cli import commands, state
from goondan.kernel.cli.output import emit, is_terminal, pretty_lines, print_error, wants_json, write, write_json
from goondan.kernel.cli.rules.batch import (
    MAX_LINE_BYTES,
    BadLine,
    ToolCall,
    check_instance,
    is_pair,
    parse_arguments,
    parse_line,
    parse_pairs,
)
from goondan.kernel.start import import_whole
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    import click

    from goondan.kernel.cli.attach import Kernel
    from goondan.kernel.cli.console.lines import Line
    from goondan.kernel.cli.one_message import Attempt, Message
    from goondan.kernel.cli.session import Listener, Session
    from goondan.schemas.wire.frames import Answer

#: The most lines of a batch that have no result yet. So many keep every core busy, and a file of any length still takes
#: constant memory.
MAX_IN_FLIGHT: Final = 256
#: The module that asks without an event loop.
ONE_MESSAGE: Final = "goondan.kernel.cli.one_message"
_WORDS: Final = "Write gdn call TOOL KEY=VALUE, or a JSON object in single quotes: gdn call TOOL '{…}'."


def call(
    tool: str | None,
    words: tuple[str, ...],
    bundle: str | None,
    policy: str | None,
    trust: bool,
    batch: str | None,
    workdir: str | None,
    instance: str,
    allow_net: tuple[str, ...],
) -> int:
    """Call one tool, or a batch of tools, in the sandbox."""
    from goondan.kernel.cli.attach import attach_or_start

    if (tool is None) == (batch is None):
        raise fail("E_USAGE", "name a tool, or give --batch FILE")
    check_instance(instance)
    for grant in allow_net:
        check_grant(grant)
    place = state.locate(bundle, policy, trust=trust)
    if workdir is not None:
        workdir = state.absolute_workdir(workdir, place)
    call = None
    if tool is not None:
        if words and is_pair(words[0]):
            args = parse_pairs(words, _declared(tool, bundle))
        elif len(words) > 1 or "".join(words)[:1].isalpha():
            message = f"expected KEY=VALUE words or one JSON object, got {words[0][:80]!r}"
            raise fail("E_USAGE", message, suggestion=_WORDS)
        else:
            args = parse_arguments(_standard_input() if words == ("-",) else (*words, "{}")[0])
        call = ToolCall(tool=tool, args=args, instance=instance, workdir=workdir)
    fd = -1 if batch is None else open_batch(batch)
    if call is None:
        return _many(attach_or_start(place, allow_net), fd, instance, workdir)
    if is_terminal(sys.stderr) and not wants_json():  # its progress is shown
        return _one(attach_or_start(place, allow_net), call, at_once=False)
    return _one(attach_or_start(place, allow_net, partial(import_whole, ONE_MESSAGE)), call, at_once=True)


def _declared(tool: str, bundle: str | None) -> dict[str, Any]:
    """The properties of a tool's arguments; none for a tool that is not the bundle's, but an extension's."""
    from goondan.kernel.cli.commands.bundles import look

    exports = ((found, export) for found in look(bundle).checked.tools.values() for export in found.body.exports)
    schema = next((export.parameters for found, export in exports if tool == f"{found.name}__{export.name}"), None)
    properties = (schema or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _standard_input() -> bytes:
    from goondan.kernel.cli.console.lines import read_all

    return read_all(MAX_LINE_BYTES)


def check_grant(text: str) -> None:
    """`HOST:PORT`, or `*.DOMAIN:PORT`. Raises GoondanError E_USAGE."""
    from goondan.schemas.worker.hosts import BadHost, parse_rule

    try:
        parse_rule(text)
    except BadHost as error:
        raise fail("E_USAGE", f"--allow-net {text[:100]!r}: expected HOST:PORT: {error}") from None


def open_batch(name: str) -> int:
    """The descriptor to read lines from. Raises GoondanError E_USAGE."""
    if name == "-":
        return 0
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise fail("E_USAGE", f"{name[:200]}: {getattr(error, 'strerror', None) or error}") from None


# --- one call


def _one(kernel: Kernel, call: ToolCall, *, at_once: bool) -> int:
    """Make one call. `at_once`: first without an event loop."""
    from goondan.kernel.cli.one_message import Attempt, ask

    event_id, answer = f"{os.urandom(8).hex()}-1", None
    with kernel, Attempt() as attempt:
        if at_once:
            answer = ask(kernel.place.state_dir, kernel.pidfd, _message(call, event_id), event_id, attempt)
        came = tool_result(answer) if answer is not None else _over_session(kernel, call, event_id, attempt)
    if isinstance(came, _Cancelled):
        print_error(came.error, as_json=True) if wants_json() else write("cancelled", stream=sys.stderr)
        return came.status
    if is_terminal(sys.stdout):
        emit(came, pretty_lines(came))
    else:
        write_json(came)
    return 1 if came.get("status") == "error" else 0


class _Cancelled(NamedTuple):
    """A signal has cancelled the call."""

    #: The error that came of it.
    error: GoondanError
    #: The exit status for the signal.
    status: int


def _over_session(kernel: Kernel, call: ToolCall, event_id: str, attempt: Attempt) -> dict[str, Any] | _Cancelled:
    commands.import_session()
    from goondan.kernel.cli.session import over_session

    accepted = (event_id,) if attempt.accepted else ()
    return over_session(kernel, lambda session: _ask_one(session, call, event_id, attempt), accepted=accepted)


async def _ask_one(session: Session, call: ToolCall, event_id: str, attempt: Attempt) -> dict[str, Any] | _Cancelled:
    """Make the call, and show its progress on a terminal. `attempt` may have noted one before. Raises GoondanError,
    SystemExit after a second signal.
    """
    import asyncio

    from goondan.kernel.cli.session import Cancelling, Interrupts, was_cancelled

    screen = None
    if is_terminal(sys.stderr) and not wants_json():
        from goondan.kernel.cli.console.screen import Screen, shows_status

        screen = Screen(text=False) if shows_status() else None
    cancelling = Cancelling(session.cancel, lambda: [event_id])
    with Interrupts(cancelling.came, signal.SIGINT, signal.SIGTERM) as interrupts:
        try:
            asking = perform(session, call, event_id, None if screen is None else screen.handle)
            waiting = asyncio.ensure_future(asking)
            if attempt.number is not None:
                asyncio.get_running_loop().call_soon(interrupts.came, attempt.number)
            found = await cancelling.wait(waiting)
        except GoondanError as error:
            if not (interrupts.number and was_cancelled(error.info)):
                raise
            return _Cancelled(error, interrupts.status)
        finally:
            if screen is not None:
                screen.close()
    if found is None:
        raise SystemExit(interrupts.status)
    return found


async def perform(
    session: Session, call: ToolCall, event_id: str | None = None, listener: Listener | None = None
) -> dict[str, Any]:
    """Make one call; the ToolResult as the agent gave it. Raises GoondanError when there is none.

    `event_id` names the call to whoever may cancel it; `listener` hears of its progress.
    """
    return tool_result(await session.ask(_message(call, event_id), listener=listener))


def _message(call: ToolCall, event_id: str | None) -> Message:
    from goondan.kernel.cli.one_message import Message
    from goondan.schemas.wire.frames import OPERATOR_AGENT, OPERATOR_CALL, OperatorCall

    asked = OperatorCall(call.tool, call.args)
    return Message(OPERATOR_AGENT, call.instance, asked, OPERATOR_CALL, event_id, call.workdir)


def tool_result(answer: Answer) -> dict[str, Any]:
    """The ToolResult in an answer. Raises GoondanError when the turn failed without one."""
    import msgspec

    if answer.output is not None:
        result = msgspec.msgpack.decode(answer.output)
        if isinstance(result, dict) and "status" in result:
            return result
        raise fail("E_INTERNAL", "the operator agent answered without a tool result")
    if answer.error is not None:
        raise GoondanError(answer.error)
    raise fail("E_AGENT_FAILED", "the operator agent answered without a tool result")


# --- many calls


def _many(kernel: Kernel, fd: int, instance: str, workdir: str | None) -> int:
    from goondan.kernel.cli.session import over_session

    batch = _Batch(kernel, fd, instance, workdir)
    with kernel:
        over_session(kernel, batch.run)
    if batch.lost is not None:
        raise batch.lost
    return batch.status


class _Batch:
    """A batch. Every line gets a result line, in any order. Each is printed as soon as it is known."""

    def __init__(self, kernel: Kernel, fd: int, instance: str, workdir: str | None) -> None:
        self._kernel = kernel
        self._fd = fd
        self._instance = instance
        self._workdir = workdir
        #: Set when the kernel went away before every line had its result.
        self.lost: GoondanError | None = None
        #: Set when a result could not be printed.
        self._failure: BaseException | None = None
        self._give_up: Callable[[], object] = lambda: None
        #: Events that wait for their answers; and whether a signal has ended the batch, with the status that says so.
        self._open: set[str] = set()
        self._ending = False
        self._reading = True
        self.status = 0

    async def run(self, session: Session) -> None:
        import asyncio

        from goondan.kernel.cli.console.lines import LineReader
        from goondan.kernel.cli.session import Cancelling, Interrupts

        reader = asyncio.ensure_future(self._read(session, LineReader(self._fd, MAX_LINE_BYTES)))
        self._give_up = reader.cancel
        both = asyncio.ensure_future(asyncio.wait({reader, session.lost}, return_when=asyncio.FIRST_COMPLETED))
        cancelling = Cancelling(session.cancel, lambda: list(self._open), on_first=self._end)
        with Interrupts(cancelling.came, signal.SIGINT, signal.SIGTERM) as interrupts:
            await cancelling.wait(both)
        self.status = interrupts.status
        if cancelling.left:
            raise SystemExit(self.status)
        if not reader.done():
            # Each call that is under way gets its error line in the usual way. No more lines are read.
            self.lost = self.lost or session.lost_error()
            reader.cancel()
            await asyncio.wait({reader})
        if self._failure is not None:
            raise self._failure
        if not reader.cancelled():
            reader.result()

    def _end(self) -> None:
        """Read no more lines. The lines that were read get the results of cancelled calls."""
        self._ending = True
        if self._reading:  # else it waits for results, which are on their way
            self._give_up()

    async def _read(self, session: Session, lines: Any) -> None:
        import asyncio

        from goondan.kernel.cli.console.lines import Room

        room = Room(MAX_IN_FLIGHT)
        tasks: dict[asyncio.Task[None], int] = {}

        def done(task: asyncio.Task[None]) -> None:
            room.give(tasks.pop(task))
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = self._failure or error
                self._give_up()

        try:
            async for line in lines:
                taken = await room.take(line)
                task = asyncio.ensure_future(self._line(session, line))
                tasks[task] = taken
                task.add_done_callback(done)
        finally:
            self._reading = False
            if self._failure is not None:
                for task in tasks:
                    task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        if lines.error is not None:
            raise lines.error

    async def _line(self, session: Session, line: Line) -> None:
        from goondan.kernel.cli.session import GONE

        known: Any = None
        try:
            parsed = parse_line(line.data, line.size, self._instance)
            if parsed is None:
                return
            known, call = parsed
            if self._ending:
                raise fail("E_CANCELLED", "the batch was ended before this call began")
            event_id = session.new_id()
            self._open.add(event_id)
            try:
                result = await perform(session, self._placed(call), event_id)
            finally:
                self._open.discard(event_id)
        except BadLine as bad:
            write_json({"id": bad.id, "line": line.number, "result": error_result(bad.error)})
            return
        except GoondanError as error:
            if error.info.code in GONE:
                self.lost = error
            result = error_result(error)
        write_json({"id": known, "result": result})

    def _placed(self, call: ToolCall) -> ToolCall:
        from msgspec.structs import replace

        if call.workdir is not None:
            return replace(call, workdir=state.absolute_workdir(call.workdir, self._kernel.place))
        return replace(call, workdir=self._workdir)


def error_result(error: GoondanError) -> dict[str, Any]:
    """An error in the form of a ToolResult, which every line gets."""
    return {"status": "error", "error": error.info}


def make_command() -> click.Command:
    """The command as click has it."""
    import click

    from goondan.kernel.cli import options

    @click.command(
        "call",
        help=call.__doc__,
        epilog="ARGS is a JSON object, {} when left out, or from standard input with `-`; or KEY=VALUE words: a value "
        "is text where the tool's schema says so, and else JSON if it can be read as JSON.",
    )
    @click.argument("tool", required=False, shell_complete=options.completed("tools"))
    @click.argument("words", metavar="[ARGS]", nargs=-1)
    @options.bundle
    @options.policy
    @options.trust
    @click.option(
        "--batch",
        metavar="FILE",
        shell_complete=options.completed_path("file"),
        help='Read {"id","tool","args"} lines from FILE, or from stdin for "-".',
    )
    @options.workdir
    @options.instance
    @click.option("--allow-net", metavar="HOST:PORT", multiple=True, help="Let tools reach this address. Repeatable.")
    @options.json
    def command(**given: Any) -> int:
        return call(**given)

    return command


COMMANDS = {"call": make_command}
