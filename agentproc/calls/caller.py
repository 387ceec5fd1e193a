"""Tool calls of one agent: check, frame, send, result.

Every call ends with exactly one ToolResult, whatever happens. There is one exception: when the lease is lost, the event
and its calls belong to another incarnation.

Source: docs/design/delivery.md section 6; requirements CALL-01 to CALL-07, ERROR-03.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.agentproc.machine.catalog import Allowed, StepCatalog
from goondan.schemas.bundle import arguments, launch
from goondan.schemas.traces.turn_notes import WayDetail
from goondan.schemas.transport.link import boottime_us
from goondan.schemas.wire import blobs, spans
from goondan.schemas.wire.codec import check_depth, check_json, encode_value, from_raw, is_small_json
from goondan.schemas.wire.errors import GoondanError, cut_message, row_of, tool_error
from goondan.schemas.wire.frames import PASSED_ON, Frame, ToolCallPayload, ToolError, ToolResult
from goondan.schemas.worker import servers

#: The time of a tool call when nothing else limits it: the wall clock limit of a jail (seconds).
DEFAULT_CALL_S: Final = 120.0
#: A call ends this much earlier than its turn (seconds). So the model or the operator sees the call's own timeout. A
#: turn with little time left gives half of that time.
TURN_MARGIN_S: Final = 0.5
#: How many cancelled calls are remembered for the next broker. Others end at their own deadlines.
MAX_UNHEARD: Final = 1000
#: How long after a cancel its broker may be found dead, so that nobody has heard it (seconds).
UNHEARD_S: Final = 30.0
#: How often a call that may be repeated is made again. After so many lost tool hosts its outcome is called unknown. The
#: call is seldom the reason for the loss; but if it is, each repeat ends the tool host that everybody uses. All repeats
#: share the call's time.
MAX_REPEATS: Final = 3


class AgentLink(Protocol):
    """What an agent's process uses of its link (goondan.schemas.transport.link.Link)."""

    def start_call(self, frame: Frame, done: Callable[[Frame | None, GoondanError | None], None]) -> None: ...
    def ask(self, frame: Frame, patience_s: float | None = None) -> asyncio.Future[Frame]: ...
    def post(self, frame: Frame) -> asyncio.Future[Frame]: ...
    def send(self, frame: Frame) -> bool: ...
    def forget(self, frame_id: str) -> None: ...


async def until_answered(link: AgentLink, frame: Frame, future: asyncio.Future[Frame]) -> Frame:
    """The answer to a frame that was sent. Of a frame that nobody waits for any more the link is told. Raises
    GoondanError.
    """
    try:
        return await future
    finally:
        if not future.done() or future.cancelled():
            link.forget(frame.id)


class Answered(Struct, frozen=True):
    """The result of a call that its tool host has given."""

    #: The callId under which it was given.
    call_id: str
    #: When the call passed where.
    way: WayDetail
    #: The tool host has given its output to the script that asked for it.
    passed_on: bool


#: Gets a call's result, and how its tool host gave it (None: the tool host gave no result).
Done = Callable[[ToolResult | GoondanError, Answered | None], None]


class CallContext(Struct, frozen=True):
    """The turn that a call belongs to."""

    #: The id of the turn.
    turn_id: str
    #: The event that the turn works on.
    event_id: str | None = None
    #: The epoch under which the event is held.
    epoch: int | None = None
    #: The end of the turn's time, in the loop's time (seconds); None when nothing limits the turn.
    deadline: float | None = None


class OpenCall(Struct, eq=False):
    """A call that was sent and has no result yet."""

    #: The tool.
    item: launch.CatalogItem
    #: The frame that was sent last.
    frame: Frame
    #: The turn that it belongs to.
    context: CallContext
    #: Gets its result.
    done: Done
    #: The end of its time, repeats included (the loop's time).
    until: float
    #: Gets the call's id when a person is asked first.
    waits: Callable[[str], None] | None
    #: Whether the link has it. False while a person is asked, or its server is attached to again.
    sent: bool = False
    #: When it was sent last (CLOCK_BOOTTIME, microseconds).
    sent_us: int = 0
    #: How often it was made again. Each repeat has an id of its own.
    repeats: int = 0
    #: Its own process has ended once already.
    crashed: bool = False
    #: What to do before it is made again, when its MCP server was lost before the server had begun with it.
    prepare: Callable[[], Awaitable[object]] | None = None


