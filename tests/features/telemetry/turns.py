"""Turns on disk, as agents store them, for tests of the exporter."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from goondan.agentproc.conversation.store import ConversationStore
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.system.trace_index import IndexRow, TraceIndex
from goondan.schemas.traces.turn_notes import (
    CallDetail,
    ModelDetail,
    RefusedDetail,
    ResultDetail,
    TurnDetail,
    TurnStatus,
    encode_detail,
    encode_receipt,
)
from goondan.schemas.wire.spans import call_span, model_span, step_span, turn_span
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt

BEGAN = datetime(2026, 11, 23, 9, tzinfo=UTC)
TRACE = "ab" * 16
ASKER = "cd" * 8
#: A note: its kind, how many milliseconds after the beginning, its detail, the span around it.
Said = tuple[str, int, str | None, str | None]


def at(ms: int) -> str:
    """A time after BEGAN."""
    return (BEGAN + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Turns:
    """A workspace, whose turns are one instance's."""

    def __init__(self, folder: Path, agent: str = "main", key: str = "k") -> None:
        self.folder, self.agent, self.key = folder, agent, key
        self.store = ConversationStore(instance_dir(str(folder), agent, key))
        self.store.adopt(1)
        self.index = TraceIndex(str(folder))

    def begin(self, name: str, ms: int = 0, *, parent: str | None = None, stored: bool = True) -> str:
        """Begin a turn of the event `name`."""
        turn_id = f"t-{name}"
        self.index.add(IndexRow(at(ms), TRACE, turn_id, name, self.agent, self.key))
        if stored:
            with self.store.write():
                self.store.begin_turn(name, turn_id, 1, at(ms), trace_id=TRACE, parent_span_id=parent, waited_ms=7)
        return turn_id

    def note(self, turn_id: str, notes: Iterable[Said]) -> None:
        """Store notes."""
        with self.store.write():
            for kind, ms, detail, parent in notes:
                self.store.notes.append((turn_id, kind, at(ms), detail, "ef" * 8, parent))

    def end(self, name: str, ms: int, status: TurnStatus = "completed", answer: bytes | None = None) -> None:
        """End it."""
        with self.store.write(final=True):
            self.store.finish_turn(name, f"t-{name}", status, at(ms), steps=1, answer=answer)

    def simple(self, name: str, ms: int = 0) -> None:
        """A turn with one step, one model call and one tool call."""
        turn_id = self.begin(name, ms, parent=ASKER)
        self.note(turn_id, simple(turn_id, ms))
        self.end(name, ms + 100)

    def close(self) -> None:
        """Give the files back."""
        self.store.close()
        self.index.close()


def simple(turn_id: str, ms: int = 0) -> list[Said]:
    """The notes of a step with a model call and a tool call that a person was asked about."""
    turn, step = turn_span(turn_id), step_span(turn_id, 1)
    receipt = Receipt(
        jail=JailReceipt(tier="full", walls=["namespaces"], limits={}, cpu_ms=3, peak_memory_kb=900, reached=["a:443"]),
        call=CallReceipt(wall_ms=4.0, denied=["b:80"]),
    )
    answered = ModelDetail(
        step=1,
        model="responses/m-2",
        asked="m",
        finish_reason="tool_calls",
        input_tokens=10,
        output_tokens=3,
        cached_tokens=4,
        waited_ms=20,
        money=5_000_000,
        currency="USD",
    )
    refused = RefusedDetail("grant", "E_NET", "no way to b:80", "add it", "shell__run", "c1")
    return [
        ("turn.started", ms, encode_detail(TurnDetail(TRACE, 7, False, 2)), ASKER),
        ("step.started", ms + 1, "1", turn),
        ("model.answered", ms + 40, encode_detail(answered), step),
        ("tool.called", ms + 41, encode_detail(CallDetail("c1", "shell__run", args='{"a":1}')), step),
        ("tool.waits", ms + 42, '"c1"', step),
        (
            "tool.completed",
            ms + 80,
            encode_detail(ResultDetail("c1", "ok", receipt=encode_receipt(receipt), output='"done"')),
            step,
        ),
        ("call.refused", ms + 80, encode_detail(refused), step),
        ("step.completed", ms + 90, "1", turn),
        ("turn.completed", ms + 100, None, ASKER),
    ]


#: The spans of such a turn, in the order in which they end.
def ids(turn_id: str) -> list[str]:
    return [
        model_span(turn_id, 1),
        call_span(f"{turn_id}/c1"),
        step_span(turn_id, 1),
        turn_span(turn_id),
    ]
