"""Messages: sent, answered, streamed and cancelled.

A message has an event id of ours: it says by whose token it was sent, and with an `Idempotency-Key` it is the digest
of both. So a repeat is the same event for every door and every kernel, whoever remembers what; and a token cancels its
own.

Source: docs/design/delivery.md section 2; RFC 9110; the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response, StreamingResponse

from goondan.features.serve.api.problems import document, problem
from goondan.features.serve.api.routing import Asked, json_answer
from goondan.features.serve.api.swarm import ID_IN_USE, IDLE, Swarm, Turn
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.operations import PREFIX, Operation
from goondan.kernel.cli.output import answer_document
from goondan.kernel.cli.rules import batch
from goondan.kernel.cli.state import absolute_workdir
from goondan.kernel.traces.rules.progress import News, Position, position_of
from goondan.schemas.wire import blobs, frames, spans, usage
from goondan.schemas.wire.errors import GoondanError, fail

#: How long a request waits for its answer by default, and at most (seconds).
ANSWER_S: Final = 600.0
MAX_ANSWER_S: Final = 86_400.0
#: Nothing is said on a stream for so long, then a comment (seconds): less than proxies wait for.
HEARTBEAT_S: Final = 15.0
#: The longest Idempotency-Key (characters).
MAX_KEY: Final = 255
#: A text of one request, and the files beside it as base64 (bytes).
MAX_SENT: Final = (blobs.MAX_MESSAGE_BYTES * 4) // 3 + (4 << 20)
#: After how many milliseconds a client connects again whose stream has ended without an answer.
RETRY_MS: Final = 1000
_STREAM: Final = "text/event-stream"
_DIGITS: Final = 12


class SentFile(Struct, forbid_unknown_fields=True):
    """A picture or a PDF beside a message."""

    #: The bytes, as base64.
    data: bytes
    #: Its name.
    name: Annotated[str, Meta(min_length=1, max_length=blobs.MAX_NAME_CHARS)] | None = None


class Send(Struct, forbid_unknown_fields=True, rename="camel"):
    """A message to an agent."""

    #: What it says.
    text: str = ""
    #: The agent. None: the entry agent of the bundle.
    agent: str | None = None
    #: The instance.
    instance: str = "default"
    #: Pictures (png, jpeg, gif, webp) and PDFs.
    files: Annotated[list[SentFile], Meta(max_length=blobs.MAX_FILES)] = []
    #: Where tools work: an absolute path; with the role `operate` only. None: in the instance's own directory.
    workdir: str | None = None
    #: The turn ends after so many seconds. None: after 600 when the request waits for the answer, else never.
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_ANSWER_S)] | None = None
    #: The trace that it belongs to, 32 hexadecimal digits. None: a new one.
    trace_id: str | None = None


class Accepted(Struct, rename="camel", omit_defaults=True):
    """A message that the kernel has, and whose answer is not here."""

    #: The id of the message.
    event_id: str
    #: `accepted`: its turn waits or runs.
    status: str
    #: Its trace. None: it is not known here.
    trace_id: str | None = None


class Answered(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """The answer to a message. One whose turn failed is a problem document with these members."""

    #: The id of the message.
    event_id: str
    #: The turn.
    turn_id: str
    #: The trace.
    trace_id: str | None
    #: `completed`, or in a stream `failed`.
    status: str
    #: The text of the answer.
    response: str | None
    #: Why the model ended its last message.
    finish_reason: str | None
    #: Of an agent with an output schema: the value that the response is.
    object: Any = None
    #: The model that answered last, as `provider/name`.
    model: str | None = None
    #: What the model calls of the turn have used.
    usage: usage.Usage | None = None
    #: Whether the response ends where the model reached its limit of tokens.
    cut_off: bool = False
    #: The reasoning of the model's last message.
    reasoning: str | None = None
    #: In a stream: why the turn failed.
    error: frames.ErrorPayload | None = None


class Where(Struct, forbid_unknown_fields=True):
    """Whose message is meant. It need not be said of one whose turn has begun."""

    #: The agent.
    agent: str | None = None
    #: The instance.
    instance: str = "default"

    @property
    def place(self) -> tuple[str, str] | None:
        """Both; None: nothing is said."""
        return None if self.agent is None else (self.agent, batch.check_instance(self.instance))


class WaitFor(Where, forbid_unknown_fields=True, rename="camel"):
    """For how long the request waits."""

    #: Seconds.
    wait_s: Annotated[float, Meta(ge=0, le=ANSWER_S)] = 0.0


class Cancelled(Struct, rename="camel"):
    """How a message has ended."""

    #: The id of the message.
    event_id: str
    #: `cancelled`, or as it had ended before.
    status: str


@lru_cache(256)
def own_prefix(name: str) -> str:
    """How the event ids of a token begin (pure)."""
    return hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]


def event_id_of(name: str, key: str | None) -> str:
    """The event id of a request: of a key always the same."""
    if key is None:
        return f"{own_prefix(name)}-{os.urandom(12).hex()}"
    if not 0 < len(key) <= MAX_KEY or not key.isprintable():
        raise fail("E_USAGE", f"an Idempotency-Key has 1 to {MAX_KEY} characters, all of them visible")
    digest = hashlib.sha256(f"{name}\0{key}".encode()).hexdigest()
    return f"{own_prefix(name)}-k{digest[:32]}"


async def send(asked: Asked) -> Any:
    """Send a message; the answer, a stream, or the word that it is accepted."""
    sent: Send = asked.body
    headers = asked.headers
    agent = sent.agent or await asked.swarm.entry_agent()
    if not agent:
        raise fail("E_USAGE", "the bundle has no entry agent", suggestion="Name the `agent`.")
    asked.caller.check_agent(agent)
    streams = _STREAM.encode() in headers.get(b"accept", b"")
    leaves = b"respond-async" in headers.get(b"prefer", b"")
    timeout_s = sent.timeout_s or (None if streams or leaves else ANSWER_S)
    key = headers.get(b"idempotency-key")
    event_id = event_id_of(asked.caller.name, None if key is None else key.decode("latin-1"))
    after = _after(headers.get(b"last-event-id")) if streams else None
    try:
        message = await _message(asked, sent, agent, event_id)
        if streams:
            turn = await asked.swarm.begin(message, timeout_s)
            return stream(asked.swarm, turn, after)
        if leaves:
            return await _leave(asked.swarm, message, timeout_s)
        answer = await asked.swarm.ask(message, timeout_s, new=key is None)
    except GoondanError as error:
        # One that was refused, or whose answer did not come. Under its id it can be asked for.
        conflict = error.info.code == "E_FRAME_INVALID" and error.info.message.startswith(ID_IN_USE)
        return problem(error, 409 if conflict else None, event_id=event_id)
    return answer_of(event_id, answer)


async def _leave(swarm: Swarm, message: Message, timeout_s: float | None) -> Response:
    event_id = message.event_id or ""
    turn = None if timeout_s is None else await swarm.begin(message, timeout_s)
    trace_id = await swarm.tell(message) if turn is None else turn.accepted.result()
    return json_answer(Accepted(event_id, "accepted", trace_id), 202, {"location": f"{PREFIX}/messages/{event_id}"})


def answer_of(event_id: str, answer: frames.Answer) -> Any:
    """The answer of a turn; of one that failed, its problem."""
    if answer.error is None:
        return answer_document(event_id, answer, reasoning=True)
    ended: dict[str, Any] = {"event_id": event_id, "turn_id": answer.turn_id, "trace_id": answer.trace_id}
    return problem(GoondanError(answer.error), finish_reason=answer.finish_reason, **ended)


async def _message(asked: Asked, sent: Send, agent: str, event_id: str) -> Message:
    if not sent.text.strip() and not sent.files:
        raise fail("E_USAGE", "the message is empty", suggestion="Give it a `text`.")
    trace_id, span_id = sent.trace_id, None
    if trace_id is None and b"traceparent" in asked.headers:
        parent = asked.headers[b"traceparent"].decode("latin-1")
        trace_id, span_id = spans.read_traceparent(parent) or (None, None)
    elif trace_id is not None and not spans.is_trace_id(trace_id):
        raise fail("E_USAGE", "a trace id has 32 hexadecimal digits, in lower case and not all of them zero")
    workdir = sent.workdir
    if workdir is not None:
        if not asked.caller.may("operate"):
            raise fail("E_FORBIDDEN", "a `workdir` takes a token with the role operate")
        workdir = absolute_workdir(workdir, asked.swarm.place)
    key = batch.check_instance(sent.instance)
    files = sent.files and await asked.swarm.lay_down([(file.data, file.name or "") for file in sent.files])
    given: dict[str, Any] = {"workdir": workdir, "trace_id": trace_id, "parent_span_id": span_id, "files": files}
    return Message(agent, key, sent.text, event_id=event_id, **given)


# --- streams ----------------------------------------------------------------------------------------------------------


def _after(header: bytes | None) -> Position | None:
    """The position of a stream that goes on; None: its end. Raises GoondanError E_USAGE."""
    try:
        return Position() if header is None else position_of(header.decode("latin-1"))
    except ValueError:
        hint = "Leave it out: the stream begins anew then."
        raise fail("E_USAGE", "the Last-Event-ID is none of a stream of this API", suggestion=hint) from None


def stream(swarm: Swarm, turn: Turn, after: Position | None) -> Response:
    """The stream of a turn behind a position. None: there is nothing more, and a client need not come back."""
    if after is None:
        return Response(status_code=204)
    return StreamingResponse(_events(swarm, turn, after), headers={"x-accel-buffering": "no"}, media_type=_STREAM)


async def _events(swarm: Swarm, turn: Turn, after: Position) -> AsyncIterator[bytes]:
    accepted = Accepted(turn.event_id, "accepted", turn.accepted.result())
    yield f"retry: {RETRY_MS}\n\n".encode() + _event(News("accepted", accepted))
    try:
        async with aclosing(turn.read(swarm.state_dir, after, HEARTBEAT_S)) as reading:
            async for news in reading:
                yield b":\n\n" if news is IDLE else _event(news, turn.event_id)
    except GoondanError as error:
        yield _event(News("error", document(error.info, event_id=turn.event_id)))


def _event(news: News, event_id: str = "") -> bytes:
    data = answer_document(event_id, news.data, reasoning=True) if news.kind == "answer" else news.data
    place = b"" if news.position is None else b"id: " + news.position.encode() + b"\n"
    return b"event: " + news.kind.encode() + b"\n" + place + b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _turn_of(asked: Asked) -> Turn:
    """The turn of a message that was sent. Raises GoondanError E_EVENT_NOT_FOUND, E_FORBIDDEN."""
    turn = await asked.swarm.turn(asked.path["eventId"], asked.query.place)
    asked.caller.check_agent(turn.agent)
    return turn


async def look(asked: Asked) -> Any:
    """The answer to a message, or the word that its turn waits or runs."""
    turn = await _turn_of(asked)
    if turn.message is None:
        await asyncio.shield(turn.accepted)  # its file was read then: it may have been answered long ago
    try:
        async with asyncio.timeout(asked.query.wait_s):
            answer = await asyncio.shield(turn.answered)
    except TimeoutError:
        trace_id = turn.accepted.result() if turn.accepted.done() and not turn.accepted.exception() else None
        return json_answer(Accepted(turn.event_id, "accepted", trace_id), 202)
    return answer_of(turn.event_id, answer)


async def follow(asked: Asked) -> Any:
    """The stream of a message behind its Last-Event-ID."""
    after = _after(asked.headers.get(b"last-event-id"))
    turn = await _turn_of(asked)
    await asyncio.shield(turn.accepted)
    return stream(asked.swarm, turn, after)


async def cancel(asked: Asked) -> Any:
    """Cancel a message."""
    event_id = asked.path["eventId"]
    if not asked.caller.may("operate") and not event_id.startswith(f"{own_prefix(asked.caller.name)}-"):
        raise fail("E_FORBIDDEN", "this token has not sent that message")
    turn = await _turn_of(asked)
    return Cancelled(turn.event_id, await asked.swarm.cancel(turn.event_id))


_ID: Final = "/messages/{eventId}"
_SEND: Final = (
    "Send a message and wait for its answer. `Accept: text/event-stream` streams the turn, `Prefer: respond-async` "
    "returns when it is accepted. A repeat with the same `Idempotency-Key` is the same message."
)
OPERATIONS: Final = (
    Operation("sendMessage", "POST", "/messages", "talk", _SEND, send, Answered, None, Send, MAX_SENT, True, Accepted),
    Operation("getMessage", "GET", _ID, "look", "The answer to a message.", look, Answered, WaitFor, later=Accepted),
    Operation("followMessage", "GET", f"{_ID}/stream", "look", "Its stream.", follow, None, Where, streams=True),
    Operation("cancelMessage", "POST", f"{_ID}/cancel", "talk", "Cancel it.", cancel, Cancelled, Where),
)