class ToolCaller:
    """Makes the tool calls of one agent over its link. `loop` is the running loop; deadlines are in its time.

    `folder_of` gets the name and the arguments of a call. It returns the folder that the call works in, or why there is
    none. None: the call names no folder.
    """

    def __init__(
        self,
        link: AgentLink,
        loop: asyncio.AbstractEventLoop,
        folder_of: Callable[[str, dict[str, Any]], str | ToolError | None] = lambda name, args: None,
    ) -> None:
        self._folder_of = folder_of
        self._link = link
        self._loop = loop
        self._open: dict[str, OpenCall] = {}
        #: Cancelled calls, their events, and when a broker was told; infinite: none was there.
        self._cancelled: deque[tuple[str | None, str | None, float]] = deque(maxlen=MAX_UNHEARD)
        self._preparing: set[asyncio.Task[None]] = set()

    @property
    def open_call_ids(self) -> list[str]:
        """The callIds that wait for a result. `hello` reports them after a reconnect."""
        return list(self._open)

    def may_repeat(self, call_id: str, prepare: Callable[[], Awaitable[object]]) -> None:
        """The MCP server of this call has not begun with it. When the server is lost, the call is made again after
        `prepare`, unless that raises GoondanError.
        """
        call = self._open.get(call_id)
        if call is not None:
            call.prepare = prepare

    def tool_of(self, call_id: str) -> str | None:
        """The full name of the tool of an open call; None when there is no such call."""
        call = self._open.get(call_id)
        return None if call is None else call.frame.tool

    def is_open(self, call_id: str) -> bool:
        """Whether the call of this callId waits for a result."""
        return call_id in self._open

    def start(
        self,
        catalog: StepCatalog,
        name: str,
        args: Any,
        *,
        call_id: str,
        context: CallContext,
        done: Done,
        message_id: str | None = None,
        message: bytes | None = None,
        first_sent_ms: int | None = None,
        parent_span_id: str | None = None,
        waits: Callable[[str], None] | None = None,
        within: str | None = None,
        question: str | None = None,
        step: int | None = None,
        position: int | None = None,
    ) -> ToolResult | None:
        """Check a call and send it. A call that may not be made has its result at once, without a frame. Otherwise this
        returns None, and `done` gets the result later (or the GoondanError E_LEASE_LOST).

        `message` is the encoded assistant message, given with the first call of each message; the other calls name it
        by `message_id`. `first_sent_ms` (CLOCK_BOOTTIME) is given for a call that may have been sent before.
        `step` is the number of the step, `parent_span_id` its span, or that of the script whose callId `within` gives;
        `question` as in RunTool. `waits` gets the id for `go_on` when a person has to approve the call first.
        `position`: how many messages of the turn are stored, which the frame tells the broker.
        """
        allowed = catalog.check(name, args)
        if not isinstance(allowed, Allowed):
            return failed_result(allowed, catalog.error_limit(name))
        item = allowed.item
        folder = self._folder_of(name, allowed.args)
        if isinstance(folder, ToolError):
            return failed_result(folder, item.error_message_limit)
        try:
            payload = _payload(allowed.args, call_id, context.turn_id, message_id, message, folder)
        except GoondanError as error:
            text = f"Invalid arguments for tool '{name}': {error.info.message}"
            return failed_result(tool_error(error.info.code, text, name="FrameError"), item.error_message_limit)
        except (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError) as error:
            issue = f"args: {_describe(error)}"
            return failed_result(arguments.invalid_arguments(name, [issue], item.parameters), item.error_message_limit)
        now = self._loop.time()
        left = call_time_left(context, now, item.call_s)
        if left <= 0:
            text = f"Tool '{name}' was not started: the turn has no time left."
            return failed_result(tool_error("E_TOOL_TIMEOUT", text, name="TimeoutError"), item.error_message_limit)
        frame = Frame(
            "tool.call",
            tool=name,
            call_id=call_id,
            in_reply_to=question,
            event_id=context.event_id,
            epoch=context.epoch,
            deadline_ms=int(left * 1000) or 1,
            first_sent_ms=first_sent_ms,
            span_id=spans.call_span(call_id),
            parent_span_id=parent_span_id,
            payload=Raw(payload),
            within=within,
            step=step,
            position=position,
        )
        self._send(OpenCall(item, frame, context, done, now + left, waits))
        return None

    def go_on(self, call_id: str) -> None:
        """A person has decided about this call: make it again."""
        call = self._open.pop(call_id, None)
        if call is not None and not call.sent:
            now = self._loop.time()
            call.until = now + call_time_left(call.context, now, call.item.call_s)
            self._again(call, call.frame.call_id or "")

    def cancel(self, call_ids: list[str]) -> None:
        """Give calls up and tell the tool host. Their `done` is not called any more."""
        for call_id in call_ids:
            if (call := self._drop(call_id)) is not None:
                self._cancel(call.frame.call_id, call.context.event_id)

    def cancel_unseen(self, call_ids: Sequence[str], event_id: str | None) -> None:
        """Tell the tool host to give up calls of this event that another incarnation has made."""
        for call_id in call_ids:
            self._cancel(call_id, event_id)

    def _cancel(self, call_id: str | None, event_id: str | None) -> None:
        sent = self._link.send(Frame("tool.cancel", call_id=call_id, event_id=event_id))
        self._cancelled.append((call_id, event_id, self._loop.time() if sent else inf))

    def welcomed(self) -> None:
        """A broker is there (again). Calls that were cancelled in between, or just before the last one was lost, may
        still run in the tool host, so cancel them now. For a call that is over this has no effect.
        """
        before, since = list(self._cancelled), self._loop.time() - UNHEARD_S
        self._cancelled.clear()
        for call_id, event_id, told in before:
            if told >= since and call_id not in self._open:  # a script makes its calls again under the same ids
                self._cancel(call_id, event_id)

    def abandon(self) -> None:
        """Forget every open call without telling anybody: another incarnation may wait for the same calls."""
        for call_id in list(self._open):
            self._drop(call_id)

    # --- inside

    def _send(self, call: OpenCall) -> None:
        call_id = call.frame.call_id or ""
        self._open[call_id] = call
        call.sent_us = boottime_us()
        try:
            self._link.start_call(call.frame, lambda frame, error: self._answered(call_id, call, frame, error))
        except GoondanError as error:
            self._loop.call_soon(self._finish, call_id, call, _refused(error, call.item))
            return
        call.sent = True

    def _answered(self, call_id: str, call: OpenCall, frame: Frame | None, error: GoondanError | None) -> None:
        if self._open.get(call_id) is not call:
            return
        answered: Answered | None = None
        if frame is not None:
            way = WayDetail(call.sent_us, boottime_us(), frame.passed_us or [])
            answered = Answered(call_id, way, frame.stage == PASSED_ON)
            result = read_result(frame, call.item)
        elif error is None or error.info.code == "E_LEASE_LOST":
            if error is not None:
                self._finish(call_id, call, error)
            return
        elif row_of(error.info.code).waits and call.waits is not None:
            call.sent = False
            call.waits(call_id)
            return
        else:
            result = _refused(error, call.item)
        if call.prepare is not None and self._loop.time() < call.until and _was_lost(result, call):
            self._preparing.add(task := self._loop.create_task(self._prepare(call_id, call, result, answered)))
            task.add_done_callback(self._preparing.discard)
            return
        if call.item.idempotent and self._loop.time() < call.until and _may_help(result, call):
            call.crashed = call.crashed or _code(result) == "E_TOOL_CRASHED"
            self._repeat(call_id, call)
            return
        del self._open[call_id]
        call.done(result, answered)

    async def _prepare(self, call_id: str, call: OpenCall, result: ToolResult, answered: Answered | None) -> None:
        """Make a call again whose server had not begun with it. When that cannot be prepared, the result counts."""
        prepare, call.prepare, call.sent = call.prepare, None, False
        try:
            if prepare is not None:
                await prepare()
        except GoondanError:
            self._finish(call_id, call, result, answered)
            return
        if self._open.get(call_id) is call:
            self._repeat(call_id, call)

    def _repeat(self, call_id: str, call: OpenCall) -> None:
        """Make the call again. Its process or tool host was lost, and the export says that the call may run twice."""
        del self._open[call_id]
        first_id = call_id if call.repeats == 0 else call_id.rpartition("~")[0]
        call.repeats += 1
        self._again(call, _nth(first_id, call.repeats))

    def _again(self, call: OpenCall, call_id: str) -> None:
        """Send a call in a new frame."""
        left_ms = max(1, int((call.until - self._loop.time()) * 1000))
        call.frame = replace(call.frame, id="", call_id=call_id, deadline_ms=left_ms, first_sent_ms=None, position=None)
        self._send(call)

    def _finish(
        self, call_id: str, call: OpenCall, result: ToolResult | GoondanError, answered: Answered | None = None
    ) -> None:
        if self._open.get(call_id) is call:
            del self._open[call_id]
            call.done(result, answered)

    def _drop(self, call_id: str) -> OpenCall | None:
        under = (_nth(call_id, repeats) for repeats in range(MAX_REPEATS + 1))
        call = next((found for name in under if (found := self._open.pop(name, None)) is not None), None)
        if call is not None and call.sent:
            self._link.forget(call.frame.id)
        return call


