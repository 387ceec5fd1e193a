"""What the model calls of one turn have used, asides and models in another's place included. Pure.

It is counted when the end of a call is noted, and read again from the notes by whoever resumes the turn. So a call
counts exactly when its note is stored.

Source: docs/design/traces.md section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from goondan.agentproc.providers.base import Usage as CallUsage
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.traces.turn_notes import ModelDetail, used_by_call
from goondan.schemas.wire.usage import Part, Usage, Used, total_of

#: The most tokens of one call that are believed: more than any model reads or writes at once, by far.
_MOST: Final = 1_000_000_000


class TurnUsage:
    """The sums of a turn, each of one day and one model."""

    __slots__ = ("model", "parts")

    def __init__(self) -> None:
        self.parts: dict[Part, Used] = {}
        #: The model that answered last, as `provider/name`; None: none has.
        self.model: str | None = None

    def count(self, ended: ModelDetail, at: str) -> None:
        """Count a model call whose end was noted at this time (RFC 3339 in UTC)."""
        if ended.code is None:
            self.model = ended.model or self.model
        counted = used_by_call(at, ended)
        if counted is not None:
            part, used = counted
            self.parts.setdefault(part, Used()).add(used)

    def count_notes(self, notes: Iterable[tuple[str, str | None]]) -> None:
        """Count what the notes of an earlier incarnation say: time and detail of each end of a model call."""
        for at, detail in notes:
            try:
                ended = msgspec.json.decode(detail or "", type=ModelDetail)
            except (msgspec.DecodeError, UnicodeError):
                continue  # of another version
            self.count(ended, at)

    @property
    def total(self) -> Usage | None:
        """The sum; None when no model was asked."""
        return total_of(self.parts.items()) if self.parts else None


def used_by(usage: CallUsage) -> Used:
    """What one call used, without its price. A server may report any number."""
    read, written = _believed(usage.input_tokens, _MOST), _believed(usage.output_tokens, _MOST)
    cached = _believed(usage.cached_tokens, read)
    return Used(
        input_tokens=read,
        output_tokens=written,
        cached_tokens=cached,
        cache_write_tokens=_believed(usage.cache_write_tokens, read - cached),
        reasoning_tokens=_believed(usage.reasoning_tokens, written),
    )


def _believed(tokens: int, most: int) -> int:
    return max(0, min(tokens, most))


def money_of(model: ModelSpec, used: Used) -> int | None:
    """What a call of a model cost: billionths of its currency. None: the model has no price."""
    return None if model.pricing is None else used.cost(model.pricing)
