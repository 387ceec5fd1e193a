"""What running tool calls ask of this agent (`tool.ask`), and the answers.

One turn has one ToolAsks. Who answers a kind of question registers a handler for it. Each question is handled once and
gets one answer, whatever is lost on the way: the tool host repeats a question under the same frame id, and the newest
answers of a call are kept for that.

Rules.
- A question counts only while its call is open here. Afterwards nobody waits for its answer.
- A repeat of a question whose answer is not kept any more is not handled again: its outcome is unknown.

Source: docs/design/tools.md section 12; PROTOCOL-TOOLHOSTS.md "Asking the caller".
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from msgspec import Raw, Struct

from goondan.agentproc.calls.caller import AgentLink
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import ErrorPayload, Frame
from goondan.schemas.wire.questions import MAX_ASK_BYTES, MAX_OPEN, ToolAnswer, ToolAsk

#: Answers that are kept for each call: a tool host has MAX_OPEN questions open, and as many answers may be on the way.
KEPT: Final = 4 * MAX_OPEN
#: Bytes of them. An answer is kept whole or not at all; the oldest go first.
KEPT_BYTES: Final = 16 << 20

log = logging.getLogger("agentproc")


class Asked:
    """One question. Call `answer` or `refuse` once; later calls do nothing, and so do those after the call's end."""

    __slots__ = ("_asks", "call_id", "frame_id", "kind", "number", "raw")

    def __init__(self, asks: ToolAsks, call_id: str, frame_id: str, ask: ToolAsk) -> None:
        self._asks = asks
        #: The callId of the call that asks.
        self.call_id = call_id
        self.frame_id = frame_id
        #: Its number in its call. A call that runs again asks under the same numbers again.
        self.number = ask.ask_id
        #: What is asked (schemas/wire/questions.py).
        self.kind = ask.kind
        #: The value as it came; nil without one.
        self.raw: Raw = Raw(b"\xc0") if ask.value is None else ask.value

    def read(self, kind: Any) -> Any:
        """The value as this type. Raises GoondanError E_FRAME_INVALID."""
        return from_raw(self.raw, kind)

    @property
    def open(self) -> bool:
        """Whether somebody waits for the answer."""
        return self._asks.waits_for(self)

    def answer(self, value: Any) -> None:
        """Answer with a JSON value, or with one that is encoded already (Raw)."""
        raw = value if isinstance(value, Raw) else Raw(encode_value(value))
        self._asks.send(self, ToolAnswer(self.number, raw))

    def refuse(self, error: ErrorPayload) -> None:
        """Answer with an error."""
        self._asks.send(self, ToolAnswer(self.number, None, error))


#: Handles a question: now, or later by calling a method of it. A GoondanError that it raises is the answer.
Handler = Callable[[Asked], None]


class _Call(Struct):
    """The questions of one call, by the ids of their frames."""

    #: Those without an answer.
    open: dict[str, Asked] = {}
    #: The questions that have an answer. There are some thousand at most: the tool host counts them.
    answered: set[str] = set()
    #: The newest answers.
    kept: dict[str, Raw] = {}
    #: Their bytes together.
    kept_bytes: int = 0

    def keep(self, frame_id: str, payload: Raw) -> None:
        self.answered.add(frame_id)
        self.kept[frame_id] = payload
        self.kept_bytes += len(memoryview(payload))
        while len(self.kept) > KEPT or self.kept_bytes > KEPT_BYTES:
            oldest = next(iter(self.kept))
            self.kept_bytes -= len(memoryview(self.kept.pop(oldest)))


