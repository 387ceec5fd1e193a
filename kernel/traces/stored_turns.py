"""What is stored of a turn: its steps as the reader of a stream gets them, and its answer.

A conversation file is read while its agent writes it (kernel/traces/conversations.py). The messages of a running turn
are events of it; when it ends, they become part of the conversation, in the transaction that stores the answer. A step
is found by its note: the one whose model has answered has the next message of the model.

Source: docs/design/turns.md sections 3 and 4; schemas/traces/turn_notes.py.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

import msgspec

from goondan.kernel.traces.conversations import OF_TURN, place_of, read_file
from goondan.kernel.traces.rules.progress import Call, Stored
from goondan.kernel.traces.search import answer_of
from goondan.schemas.system import trace_index
from goondan.schemas.text.visible import argument_line
from goondan.schemas.wire import codec

_TURN: Final = "SELECT turn_id, status, answer, first_note FROM turns WHERE event_key = ?"
_STEPS: Final = (
    "SELECT type, detail FROM runtime_events WHERE seq >= ? AND turn_id = ? "
    "AND type IN ('step.started', 'model.answered') ORDER BY seq"
)


def instance_of(state_dir: str, event_id: str) -> tuple[str, str] | None:
    """The agent and the instance whose turn an event has begun, as the index of traces says; None: it has none."""
    rows = trace_index.named(state_dir, event_id)
    return (rows[-1].agent, rows[-1].instance_key) if rows else None


def read_turn(state_dir: str, agent: str, instance: str, event_id: str) -> Stored | None:
    """What the conversation of an instance has of the turn of an event; None: the turn was not begun.

    Raises GoondanError E_STATE.
    """
    return read_file(place_of(state_dir, agent, instance), lambda db: _read(db, event_id))


def _read(db: sqlite3.Connection, event_id: str) -> Stored | None:
    row = db.execute(_TURN, (event_id,)).fetchone()
    if row is None:
        return None
    turn_id, status, answer, first_note = row
    answered, number = [], 0
    for kind, detail in db.execute(_STEPS, (first_note or 0, turn_id)):
        if kind == "step.started":
            number = int(detail) if str(detail).isdigit() else number + 1
        elif number not in answered:
            answered.append(number)
    said: dict[str, tuple[str, list[Call]]] = {}
    ends: dict[str, tuple[str, str | None]] = {}
    for (data,) in db.execute(OF_TURN, (event_id,)):
        try:
            message = msgspec.msgpack.decode(data)
            found = message["data"]
            if found["role"] == "assistant":
                said[message["id"]] = _said(found["content"])
            elif found["role"] == "tool":
                ends |= {part["toolCallId"]: _end(part["result"]) for part in found["content"]}
        except (*codec.DECODE_ERRORS, KeyError, TypeError, AttributeError):
            continue  # another version may write others
    for _, calls in said.values():
        for call in calls:
            call.end, call.code = ends.get(call.tool_call_id, ("", None))
    steps = dict(zip(answered, said.values(), strict=True)) if len(said) == len(answered) else {}
    return Stored(steps, None if status == "running" else answer_of(answer))


def _end(result: Any) -> tuple[str, str | None]:
    if result["status"] == "error":
        return "failed", (result.get("error") or {}).get("code")
    return "completed", None


def _said(content: list[Any]) -> tuple[str, list[Call]]:
    parts = [part for part in content if isinstance(part, dict)]
    calls = [
        Call(part["toolCallId"], part["toolName"], argument_line(part["args"]) or None)
        for part in parts
        if part.get("type") == "tool-call"
    ]
    return "".join(part["text"] for part in parts if part.get("type") == "text"), calls
