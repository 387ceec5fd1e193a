"""The results of calls as the bus carries them, and work that goes on after its call was answered with `pending`. Pure.

States of a piece of work: running -> done (its final result is here) -> forgotten.

Rules.
- A handle names one piece of work of one agent instance and one tool. It begins with the tool's name, so no tool can
  take, replace or imitate the handle of another tool. While the work runs, the handle is refused to other work.
- Work ends exactly once: by its worker's second result, by the end of its jail, by PENDING_S, or because the tool host
  that had it is gone; then its outcome is unknown.
- All running work is written down for the next tool host whenever some begins or ends. That is bounded: an instance may
  have at most twice as much as is left free after it.
- A call that polls at that moment is told the result; without one the agent gets an event. The result stays here for
  KEPT_S, for later polls.

An output is forwarded as the worker encoded it; an error is cut to its tool's limit and completed with what ERROR-02,
ERROR-06 and ERROR-07 ask for. A code of the kernel is the kernel's word: one that a handler says without having it from
the kernel is a code of the handler's own (`own_error`).

Where the sandbox was the reason, a handler sees a refused connection, a name that does not exist or a socket that it
may not make. Its error keeps its name and message; its code becomes E_SANDBOX_DENIED and the message begins with what
was refused, so that a model does not take the wall for a fault of the network.

Receipts are kept encoded, because a warm call takes less time than describing its jail. The part about the jail is
encoded again only when it has changed; the part about the call is one number. This module also decides when processor
time and memory are looked at: after a call that took long, and otherwise once a second at most. So quick calls pay
nothing for it.

Source: docs/design/tools.md sections 5, 6 and 9; requirements RESULT-03, RESULT-04, RESULT-01 to RESULT-05, ERROR-01 to
ERROR-07, HANDLER-07; docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import CODES, cut_message, help_url, row_of, tool_error
from goondan.schemas.wire.frames import ErrorPayload, ToolError, ToolResult
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt
from goondan.schemas.worker.worker_frames import Result, WorkerError
from goondan.toolhost.calls.call_registry import Call, FairStore
from goondan.toolhost.calls.untrusted import Violation, check_json, output_limit
from goondan.toolhost.policy import launch_plan, limits
from goondan.toolhost.traffic.messages import Denied

#: How long work may go on (seconds).
PENDING_S: Final = 3600.0
#: How long its result is kept for polls (seconds), and how much all kept results may take (bytes).
KEPT_S: Final = 600.0
KEPT_BYTES: Final = 32 << 20
#: Pieces of work that one agent instance may have running.
MAX_RUNNING: Final = 256
#: All promises that are written down (bytes), and how many times the free rest an instance may hold. With the longest
#: names that is room for some hundred promises, with usual names for ten thousand.
MAX_PROMISED_BYTES: Final = 3 << 20
TIMES_LEFT: Final = 2
#: Longest name that a handler may choose (characters): it is kept, shown and sent back.
MAX_HANDLE: Final = 1024


def full_handle(tool: str, chosen: str) -> str | None:
    """The handle `<tool>/<name>` of work that a tool has named so; None for a bad name.

    A name may hold any letters, digits, signs and blanks, but nothing that controls a terminal or ends a line.
    """
    if not 1 <= len(chosen) <= MAX_HANDLE or not chosen.isprintable():
        return None
    return f"{tool}/{chosen}"


#: (agent, instanceKey, handle)
Name = tuple[str, str, str]


class Promise(Struct, frozen=True, rename="camel"):
    """What the next tool host must know of running work, to say that its outcome is unknown."""

    #: The agent whose work it is.
    agent: str
    #: The instance of that agent.
    instance_key: str
    #: The handle of the work.
    handle: str
    #: The tool whose handler began it.
    tool: str
    #: The callId of the call that was answered with `pending`.
    call_id: str
    #: The turn of that call.
    turn_id: str
    #: The model's id of that call.
    tool_call_id: str
    #: The event that all this work began with; None when that is not known.
    root_event: str | None = None
    #: The trace of the call; None without one.
    trace_id: str | None = None

    @property
    def owner(self) -> tuple[str, str]:
        """The agent and the instance key whose work it is."""
        return (self.agent, self.instance_key)

    @property
    def name(self) -> Name:
        """The name of running work; no other running work has it."""
        return (self.agent, self.instance_key, self.handle)


class Work(Struct, eq=False):
    """One piece of work."""

    #: What was promised about it.
    promise: Promise
    #: When it began; once it is done, when it ended (seconds).
    at: float
    #: Its final ToolResult, None while it runs.
    payload: Raw | None = None
    #: Open calls of `tool-result__get` that wait for it.
    pollers: list[Call] = []

    @property
    def done(self) -> bool:
        """Whether its final result is here."""
        return self.payload is not None


Refusal = Literal["taken", "full", "no room"]


class PendingRegistry:
    """All pending work of one tool host. Times are seconds on any one clock."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = kept_bytes
        self._running: dict[Name, Work] = {}
        self._done: FairStore[Name, Work] = FairStore()
        #: What has to be written down, by callId.
        self._promised: FairStore[str, Promise] = FairStore()

    def begin(self, promise: Promise, now: float, *, again: bool = False) -> Work | Refusal:
        """New work, or why it is refused: the handle is taken, the instance has too much, or it cannot be written down.

        `again`: an earlier tool host had promised it.
        """
        if promise.name in self._running:
            return "taken"
        if len(self.of(promise.owner)) >= MAX_RUNNING:
            return "full"
        size = len(msgspec.json.encode(promise))
        left = MAX_PROMISED_BYTES - self._promised.total - size
        if not again and (left < 0 or self._promised.held_by(promise.owner) > TIMES_LEFT * left):
            return "no room"
        self._promised.put(promise.call_id, promise.owner, size, promise)
        self._done.take(promise.name)
        work = self._running[promise.name] = Work(promise, now)
        return work

    def end(self, work: Work, payload: Raw, now: float) -> list[Call] | None:
        """Set its final result. Returns the calls that wait for it, or None when it had ended before."""
        promise = work.promise
        if work.done or self._running.pop(promise.name, None) is not work:
            return None
        work.payload, work.at = payload, now
        self._done.put(promise.name, promise.owner, len(bytes(payload)), work)
        while self._done.total > self._max_bytes and len(self._done) > 1:
            self._done.take(self._done.first_to_go())
        pollers, work.pollers = work.pollers, []
        return pollers

    def told(self, promise: Promise) -> None:
        """Somebody knows the result: it need not be written down any more."""
        self._promised.take(promise.call_id)

    def get(self, owner: tuple[str, str], handle: str) -> Work | None:
        """The work of a handle, running or done."""
        name = (*owner, handle)
        return self._running.get(name) or self._done.get(name)

    def overdue(self, now: float) -> list[Work]:
        """Work that has run for too long."""
        return [work for work in self._running.values() if now - work.at >= PENDING_S]

    def expire(self, now: float) -> None:
        """Forget results that were kept for long enough. Call now and then."""
        for work in [work for work in self._done if now - work.at >= KEPT_S]:
            self._done.take(work.promise.name)

    def of(self, owner: tuple[str, str]) -> list[Work]:
        """The running work of an agent instance."""
        return [work for work in self._running.values() if work.promise.owner == owner]

    def forget(self, owner: tuple[str, str]) -> None:
        """The instance is deleted: nobody is told of its work any more."""
        for work in self.of(owner):
            del self._running[work.promise.name]
        for work in [work for work in self._done if work.promise.owner == owner]:
            self._done.take(work.promise.name)
        for promise in [promise for promise in self._promised if promise.owner == owner]:
            self.told(promise)

    def promised(self) -> list[Promise]:
        """Promises that nobody was told of yet: the next tool host has to give them up."""
        return list(self._promised)

    @property
    def empty(self) -> bool:
        """Whether there is no work and no result here."""
        return not self._running and not len(self._done)