def call_time_left(context: CallContext, now: float, most_s: float | None = None) -> float:
    """How long a call that begins at `now` may take (seconds). `most_s` is the tool's own limit, None the usual one."""
    most_s = DEFAULT_CALL_S if most_s is None else most_s
    if context.deadline is None:
        return most_s
    left = context.deadline - now
    return min(most_s, max(left - TURN_MARGIN_S, left / 2))


def read_result(frame: Frame, item: launch.CatalogItem) -> ToolResult:
    """The ToolResult of a `tool.result` frame, with its error message within the tool's limit. Any other payload is an
    error.
    """
    try:
        result = from_raw(frame.payload, ToolResult)
        if result.output is not None and not is_small_json(bytes(result.output)):
            check_json(from_raw(result.output, object), "output")  # stored, it would spoil every later step
    except GoondanError as error:
        text = f"The tool host sent no result: {error.info.message}"
        return failed_result(tool_error("E_TOOL_BAD_OUTPUT", text, name="FrameError"), item.error_message_limit)
    if result.error is not None and len(result.error.message) > item.error_message_limit:
        result.error.message = cut_message(result.error.message, item.error_message_limit)
    return result


def _payload(
    args: dict[str, Any],
    call_id: str,
    turn_id: str,
    message_id: str | None,
    message: bytes | None,
    folder: str | None,
) -> bytes:
    encoded = encode_value(args)
    check_depth(encoded)
    if len(encoded) > blobs.MAX_ARGS_BYTES:
        raise blobs.too_large(len(encoded), blobs.MAX_ARGS_BYTES)
    if message is not None and len(message) > blobs.MAX_ARGS_BYTES:
        message = message_id = None  # the arguments come first; the handler's ctx.message is then absent
    return encode_value(
        ToolCallPayload(
            args=Raw(encoded),
            turn_id=turn_id,
            tool_call_id=call_id[len(turn_id) + 1 :],
            message_id=message_id,
            message=None if message is None else Raw(message),
            folder=folder,
        )
    )


