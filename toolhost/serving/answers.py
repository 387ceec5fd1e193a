"""What calls send to the bus and get from it: the questions of their handlers on the way there and back, and their one
result, which is kept until the agent has stored it.

A question whose answer is waited for lives as long as its call: when the call ends, in whatever way, what it has open
is dropped here, the handler is told, and an answer that still comes is acknowledged by the link and goes nowhere. The
log says which those were; the broker cancels them.

The worker of a server may ask something of a feature in the name of no call. It speaks with somebody hostile. So it
asks for its own server only, few things at a time, and within bounds.

Work that goes on after its call was answered with `pending` also ends once. Calls of `tool-result__get` that wait for
it are told of its end; without one its agent gets an event. What was promised and not told yet is kept in a file, so
that the next tool host can say of each piece of work that its outcome is unknown.

Source: docs/design/delivery.md sections 5 and 6; docs/design/sandbox.md section 5; schemas/WORKER.md section 10;
schemas/PROTOCOL-AGENTS.md, "Access tokens"; docs/design/tools.md sections 6 and 11; requirements RESULT-03, RESULT-04;
PROTOCOL-TOOLHOSTS.md "Pending results".
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw

from goondan.schemas.bundle.launch import DEFAULT_ERROR_LIMIT, ToolSpec
from goondan.schemas.text.times import rfc3339
from goondan.schemas.transport.link import Done
from goondan.schemas.wire import codec, frames, runtime_events, spans
from goondan.schemas.wire.blobs import INLINE_FRAME_BYTES
from goondan.schemas.wire.errors import GoondanError, error_payload, fail, tool_error
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker import servers, tool_host_reports
from goondan.schemas.worker.worker_frames import Answer, Ask, Progress
from goondan.toolhost.calls.asks import Asker, MakeServerAsk, Question, Reply, ended, refusal, value_of
from goondan.toolhost.calls.call_registry import Call, CallRegistry, Listing, StoredResult, answer_of, refusal_of
from goondan.toolhost.calls.results import MAX_RUNNING, PendingRegistry, Promise, Work, error_result, full_handle

# --- questions --------------------------------------------------------------------------------------------------------


class Speaker(Protocol):
    """The side of a link (schemas/transport/link.py) that questions need."""

    def ask(self, frame: Frame) -> asyncio.Future[Frame]:
        """Send an `event` with `replyTo` until its answering event is here."""

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        """Send until it is answered by an `ack`, a `reply` or an `error` (which raises GoondanError)."""

    def ask_caller(self, frame: Frame, done: Done) -> None:
        """Send a `tool.ask` until its `tool.answer` is here, or an `error`. `done` is called once, with either; it is
        not called after `forget`.
        """

    def forget(self, frame_id: str) -> None:
        """Stop sending a frame."""


class Asking:
    """All questions of one tool host. Without a `speaker` each is refused."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        speaker: Speaker | None,
        on_log: Callable[[tool_host_reports.LogLine], None],
        server_asks: Mapping[str, MakeServerAsk],
    ) -> None:
        self._loop = loop
        self._speaker = speaker
        self._on_log = on_log
        self._server_asks = server_asks
        # By the worker call id: a call that runs again begins anew. Workers of servers by the number of the session.
        self._askers: defaultdict[str | int, Asker] = defaultdict(Asker)

    def ask(self, call: Call, ask: Ask, reply: Reply) -> None:
        """Send a question of a running call. `reply` gets its answer, unless the jail is gone. Raises Violation."""
        asker = self._askers[call.worker_call_id]
        now, created_at = self._loop.time(), "" if ask.op == "tool" else rfc3339(time.time())  # such a call has none
        self._open(call.worker_call_id, ask, reply, lambda: asker.frame(call, ask, now, created_at, reply))

    def ask_for_server(self, session: int, server: str, agent: str | None, ask: Ask, reply: Reply) -> None:
        """Send what the worker of a server asks in the name of no call. `session` is its number, `agent` the one whose
        own config of the server counts. Raises Violation.
        """
        asker = self._askers[session]
        make = partial(asker.server_frame, self._server_asks, server, agent, ask, reply)
        self._open(session, ask, reply, make)

    def _open(self, who: str | int, ask: Ask, reply: Reply, make: Callable[[], Frame]) -> None:
        try:
            if self._speaker is None:
                raise fail("E_KERNEL_NOT_RUNNING", "this tool host has no bus")
            self._send(self._speaker, make(), partial(self._answered, who, ask.ask_id))
        except GoondanError as error:
            self._askers[who].open.pop(ask.ask_id, None)
            reply(refusal(ask, error.info))

    @staticmethod
    def _send(speaker: Speaker, frame: Frame, done: Done) -> None:
        if frame.type == "tool.ask":
            speaker.ask_caller(frame, done)
            return
        waits = frame.reply_to is not None and not frame.asynchronous
        answer = speaker.ask(frame) if waits else speaker.post(frame)
        answer.add_done_callback(partial(_settled, done))

    def pass_on(self, script: Call, call: Call, payload: Raw) -> bool:
        """Give the output of a call to the script that has asked for it. False: its agent answers, because the call has
        failed or goes on, or because the result goes by reference: what the script asks next would overtake it.
        """
        asker = self._askers.get(script.worker_call_id)
        if asker is None or memoryview(payload).nbytes > MAX_PASSED_ON or script.owner != call.owner:
            return False
        result = codec.from_raw(payload, frames.ToolResult)
        if result.status != "ok":
            return False
        for number, question in asker.open.items():
            if question.frame.id == call.question:
                self._forget(asker.open.pop(number))
                value = codec.to_raw({"status": "ok", "output": result.output})
                question.reply(Answer(call_id=question.ask.call_id, ask_id=number, value=value))
                return True
        return False

    def _forget(self, question: Question) -> None:
        if self._speaker is not None:
            self._speaker.forget(question.frame.id)

    def drop(self, call: Call) -> None:
        """The call or its jail has ended: nobody waits for its answers."""
        if call.worker_call_id in self._askers and (left := self._close(call.worker_call_id)):
            names = ", ".join(question.frame.event_id or question.frame.type for question in left[:4])
            message = f"the call ended while {len(left)} of its questions were open: {names}"
            line = tool_host_reports.LogLine(time=time.time(), level="warn", message=message, tool=call.tool.name)
            line.agent, line.instance_key, line.call_id = call.agent, call.instance_key, call.id
            self._on_log(line)

    def drop_server(self, session: int) -> None:
        """The worker of a server is gone: nobody waits for its answers."""
        self._close(session)

    def _close(self, who: str | int) -> list[Question]:
        """The questions that had no answer."""
        asker = self._askers.pop(who, None)
        left = [] if asker is None else list(asker.open.values())
        for question in left:
            self._forget(question)
            question.reply(ended(question.ask))
        return left

    def _answered(self, who: str | int, ask_id: int, answer: Frame | None, failure: GoondanError | None) -> None:
        asker = self._askers.get(who)
        question = None if asker is None else asker.open.pop(ask_id, None)
        if question is None:
            return
        ask = question.ask
        if answer is None:
            question.reply(refusal(ask, error_payload("E_INTERNAL", "no answer") if failure is None else failure.info))
            return
        try:
            value = value_of(ask, question.frame, answer)
        except GoondanError as error:
            question.reply(refusal(ask, error.info))
        except Exception as error:
            question.reply(refusal(ask, error_payload("E_INTERNAL", f"the answer could not be read: {error!r}"[:500])))
        else:
            question.reply(Answer(call_id=ask.call_id, ask_id=ask.ask_id, value=value))


