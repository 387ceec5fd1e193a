"""Questions of handlers to the bus through `ctx.runtime`: what is sent, under what ids, what comes back. Pure.

Rules.
- Each question is asked in the name of a call that runs here. The broker finds out whose call that is.
- What is asked of other agents needs the permission `agents`. Code mode asks the agent that made the call (`tool.ask`),
  and needs the permission `tools`. So do MCP workers, with the permission `server`, which no bundle can name.
- The id of a question is made from the call's id, from what is asked, and from how often the call asked the same
  before. So a handler that runs again asks under the same ids, in whatever order, and the broker answers what it knows
  already.
- A question with `async` is answered when the broker has it. From then on it belongs to the agent: it ends neither with
  the call nor at the call's deadline, and its answer is a message to the agent.
- The open questions, all questions and all bytes of a call are limited. One more is refused, not queued.
- What comes out of a jail is hostile: names are bounded, and values are checked before anything uses them.

Source: docs/design/wire.md section 4; docs/design/delivery.md section 5; docs/design/sandbox.md section 5; requirements
CONTEXT-09, AGENTS-12 to AGENTS-30.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from goondan.schemas.bundle.address import is_instance_key
from goondan.schemas.wire import frames, questions
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.worker_frames import Answer, Ask, WorkerError
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.untrusted import Violation, check_json

#: Questions that one call may ask in all, calls of tools excepted.
MAX_ASKED: Final = 1000
#: `input` and `metadata` of one question together, and of all questions of a call (bytes). The broker keeps what was
#: sent and is not worked on yet, 256 MiB of all senders together: one call must not fill that.
MAX_INPUT: Final = questions.MAX_ASK_BYTES
MAX_SAID: Final = 16 << 20
#: The same for calls of tools: nobody keeps their arguments, but each is passed on, and some are noted.
MAX_SAID_TO_TOOLS: Final = 64 << 20
#: What the worker of a server asks in the name of no call (bytes): the largest document of a login, and a URL.
MAX_SERVER_ASK: Final = 80 << 10
#: Longest name in a question, and longest path in one (characters).
MAX_NAME: Final = 256
MAX_CWD: Final = 4096
#: Longer callIds are shortened in ids, which may have 256 characters.
_MAX_CALL_ID: Final = 200

_NOTHING: Final = Raw(b"\xc0")
#: The permission that each operation needs.
_PERMISSIONS: Final = {
    **dict.fromkeys(("request", "send", "spawn", "list", "catalog"), "agents"),
    **dict.fromkeys(("tool", "tools"), "tools"),
    **dict.fromkeys(("elicit", "sample"), "server"),
}


def may_ask(op: str, permissions: Collection[str]) -> bool:
    """Whether a worker with these permissions may ask so."""
    return _PERMISSIONS.get(op) in permissions


#: Gives the handler its answer, unless its jail is gone.
Reply = Callable[[Answer], None]
#: Makes the frame for what the worker of a server asks in the name of no call: from the server's prefix, from the agent
#: whose own config of it counts, and from what is asked, which somebody hostile may have chosen. Raises GoondanError. A
#: feature's `host.py` has them by `Ask.op` (`ASKS`).
MakeServerAsk = Callable[[str, str | None, Raw], Frame]


class Question(NamedTuple):
    """A question that has no answer yet."""

    #: What was asked.
    ask: Ask
    #: The frame that asks it.
    frame: Frame
    #: Gets the answer.
    reply: Reply


class Asker:
    """One call and its questions."""

    __slots__ = ("_asked", "_inner", "_inner_said", "_said", "_same", "open")

    def __init__(self) -> None:
        #: The questions without an answer, by their ids.
        self.open: dict[int, Question] = {}
        self._asked = 0
        self._said = 0
        self._inner = 0
        self._inner_said = 0
        self._same: Counter[bytes] = Counter()

    def frame(self, call: Call, ask: Ask, now: float, created_at: str, reply: Reply) -> Frame:
        """Make the frame for the bus and open the question. `now` as in `call.deadline`, `created_at` RFC 3339.

        Raises GoondanError for a question that does not go to the bus, and Violation for what no honest worker sends.
        """
        self._check_room(ask)
        if ask.op == "tool":
            self._count_inner_call(ask)
        else:
            self._count(ask)
        if _PERMISSIONS[ask.op] != "agents":
            frame = _frame_to_caller(call, ask, self._asked + self._inner)
            self.open[ask.ask_id] = Question(ask, frame, reply)
            return frame
        left_ms = None if call.deadline is None else max(1, int((call.deadline - now) * 1000))
        frame = _frame(call, ask, self._name(call, ask), left_ms, created_at)
        self.open[ask.ask_id] = Question(ask, frame, reply)
        return frame

    def server_frame(
        self, asks: Mapping[str, MakeServerAsk], server: str, agent: str | None, ask: Ask, reply: Reply
    ) -> Frame:
        """Make the frame for what the worker of a server asks in the name of no call, and open the question. Raises
        GoondanError, Violation.
        """
        self._check_room(ask)
        if ask.value is None or memoryview(ask.value).nbytes > MAX_SERVER_ASK:
            raise Violation("the worker asked in the name of no call, and not what a server's worker may ask so")
        make = asks.get(ask.op)
        if make is None:
            raise fail("E_FEATURE_MISSING", f"no feature of this installation answers {ask.op!r}")
        check_json(bytes(ask.value))
        frame = make(server, agent, ask.value)
        self.open[ask.ask_id] = Question(ask, frame, reply)
        return frame

    def _check_room(self, ask: Ask) -> None:
        if ask.ask_id in self.open:
            raise Violation("the worker asked twice under one number")
        if len(self.open) >= questions.MAX_OPEN:
            raise _limit(f"{questions.MAX_OPEN} questions of this call are open", "Wait for some answers first.")

    def _count(self, ask: Ask) -> None:
        if self._asked >= MAX_ASKED:
            raise _limit(f"a call asks at most {MAX_ASKED} questions", "Do the rest in another call.")
        self._asked += 1
        self._said += _check(ask)
        if self._said > MAX_SAID:
            raise _limit(f"a call says at most {MAX_SAID} bytes in all", "Do the rest in another call.")

    def _count_inner_call(self, ask: Ask) -> None:
        if self._inner >= questions.MAX_INNER_CALLS:
            raise _limit(f"a script makes at most {questions.MAX_INNER_CALLS} calls", "Do the rest in another script.")
        self._inner += 1
        self._inner_said += _check(ask)
        if self._inner_said > MAX_SAID_TO_TOOLS:
            message = f"the arguments of a script's calls have at most {MAX_SAID_TO_TOOLS} bytes in all"
            raise _limit(message, "Do the rest in another script.")

    def _name(self, call: Call, ask: Ask) -> str:
        event = (ask.target, ask.instance_key, ask.event_type, ask.input, ask.metadata, ask.asynchronous)
        what = (ask.op, *event, ask.cwd)
        digest = hashlib.sha256(encode_value(what)).digest()[:12]
        self._same[digest] += 1
        name = call.id if len(call.id) <= _MAX_CALL_ID else hashlib.sha256(call.id.encode()).hexdigest()
        return f"{name}~{digest.hex()}.{self._same[digest]}"


def _check(ask: Ask) -> int:
    """How many bytes a question has. Raises GoondanError for bad arguments, Violation for values that are not JSON."""
    if ask.op in ("request", "send", "spawn") and not ask.target:
        raise _invalid("target is missing: the name of an agent")
    if len(ask.target or "") > MAX_NAME:
        raise _invalid(f"target has at most {MAX_NAME} characters")
    if ask.instance_key and not is_instance_key(ask.instance_key):
        raise _invalid(f"instanceKey has at most {MAX_NAME} characters, all of them visible")
    if len(ask.cwd or "") > MAX_CWD:
        raise _invalid(f"cwd has at most {MAX_CWD} characters")
    if ask.event_type is not None and not questions.is_event_type(ask.event_type):
        raise _invalid("eventType is 1 to 128 letters, digits and .:_- and no type that the kernel uses itself")
    if ask.asynchronous and ask.op != "request":
        raise _invalid("only a request can be asynchronous")
    if ask.timeout_ms is not None and ask.timeout_ms < 1:
        raise _invalid("timeoutMs is at least 1")
    values = [value for value in (ask.input, ask.metadata, ask.value) if value is not None]
    size = sum(memoryview(value).nbytes for value in values)
    if size > MAX_INPUT:
        what = "input and metadata have" if _PERMISSIONS[ask.op] == "agents" else "the arguments of a call have"
        raise _limit(f"{what} at most {MAX_INPUT} bytes together", "Write it to a file, and say where.")
    for value in values:
        check_json(bytes(value))
    if ask.metadata is not None and not isinstance(msgspec.msgpack.decode(ask.metadata), dict):
        raise _invalid("metadata is an object")
    return size


def _invalid(message: str) -> GoondanError:
    return fail("E_TOOL_INVALID_ARGS", f"ctx.runtime: {message}", suggestion="Correct the argument.")


def _limit(message: str, suggestion: str | None = None) -> GoondanError:
    return fail("E_TOOL_LIMIT", message, suggestion=suggestion)


def _frame(call: Call, ask: Ask, name: str, left_ms: int | None, created_at: str) -> Frame:
    if ask.op == "list":
        payload = to_raw(frames.AgentsList(include_all=ask.include_all))
        return Frame(
            "agents.list", call_id=call.id, deadline_ms=_shorter(questions.LOOK_UP_MS, left_ms), payload=payload
        )
    if ask.op == "catalog":
        return Frame("agents.catalog", call_id=call.id, deadline_ms=_shorter(questions.LOOK_UP_MS, left_ms))
    key = ask.instance_key or call.instance_key
    if ask.op != "spawn":
        _check_asked(call, str(ask.target), key, ask)
    deadline_ms = _shorter(questions.TIMEOUT_MS if ask.timeout_ms is None else ask.timeout_ms, left_ms)
    if ask.op == "spawn":
        frame = Frame("agents.spawn", id=name, to=ask.target, instance_key=key, call_id=call.id)
        frame.deadline_ms, frame.payload = deadline_ms, to_raw(frames.AgentsSpawn(ask.cwd))
        return frame
    asks = ask.op == "request"
    event = frames.AgentEvent(
        id=name,
        type=ask.event_type or questions.EVENT_TYPES[ask.op],
        created_at=created_at,
        input=ask.input or _NOTHING,
        instance_key=key,
        metadata=None if ask.metadata is None else msgspec.msgpack.decode(ask.metadata),
        reply_to=frames.ReplyTo(call.agent, questions.correlation(name)) if asks else None,
    )
    frame = Frame("event", to=ask.target, instance_key=key, event_id=name, call_id=call.id, reply_to=event.reply_to)
    frame.payload = to_raw(event)
    if asks and ask.asynchronous:
        frame.asynchronous, frame.deadline_ms = True, ask.timeout_ms
    elif asks:
        frame.deadline_ms = deadline_ms  # what is sent has none: it keeps until it is worked on
    return frame


def _frame_to_caller(call: Call, ask: Ask, number: int) -> Frame:
    """The `tool.ask` to the agent that made the call. It has no deadline: it ends with the call, whose time may stand
    still.
    """
    value = None if ask.value is None else Raw(bytes(ask.value))
    return Frame("tool.ask", call_id=call.id, payload=to_raw(questions.ToolAsk(number, ask.op, value)))


def _check_asked(call: Call, target: str, key: str, ask: Ask) -> None:
    """Whether this call may ask that instance. Raises GoondanError."""
    if (target, key) == (call.agent, call.instance_key):
        message = f"agent {target!r} with instance key {key!r} is the one that asks"
        raise fail("E_AGENT_CYCLE", message, suggestion="Give another instanceKey, or name another agent.")
    if ask.asynchronous and call.agent == frames.OPERATOR_AGENT:
        message = "a call from outside has no conversation that an answer could come to later"
        raise fail("E_USAGE", message, suggestion="Ask without async, or send.")


def _shorter(milliseconds: int, left_ms: int | None) -> int:
    return milliseconds if left_ms is None else min(milliseconds, left_ms)


# --- what comes back ------------------------------------------------------------------------------------------------


def value_of(ask: Ask, asked: Frame, answer: Frame) -> Raw:
    """The value that the handler gets from the answer to `asked`. Raises GoondanError when the answer is a failure."""
    size = memoryview(answer.payload).nbytes
    if answer.type == "tool.answer":
        return _value_of_answer(answer, size)
    if size > questions.MAX_ANSWER_BYTES:
        raise _limit(
            f"the answer has {size} bytes, limit {questions.MAX_ANSWER_BYTES}", "Let the agent write to a file."
        )
    if ask.op == "send":
        return to_raw({"target": ask.target, "eventId": asked.event_id, "accepted": True})
    if ask.op != "request":
        return answer.payload
    event_id = asked.event_id or ""
    if ask.asynchronous:
        return to_raw(
            {**questions.answered(str(ask.target), event_id, questions.correlation(event_id), None), "async": True}
        )
    ended = from_raw(answer.payload, frames.AgentEvent).answer
    if (error := questions.answer_error(str(ask.target), ended)) is not None:
        raise GoondanError(error)
    response = None if ended is None else ended.response
    told = questions.answered(str(ask.target), event_id, questions.correlation(event_id), response)
    return to_raw(told if ended is None else questions.with_object(told, ended))


def _value_of_answer(answer: Frame, size: int) -> Raw:
    if size > questions.MAX_ANSWER_BYTES:
        message = f"the result has {size} bytes, limit {questions.MAX_ANSWER_BYTES}"
        raise _limit(message, "Ask for less, or let the tool write to a file.")
    told = from_raw(answer.payload, questions.ToolAnswer)
    if told.error is not None:
        raise GoondanError(told.error)
    return _NOTHING if told.value is None else told.value


def refusal(ask: Ask, error: frames.ErrorPayload) -> Answer:
    """An error as the answer to a question."""
    info = msgspec.structs.replace(error, name=error.name or "AgentError")
    said = msgspec.convert(info, WorkerError, from_attributes=True)
    return Answer(call_id=ask.call_id, ask_id=ask.ask_id, error=said)


def ended(ask: Ask) -> Answer:
    """The answer to a question that is asked, or still open, when the call has ended."""
    return refusal(ask, error_payload("E_CALL_ENDED", "the call has ended, and ctx.runtime with it"))