class ToolAsks:
    """The questions of the calls of one turn."""

    def __init__(self, link: AgentLink, is_open: Callable[[str], bool]) -> None:
        """`is_open` tells whether a call, by its callId, waits for its result."""
        self._link = link
        self._is_open = is_open
        self._handlers: dict[str, Handler] = {}
        #: The calls that have asked something, by their callIds.
        self.calls: defaultdict[str, _Call] = defaultdict(_Call)

    def handle(self, kind: str, handler: Handler) -> None:
        """`handler` gets the questions of this kind."""
        self._handlers[kind] = handler

    def take(self, frame: Frame) -> None:
        """Handle a `tool.ask` frame. Raises GoondanError E_FRAME_INVALID for one that cannot be read."""
        call_id = frame.call_id or ""
        if len(memoryview(frame.payload)) > 2 * MAX_ASK_BYTES:
            raise GoondanError(error_payload("E_FRAME_TOO_LARGE", "a question of a call is too large"))
        asked = Asked(self, call_id, frame.id, from_raw(frame.payload, ToolAsk))
        if not self._is_open(call_id):
            self._send(asked, to_raw(_error(asked, error_payload("E_CALL_ENDED", "the call has ended"))))
            return
        call = self.calls[call_id]
        if frame.id in call.open:
            return  # it will be answered
        if frame.id in call.answered:
            self._send(asked, call.kept.get(frame.id) or to_raw(_error(asked, _UNKNOWN)))
            return
        call.open[frame.id] = asked
        handler = self._handlers.get(asked.kind)
        if handler is None:
            what = f"this agent answers no question of the kind {asked.kind[:100]!r}"
            asked.refuse(error_payload("E_FORBIDDEN", what))
            return
        try:
            handler(asked)
        except GoondanError as error:
            asked.refuse(error.info)
        except Exception as error:  # a bug of ours costs this question, and no turn
            log.exception("a question of the call %s", call_id)
            asked.refuse(error_payload("E_INTERNAL", f"the question failed: {type(error).__name__}"))

    def waits_for(self, asked: Asked) -> bool:
        """Whether a question has no answer yet, and its call waits for one."""
        call = self.calls.get(asked.call_id)
        return call is not None and call.open.get(asked.frame_id) is asked

    def send(self, asked: Asked, answer: ToolAnswer) -> None:
        """Answer a question, unless that was done before or nobody waits."""
        if not self.waits_for(asked):
            return
        call = self.calls[asked.call_id]
        del call.open[asked.frame_id]
        payload = to_raw(answer)
        call.keep(asked.frame_id, payload)
        self._send(asked, payload)

    def answered(self, call_id: str, frame_id: str) -> None:
        """The tool host has answered this question itself, with the output of the call that was made for it."""
        call = self.calls[call_id]
        if call.open.pop(frame_id, None) is not None:
            call.answered.add(frame_id)

    def _send(self, asked: Asked, payload: Raw) -> None:
        frame = Frame("tool.answer", call_id=asked.call_id, in_reply_to=asked.frame_id, payload=payload)
        try:
            self._link.send(frame)  # while no broker is there, the question is on its way again
        except GoondanError as error:
            frame.payload = to_raw(_error(asked, error.info))
            self._link.send(frame)

    def drop(self, call_id: str) -> list[Asked]:
        """A call has ended: forget its questions. Returns those that were open."""
        call = self.calls.pop(call_id, None)
        return [] if call is None else list(call.open.values())

    def close(self) -> None:
        """Forget every question: the turn is left."""
        self.calls.clear()


#: The answer to a repeated question when the first answer is gone.
_UNKNOWN: Final = error_payload("E_TOOL_OUTCOME_UNKNOWN", "the question was answered before, and the answer is lost")


def _error(asked: Asked, error: ErrorPayload) -> ToolAnswer:
    return ToolAnswer(asked.number, None, error)


def unsent_answer(frame: Frame, error: GoondanError) -> Frame:
    """The answer in place of one whose large payload could not be written."""
    told = from_raw(frame.payload, ToolAnswer)
    payload = to_raw(ToolAnswer(told.ask_id, None, error.info))
    return Frame("tool.answer", call_id=frame.call_id, in_reply_to=frame.in_reply_to, payload=payload)
