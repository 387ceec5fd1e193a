"""The history of decisions: who decided what, and when. It stays when the items have ended with their events. Pure.

Rules.
- Each decision is written down with the call that it is about, also when the kernel decides because nobody answered.
- The user is the one whose token decided. The token is signed, and lies in a file that only this user and root can
  read. What a client says about itself does not count.
- Answers are not kept. The beginning of arguments and reasons is kept, without keys of models.
- The last MAX_KEPT are kept.

Source: docs/approvals.md, "Who may answer".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from goondan.kernel.broker.approvals.items import ApprovalAsked, ApprovalRemembered, Decided, Item, decision_kept
from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.one_frame import fitting
from goondan.schemas.approvals import ApprovalDecided
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError

#: Decisions that are remembered: some weeks for a person who is asked often. Each takes about a KiB.
MAX_KEPT: Final = 1000
#: Characters that are kept of arguments, of a question and of a reason.
MAX_TEXT: Final = 300


class History:
    """The last decisions, the oldest first."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: deque[ApprovalRemembered] = deque()

    def restore(self, subject: str, record: ApprovalRemembered) -> None:
        """Take over a record of an earlier broker; they come in the order of their numbers."""
        self._kept.append(record)

    def add(self, item: Item, decided: Decided, asked: ApprovalAsked | None, asked_ms: int) -> None:
        """Write a decision down. `asked` is the journal's record of the item."""
        redact = Redactor(*(model.api_key for spec in self._bus.plan.agents.values() for model in spec.models))
        instance = item.event.instance
        entry = ApprovalDecided(
            code=item.code,
            id=item.id,
            kind=item.kind,
            agent=instance.agent,
            instance_key=instance.key,
            event_id=item.event.id,
            tool=item.tool,
            digest=item.digest,
            what=_what(asked, redact),
            asked_ms=asked_ms,
            decided_ms=decided.at_ms,
            how=decided.how,
            uid=decided.uid,
            reason=None if decided.reason is None else redact(decided.reason)[:MAX_TEXT],
        )
        record = ApprovalRemembered(number=self._kept[-1].number + 1 if self._kept else 1, decided=entry)
        self._kept.append(record)
        forgotten: list[int] = []
        while len(self._kept) > MAX_KEPT:
            forgotten.append(self._kept.popleft().number)
        self._bus.stage(decision_kept(record, forgotten))

    def listed(self) -> dict[str, Any]:
        """The last decisions, as many as fit in one answer, the oldest first. `more`: how many came before them."""
        newest = fitting(record.decided for record in reversed(self._kept))
        return {"answered": newest[::-1], "more": len(self._kept) - len(newest)}


def _what(asked: ApprovalAsked | None, redact: Callable[[str], str]) -> str:
    if asked is None:
        return ""
    if asked.message is not None:
        return redact(asked.message)[:MAX_TEXT]
    try:
        return redact(msgspec.json.encode(from_raw(asked.args, object)).decode())[:MAX_TEXT]
    except (GoondanError, msgspec.EncodeError, TypeError, ValueError):
        return ""
