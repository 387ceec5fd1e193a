"""What servers ask people within a call: each question is an item that an operator answers (`gdn approve answer`).

Rules.
- The broker keeps the item, checks the answer against the question's schema, and stops the clocks meanwhile. The item
  is named after the call and the number of the question, so a process that takes the turn up asks the same again and
  gets the answer that is there.
- `decline` is a person's no, `cancel` that nobody has answered in time.
- A call that ends without its answer withdraws the item. But a call whose server has not begun with it
  (ServerQuestion.again) is made anew when its server or tool host is lost: it asks the same again, and the item stands.

Source: docs/mcp.md; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import structs

from goondan.agentproc.calls.asks import Asked
from goondan.agentproc.turn.parts import TurnCore
from goondan.features.approvals.wire import MAX_MESSAGE, ApprovalAsk, ApprovalState
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.servers import ServerAnswer, ServerQuestion

#: What a call that was made again has behind its id (agentproc/calls/caller.py).
_AGAIN: Final = re.compile(r"~[0-9]+\Z")
#: Any answer to a question that only wants to know whether something is done.
_NOTHING: Final = {"type": "object", "maxProperties": 0}


class Questions:
    """The questions of the calls of one turn."""

    def __init__(self, turn: TurnCore) -> None:
        self._turn = turn
        #: The id of the item -> the question, and what was asked for it.
        self._open: dict[str, tuple[Asked, ApprovalAsk, str]] = {}

    def take(self, asked: Asked) -> None:
        """A server asks. Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN."""
        question: ServerQuestion = asked.read(ServerQuestion)
        tool = self._turn.instance.caller.tool_of(asked.call_id)
        if tool is None:
            raise GoondanError(error_payload("E_CALL_ENDED", "the call has ended"))
        if question.again:
            self._turn.calls.may_repeat(asked.call_id)
        name = item_name(asked.call_id, asked.number)
        self._open[name] = (asked, ask_of(tool, question), tool)
        self._ask(name)

    def news(self, call_ids: Iterable[str]) -> None:
        """A person has decided about these items."""
        for name in call_ids:
            if name in self._open:
                self._ask(name)

    def over(self, call_id: str) -> None:
        """A call has ended: its questions have no asker any more."""
        for name in [name for name in self._open if name.rpartition("?")[0] == call_id]:
            _, ask, tool = self._open.pop(name)
            with suppress(GoondanError):  # the end of the event withdraws it in any case
                self._post(name, structs.replace(ask, over=True), tool).add_done_callback(_heard)

    def close(self) -> None:
        """Forget all questions: the turn is left. Their items stand as long as its event does."""
        self._open.clear()

    # --- inside

    def _ask(self, name: str) -> None:
        asked, ask, tool = self._open[name]
        try:
            future = self._post(name, ask, tool)
        except GoondanError as error:
            self._refuse(name, error)
            return
        future.add_done_callback(partial(self._answered, name, asked))

    def _post(self, name: str, ask: ApprovalAsk, tool: str) -> asyncio.Future[Frame]:
        context = self._turn.calls.context
        frame = Frame("approval.ask", tool=tool, call_id=name, event_id=context.event_id, epoch=context.epoch)
        frame.payload = to_raw(ask)
        return self._turn.instance.link.post(frame)

    def _answered(self, name: str, asked: Asked, future: asyncio.Future[Frame]) -> None:
        known = self._open.get(name)
        if known is None or known[0] is not asked or future.cancelled():
            return
        error = future.exception()
        if isinstance(error, GoondanError):
            self._refuse(name, error)
            return
        state = from_raw(future.result().payload, ApprovalState)
        if state.state == "waits":
            return
        del self._open[name]
        asked.answer(to_raw(elicited(state)))

    def _refuse(self, name: str, error: GoondanError) -> None:
        asked, _, _ = self._open.pop(name)
        asked.refuse(error.info)


def _heard(future: asyncio.Future[Frame]) -> None:
    if not future.cancelled():
        future.exception()  # the lease may be gone, and the item with it


def item_name(call_id: str, number: int) -> str:
    """The id of the item of a question: the same for a call that is made again."""
    return f"{_AGAIN.sub('', call_id)}?{number}"


def ask_of(tool: str, question: ServerQuestion) -> ApprovalAsk:
    """The question as a person is asked it."""
    server = tool.partition("__")[0]
    if question.mode == "url":
        text = f"The MCP server of {server} wants you to open a page: {question.url}\n{question.message}"
        return ApprovalAsk(kind="question", args=to_raw({}), message=text[:MAX_MESSAGE], schema=to_raw(_NOTHING))
    text = f"The MCP server of {server} asks: {question.message}"
    schema = question.schema or {"type": "object"}
    return ApprovalAsk(kind="question", args=to_raw({}), message=text[:MAX_MESSAGE], schema=to_raw(schema))


def elicited(state: ApprovalState) -> ServerAnswer:
    """The answer to the server."""
    if state.state != "answered":
        return ServerAnswer(action="cancel" if state.expired else "decline")
    content = None if state.answer is None else from_raw(state.answer, dict)
    return ServerAnswer(action="accept", content=content or None)