# --- results ----------------------------------------------------------------------------------------------------------

#: Characters of an error's name, code and other texts beside its message; a handler has no reason to send more.
MAX_NAME: Final = 200
MAX_CODE: Final = 100
MAX_SUGGESTION: Final = 2000
MAX_URL: Final = 1000
#: The form of a code.
_CODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
#: Before a code of the kernel that a handler says of its own accord.
OWN: Final = "tool:"
#: Codes of the kernel that any handler may say of its own call, and those that the bundled tools say besides,
#: with those that features have for theirs (ErrorCode.of_tools).
OF_HANDLERS: Final = frozenset(
    ("E_TOOL", "E_TOOL_INVALID_ARGS", "E_TOOL_LIMIT", "E_TOOL_BAD_OUTPUT", "E_TOOL_NOT_FOUND", "E_CALL_ENDED")
)
OF_BUNDLED: Final = frozenset(("E_SANDBOX_DENIED", "E_TOKEN_MISSING", "E_CANCELLED", "E_TOOL_TIMEOUT"))
_NIL: Final = b"\xc0"
# {"status": "ok", "output": …, "receipt": …} up to the output, and from there to the receipt
_OK: Final = encode_value({"status": "ok", "output": None, "receipt": None}).partition(b"\xc0")[0]
_RECEIPT: Final = encode_value("receipt")
#: Codes of operating systems for a failed connection.
NETWORK_CODES: Final = frozenset(
    ("ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "ENETDOWN", "ETIMEDOUT", "EPIPE")
)
#: Codes that say nothing about the cause.
_UNSPECIFIC: Final = frozenset((None, "E_TOOL", *NETWORK_CODES))


def shape(result: Result, receipt: Raw, tool: ToolSpec) -> Raw:
    """Make the payload of `tool.result` from a worker's result, within the tool's limits, with the host's receipt.

    Raises Violation when the result breaks the protocol.
    """
    message_limit = tool.error_message_limit
    if result.status == "ok":
        output = bytes(result.output) if result.output is not None else _NIL
        limit = output_limit(tool.sandbox.limits.output_mb)
        if len(output) > limit:
            return error_result(_too_large(len(output), limit), message_limit, receipt)
        check_json(output)
        return Raw(_OK + output + _RECEIPT + bytes(receipt))
    if result.status == "pending":
        handle = full_handle(tool.name, result.handle or "")
        if handle is None:
            raise Violation("the worker sent a pending result without a proper handle")
        return Raw(encode_value(ToolResult(status="pending", handle=handle, receipt=receipt)))
    if result.error is None:
        raise Violation("the worker sent an error result without an error")
    return error_result(completed(result.error), message_limit, receipt)


def error_result(error: ToolError, message_limit: int, receipt: Raw | None = None) -> Raw:
    """Make the payload of `tool.result` from an error. Its message is cut (ERROR-03). `receipt` if a jail had the
    call.
    """
    if len(error.message) > message_limit:
        error = msgspec.structs.replace(error, message=cut_message(error.message, message_limit))
    return Raw(encode_value(ToolResult(status="error", error=error, receipt=receipt)))


def own_error(error: WorkerError, call: Call) -> WorkerError:
    """The error of a handler, whose code is none of the kernel's unless the kernel has said it to this very call.

    A jail may say what it likes. What the kernel says is obeyed, by agents that repeat a call and by people that read
    what to do about it. The worker of an MCP server is no jail.
    """
    code = error.code
    if code is None or call.tool.server is not None:
        return error
    if not _CODE.fullmatch(code):
        code = "E_TOOL"
    elif code in CODES and not (
        code in OF_HANDLERS
        or code in call.heard
        or (call.tool.bundled and (code in OF_BUNDLED or row_of(code).of_tools))
    ):
        code = OWN + code
    return error if code == error.code else msgspec.structs.replace(error, code=code)


def refusal(info: ErrorPayload, *, name: str = "ToolHostError") -> ToolError:
    """Make the error of a result from one of our own errors."""
    return ToolError(
        message=info.message, name=name, code=info.code, suggestion=info.suggestion, help_url=info.help_url
    )


def _too_large(size: int, limit: int) -> ToolError:
    message = f"the output has {size} bytes, limit {limit} (outputMb)"
    return tool_error("E_TOOL_LIMIT", message, name="OutputTooLarge")


def completed(error: WorkerError) -> ToolError:
    """A worker's error with what it left out, and within bounds."""
    code = (error.code or "E_TOOL")[:MAX_CODE]
    return ToolError(
        message=error.message,
        name=error.name[:MAX_NAME] or "Error",
        code=code,
        suggestion=(error.suggestion or CODES.get(code) or CODES["E_TOOL"])[:MAX_SUGGESTION],
        help_url=(error.help_url or help_url("E_TOOL" if code.startswith(OWN) else code))[:MAX_URL],
    )


def with_denial(error: WorkerError, denied: Sequence[Denied]) -> WorkerError:
    """The error of a call; `denied` are the denials in its jail while it ran, oldest first."""
    if not denied or error.code not in _UNSPECIFIC:
        return error
    last = next((one for one in reversed(denied) if _is_named(one, error.message)), denied[-1])
    return _denied(
        error, f"{shown(last.host, last.port)} is not reachable from this sandbox: {last.reason}", _suggestion(last)
    )


def without_network(error: WorkerError) -> WorkerError:
    """The error of a call whose tool has no network at all."""
    if error.code not in NETWORK_CODES:
        return error
    return _denied(error, "no network was granted to this tool (spec.sandbox.network is none)", None)


def shown(host: str, port: int) -> str:
    """A host, and the port where one is known (not 0)."""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}" if port else host


