"""What a running turn notes about itself, for traces: called inside the transactions that store what is noted.

Source: design sections 5 and 11; schemas/traces.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from agentproc.catalog import StepCatalog
from agentproc.conversation import Message, ToolData
from agentproc.providers.base import ModelRequest, Usage
from agentproc.store import ConversationStore
from agentproc.turn import Action, AskModel, RunTool
from schemas.codec import from_raw
from schemas.errors import GoondanError
from schemas.receipts import Receipt, kept
from schemas.traces import CallDetail, ModelDetail, NoteKind, ResultDetail, encode_detail, encode_receipt

log = logging.getLogger("agentproc")


class TurnNotes:
    """The notes of one turn."""

    def __init__(self, store: ConversationStore, turn_id: str) -> None:
        self._store = store
        self._turn_id = turn_id
        self._model_end: ModelDetail | None = None  # of a model call whose end is not stored yet
        self._receipts: dict[str, Raw] = {}  # of calls whose results are not stored yet

    def turn(self, kind: NoteKind, at: str) -> None:
        """Begin, resumption or end of the turn."""
        self._store.note(self._turn_id, kind, at)

    def actions(self, actions: Sequence[Action], at: str, catalog: StepCatalog) -> None:
        """Model calls and tool calls that go out now, those from `catalog` or past it."""
        for action in actions:
            if isinstance(action, AskModel):
                self._store.note(self._turn_id, "step.started", at, str(action.step))
            elif isinstance(action, RunTool):
                name = action.part.tool_name
                called = CallDetail(action.part.tool_call_id, name, catalog.is_outside(name))
                self._store.note(self._turn_id, "tool.called", at, encode_detail(called))

    def results(self, message: Message, at: str) -> None:
        """The results in a message."""
        for part in results_of(message):
            code = part.result.error.code if part.result.error is not None else None
            kind: NoteKind = "tool.failed" if part.result.status == "error" else "tool.completed"
            receipt = self._receipt(part.tool_call_id)
            detail = ResultDetail(part.tool_call_id, part.result.status, code, receipt)
            self._store.note(self._turn_id, kind, at, encode_detail(detail))

    def received(self, tool_call_id: str, receipt: Raw) -> None:
        """The tool host's receipt of a call: noted with the call's result, whatever middleware makes of that."""
        self._receipts[tool_call_id] = receipt

    def _receipt(self, tool_call_id: str) -> Raw | None:
        data = self._receipts.pop(tool_call_id, None)
        try:
            return None if data is None else encode_receipt(kept(from_raw(data, Receipt)))
        except GoondanError as error:
            log.warning("call %s: its receipt cannot be read: %s", tool_call_id, error.info.message)
            return None

    def model_ended(
        self,
        request: ModelRequest,
        *,
        code: str | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        """A model call has ended; noted with what is stored next."""
        self._model_end = ModelDetail(
            step=request.step,
            model=f"{request.model.provider}/{request.model.model}".rstrip("/"),
            finish_reason=finish_reason,
            input_tokens=None if usage is None else usage.input_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            code=code,
        )

    def model(self, at: str) -> None:
        """Note the end of the model call that was remembered."""
        ended, self._model_end = self._model_end, None
        if ended is not None:
            kind: NoteKind = "model.failed" if ended.code is not None else "model.answered"
            self._store.note(self._turn_id, kind, at, encode_detail(ended))


def results_of(message: Message) -> list[Any]:
    """The result parts of a tool message, none of any other."""
    return message.data.content if isinstance(message.data, ToolData) else []