def _settled(done: Done, future: asyncio.Future[Frame]) -> None:
    """Tell `done` what a future has come to. A cancelled one is a question that nobody waits for any more."""
    if future.cancelled():
        return
    try:
        answer = future.result()
    except GoondanError as error:
        done(None, error)
    else:
        done(answer, None)


# --- results ----------------------------------------------------------------------------------------------------------

#: The bundled tool whose calls are answered here, never in a jail.
POLLING_TOOL: Final = "tool-result"
#: A poll ends this long before its own deadline (seconds), so that it ends with an answer.
POLL_MARGIN_S: Final = 0.25

#: Results up to this size (bytes) are passed on to scripts; none of them goes by reference.
MAX_PASSED_ON: Final = INLINE_FRAME_BYTES // 2
#: Seconds between two progress frames of one call that are passed on, and how many characters one may have.
PROGRESS_S: Final = 0.05
MAX_PROGRESS: Final = 1000

#: Sends an event until it is accepted or refused for good, and then calls back.
Announce = Callable[[Frame, Callable[[], None]], None]


def is_polling(tool: ToolSpec) -> bool:
    """Whether calls of this tool are polls."""
    return tool.bundled and tool.name == POLLING_TOOL


class Answers:
    """The results of one tool host's calls, and of the work that goes on after them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Frame], bool],
        asking: Asking,
        announce: Announce,
        remember: Callable[[list[Promise]], None],
        unmade: Callable[[], None],
    ) -> None:
        """`asking` hears of each call that has its result. `announce` sends the event about work that has ended.

        `remember` keeps the promises that nobody was told of yet, in place of those that it kept before.
        `unmade` hears of each call whose jail could not be made.
        """
        self._loop = loop
        self._send_frame = send
        self._asking = asking
        self._announce = announce
        self._remember = remember
        self._unmade = unmade
        self.calls = CallRegistry()
        self.pending = PendingRegistry()

    # --- calls

    def finish(self, call: Call, payload: Raw) -> None:
        """Give the call its one result; a second result is dropped."""
        if self.calls.close(call, payload, self._loop.time()):
            self._asking.drop(call)
            script = None if call.question is None else self.calls.get(call.within or "")
            passed_on = isinstance(script, Call) and self._asking.pass_on(script, call, payload)
            stage = frames.PASSED_ON if passed_on else None
            self.send_result(call.id, call.agent, call.instance_key, payload, stage)

    def fail(self, call: Call, error: frames.ToolError, receipt: Raw | None = None, work: Work | None = None) -> None:
        """`error` is the result of the call, or of the `work` that went on after it. `receipt` is its jail's."""
        if error.code == "E_SANDBOX_UNAVAILABLE":
            self._unmade()
        if isinstance(call, Listing):
            self._end_listing(call, refusal_of(call, error))
            return
        self.conclude(call, work, error_result(error, call.tool.error_message_limit, receipt))

    def conclude(self, call: Call, work: Work | None, payload: Raw) -> None:
        """End a call, or the work that went on after it."""
        if work is None:
            self.finish(call, payload)
        else:
            self.end_work(work, payload)

    def listed(self, call: Listing, listing: servers.ServerListing) -> None:
        """Tell an agent what a server offers."""
        self._end_listing(call, answer_of(call, listing))

    def _end_listing(self, call: Listing, answer: Frame) -> None:
        if call.state != "done":
            call.state = "done"
            self._send_frame(answer)

    def resend(self) -> None:
        """After a reconnect, send the results again that may have been lost."""
        for stored in self.calls.kept():
            self.send_stored(stored)

    def send_stored(self, stored: StoredResult) -> None:
        """Send the result of a finished call once more."""
        payload = stored.payload
        if payload is None:
            message = "the call has run, but its result was not kept"
            error = tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="ToolResultDropped")
            payload = error_result(error, DEFAULT_ERROR_LIMIT)
        self.send_result(stored.id, *stored.owner, payload)

    def send_result(
        self, call_id: str, agent: str | None, instance_key: str | None, payload: Raw, stage: str | None = None
    ) -> None:
        """Send a result that is not kept."""
        result = Frame("tool.result", call_id=call_id, to=agent, instance_key=instance_key, stage=stage)
        result.payload = payload
        self._send_frame(result)

    def progress(self, call: Call, progress: Progress) -> None:
        """A call reports progress. Not every report is passed on."""
        now = self._loop.time()
        if now - call.progress_at >= PROGRESS_S:
            call.progress_at = now
            message = None if progress.message is None else progress.message[:MAX_PROGRESS]
            told = codec.to_raw(runtime_events.ToolProgress(progress.done, progress.total, message))
            self._send_frame(
                Frame("tool.progress", call_id=call.id, to=call.agent, instance_key=call.instance_key, payload=told)
            )

    # --- pending work

    def begin_work(self, call: Call, chosen: str) -> Work | frames.ToolError:
        """A call is answered with `pending`, and `chosen` is the handler's name for the work. An error answers it
        instead.
        """
        handle = full_handle(call.tool.name, chosen)
        if handle is None:
            return tool_error("E_TOOL_BAD_OUTPUT", "the handle of the pending work is no name", name="PendingError")
        promise = Promise(
            agent=call.agent,
            instance_key=call.instance_key,
            handle=handle,
            tool=f"{call.tool.name}__{call.export.name}",
            call_id=call.id,
            turn_id=call.turn_id,
            tool_call_id=call.tool_call_id,
            root_event=call.root_event,
            trace_id=call.trace_id,
        )
        work = self.pending.begin(promise, self._loop.time())
        if work == "taken":
            message, hint = f"the handle {handle[:100]!r} is in use", "Give each piece of work its own handle."
            return tool_error("E_TOOL", message, name="PendingError", suggestion=hint)
        if work == "full":
            return too_much_pending(f"this agent instance, limit {MAX_RUNNING}")
        if work == "no room":
            return too_much_pending("all agents, for so long a handle")
        self._note_promises()
        return work

    def end_work(self, work: Work, payload: Raw) -> None:
        """The work's final result: for the calls that wait for it, or else an event for the agent."""
        pollers = self.pending.end(work, payload, self._loop.time())
        if pollers is None:
            return
        waiting = [call for call in pollers if call.state != "done"]
        for call in waiting:
            self.finish(call, payload)
        if waiting or work.promise.agent == frames.OPERATOR_AGENT:  # a person asks when it suits them
            self.pending.told(work.promise)
        else:
            self._announce(completion_event(work.promise, payload), lambda: self._told(work.promise))
        self._note_promises()

    def give_up(self, promises: Iterable[Promise]) -> None:
        """The work of an earlier tool host: its outcome is unknown."""
        for promise in promises:
            work = self.pending.begin(promise, self._loop.time(), again=True)
            if isinstance(work, Work):
                message = f"the work behind handle {promise.handle[:200]!r} was lost with the tool host that did it"
                error = tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="ToolHostLost")
                self.end_work(work, error_result(error, DEFAULT_ERROR_LIMIT))

    def poll(self, call: Call) -> None:
        """Answer a call of `tool-result__get`: now, or when the work ends, within the time that it may wait."""
        asked: dict[str, Any] = msgspec.msgpack.decode(call.args)
        handle, wait_s = str(asked["handle"]), float(asked.get("waitMs", 0)) / 1000
        work = self.pending.get(call.owner, handle)
        if work is None:
            message = f"no pending result {handle[:200]!r} is known: it is not yours, was fetched long ago, or was lost"
            hint = "Give the handle as it stands in the pending result: TOOL/NAME."
            self.fail(call, tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="PendingError", suggestion=hint))
            return
        if call.deadline is not None:
            wait_s = min(wait_s, call.deadline - self._loop.time() - POLL_MARGIN_S)
        if work.payload is not None:
            self.finish(call, work.payload)
        elif wait_s <= 0:
            self.finish(call, _still_pending(handle))
        else:
            work.pollers.append(call)
            self._loop.call_later(wait_s, self._waited, work, call)

    def forget(self, owner: tuple[str, str]) -> None:
        """The instance is deleted: nobody is told of the end of its work, in the next tool host neither."""
        self.pending.forget(owner)
        self._note_promises()

    def overdue(self) -> list[Work]:
        """Work that has run for too long; forget results that nobody asks for any more."""
        now = self._loop.time()
        self.pending.expire(now)
        return self.pending.overdue(now)

    def _told(self, promise: Promise) -> None:
        self.pending.told(promise)
        self._note_promises()

    def _note_promises(self) -> None:
        self._remember(self.pending.promised())

    def _waited(self, work: Work, call: Call) -> None:
        if call in work.pollers:
            work.pollers.remove(call)
            self.finish(call, _still_pending(work.promise.handle))


def too_much_pending(whose: str) -> frames.ToolError:
    """The error of a call whose work may not go on because too much does. `whose` says where, and how much may."""
    message = f"too much pending work is running for {whose}"
    return tool_error("E_OVERLOADED", message, name="PendingError", suggestion="Call again when some of it has ended.")


def _still_pending(handle: str) -> Raw:
    return Raw(codec.encode_value(frames.ToolResult(status="pending", handle=handle)))


def completion_event(promise: Promise, payload: Raw) -> Frame:
    """The event that tells an agent instance the result of its work. Its id is made from the call's."""
    told = frames.Completion(
        handle=promise.handle,
        tool_name=promise.tool,
        tool_call_id=promise.tool_call_id,
        turn_id=promise.turn_id,
        result=payload,
    )
    event_id = f"{promise.call_id}~completed"
    event = frames.AgentEvent(id=event_id, type=frames.TOOL_COMPLETED, created_at=rfc3339(time.time()), input=told)
    return Frame(
        "event",
        to=promise.agent,
        instance_key=promise.instance_key,
        event_id=event_id,
        payload=Raw(codec.encode_value(event)),
        root_event=promise.root_event,
        trace_id=promise.trace_id,
        parent_span_id=spans.call_span(promise.call_id),
    )