def _is_named(denied: Denied, message: str) -> bool:
    return denied.host in message or (denied.port > 0 and str(denied.port) in message)


def _suggestion(denied: Denied) -> str:
    target = shown(denied.host, denied.port) if denied.port else f"{denied.host}:PORT"
    return f"Grant it: spec.sandbox.network: {{allow: ['{target}']}}, or `gdn call --allow-net {target}`."


def _denied(error: WorkerError, reason: str, suggestion: str | None) -> WorkerError:
    message = f"{reason} ({error.message})" if error.message else reason
    return WorkerError(name=error.name, message=message, code="E_SANDBOX_DENIED", suggestion=suggestion)


# --- receipts ---------------------------------------------------------------------------------------------------------

#: Seconds between two looks: one takes some 150 µs.
LOOK_S: Final = 1.0
#: A call that took this long (seconds) is followed by a look, which does not make it noticeably longer, unless the jail
#: was looked at while it ran: many calls may end together.
LONG_S: Final = 0.05

_START: Final = b"\x82\xa4jail"
_CALL: Final = b"\xa4call"
# The parts of a CallReceipt without `exit` and `denied`, each number in the form that takes any.
_WALL: Final = b"\x84\xa6wallMs\xcb"
_CAME: Final = b"\xa6cameUs\xcf"
_BEGAN: Final = b"\xa7beganUs\xcf"
_HANDLER: Final = b"\xa9handlerMs\xcb"
_pack_times = struct.Struct(f">{len(_WALL)}sd{len(_CAME)}sQ{len(_BEGAN)}sQ{len(_HANDLER)}sd").pack