def _describe(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a string has half of a surrogate pair"
    return str(error)[:200] or type(error).__name__


def _may_help(result: ToolResult, call: OpenCall) -> bool:
    """Whether to make this call again: its tool host was lost, or its own process has ended. After the end of its own
    process it is tried only once more, because the tool may be the reason.
    """
    if call.repeats >= MAX_REPEATS:
        return False
    code = _code(result)
    return code == "E_TOOL_OUTCOME_UNKNOWN" or (code == "E_TOOL_CRASHED" and not call.crashed)


def _was_lost(result: ToolResult, call: OpenCall) -> bool:
    """Whether a call has ended because its MCP server or its tool host was lost."""
    return call.repeats < MAX_REPEATS and _code(result) in (servers.GONE, "E_TOOL_OUTCOME_UNKNOWN")


def _code(result: ToolResult) -> str | None:
    return None if result.error is None else result.error.code


def _nth(call_id: str, repeats: int) -> str:
    """The id of a call that was made again `repeats` times."""
    return call_id if repeats == 0 else f"{call_id}~{repeats + 1}"


def _refused(error: GoondanError, item: launch.CatalogItem) -> ToolResult:
    """The result of a call that the bus did not carry."""
    name = "TimeoutError" if error.info.code == "E_TOOL_TIMEOUT" else "BusError"
    refusal = tool_error(error.info.code, error.info.message, name=name, suggestion=error.info.suggestion)
    return failed_result(refusal, item.error_message_limit)


def failed_result(error: ToolError, limit: int) -> ToolResult:
    """A result with this error, its message within `limit` characters."""
    if len(error.message) > limit:
        error.message = cut_message(error.message, limit)
    return ToolResult(status="error", error=error)


#: How late the tool host may hear that results are stored (seconds); it keeps them until then.
ACK_DELAY_S: Final = 0.05
#: callIds named in one `ack` frame, so that it stays far below the frame limit.
ACK_BATCH: Final = 1000


class ResultAcks:
    """Results that are stored, in batches."""

    def __init__(self, link: AgentLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._waiting: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call_ids: Sequence[str]) -> None:
        """These results are stored."""
        self._waiting.extend(call_ids)
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(ACK_DELAY_S, self.flush)

    def flush(self) -> None:
        """Send the waiting ids. Ids that cannot be sent now are tried again later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            batch = self._waiting[:ACK_BATCH]
            if not self._link.send(Frame("ack", stage="result", calls=batch)):
                self._timer = self._loop.call_later(ACK_DELAY_S, self.flush)
                return
            del self._waiting[:ACK_BATCH]

    def close(self) -> None:
        """Send the waiting ids, and stop the timer."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()


class OpenCalls:
    """The open calls of one turn, by the model's ids of the calls. To be made inside a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        #: The tasks.
        self.open: dict[str, asyncio.Task[None]] = {}

    def drop(self, tool_call_id: str) -> None:
        """Give a call up. Its `done` is not called any more."""
        task = self.open.pop(tool_call_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Give every call up."""
        for tool_call_id in list(self.open):
            self.drop(tool_call_id)