class JailReceipts:
    """What is known of one jail, and its receipts."""

    __slots__ = ("_encoded", "_known", "_looked_at")

    def __init__(self, plan: launch_plan.LaunchPlan) -> None:
        calls: Literal["forked", "alone"] | None = "alone" if plan.alone else None
        if plan.calls is not None:
            calls = "forked"
        self._known = JailReceipt(tier=plan.tier, walls=plan.walls, limits=plan.mechanisms, calls=calls)
        self._encoded: bytes | None = None
        self._looked_at = float("-inf")

    def is_due(self, now: float, call_s: float) -> bool:
        """Whether to look at the jail's processes after a call of that length (seconds)."""
        since = now - self._looked_at
        return since >= LOOK_S or (call_s >= LONG_S and since >= LONG_S)

    def look(self, now: float, used: limits.Used) -> None:
        """Note what was seen. Neither value ever gets smaller."""
        self._looked_at = now
        self._change(
            cpu_ms=max(self._known.cpu_ms, used.cpu_ms),
            peak_memory_kb=max(self._known.peak_memory_kb, used.memory_kb),
        )

    def network(self, reached: list[str], denied: list[str]) -> None:
        """Note which hosts the jail has reached and which it was denied."""
        if (reached, denied) != (self._known.reached, self._known.denied):
            self._change(reached=reached, denied=denied)

    def ended(self, cause: str) -> None:
        """The jail has ended, or is being ended, for this reason."""
        self._change(exit=cause)

    def receipt(
        self,
        came_us: int,
        began_us: int,
        ended_us: int,
        handler_ms: float = 0.0,
        cause: str | None = None,
        denied: Sequence[str] = (),
    ) -> Raw:
        """The receipt of a call, with when the host got it, when its jail did, and when it ended (CLOCK_BOOTTIME,
        microseconds). `handler_ms`: how long the worker says that it had the call. `cause`: why its processes ended
        before it had a result. `denied`: where connections could not go meanwhile.
        """
        if self._encoded is None:
            self._encoded = _START + encode_value(self._known) + _CALL
        wall_ms = (ended_us - began_us) / 1000
        handler_ms = int(handler_ms * 1000 + 0.5) / 1000 if 0 <= handler_ms <= wall_ms else 0.0
        if cause is not None or denied:
            call = CallReceipt(wall_ms, cause, list(denied), came_us, began_us, handler_ms)
            return Raw(self._encoded + encode_value(call))
        times = _pack_times(_WALL, wall_ms, _CAME, came_us, _BEGAN, began_us, _HANDLER, handler_ms)
        return Raw(self._encoded + times)

    def _change(self, **values: object) -> None:
        self._known = msgspec.structs.replace(self._known, **values)
        self._encoded = None
