"""What people have decided: the history of all decisions, and what they mean for other calls of a script. Pure.

The history.
- Each decision is written down with the call that it is about, also when the kernel decides because nobody answered.
- The user is the one whose token decided. The token is signed, and lies in a file that only this user and root can
  read. What a client says about itself does not count.
- Answers are not kept. The beginning of arguments and reasons is kept, without keys of models.
- The last MAX_KEPT are kept. They stay when the items have ended with their events.

Calls of scripts (code mode).
- A decision about a call of a script holds for calls of the same tool that the same rule wants a person to decide,
  made by the same script: yes for COVERED of them in all, no for all of them. Then a person is asked again.
- While a person is asked, other such calls of the script wait for the same decision.
- Decisions end with their script. They are kept in memory only: a new broker asks again.

Source: docs/approvals.md, "Who may answer"; docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Raw

from goondan.features.approvals.broker.item import (
    ApprovalAnswered,
    ApprovalAsked,
    ApprovalRemembered,
    Group,
    Item,
    decision_kept,
)
from goondan.features.approvals.wire import ApprovalDecided
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.parts import fitting
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ToolCallPayload

#: Decisions that are remembered: some weeks for a person who is asked often. Each takes about a KiB.
MAX_KEPT: Final = 1000
#: Characters that are kept of arguments, of a question and of a reason.
MAX_TEXT: Final = 300
#: Calls that one yes is for.
COVERED: Final = 20
#: Characters of a script that a person is shown. A longer one is decided call by call.
MAX_SCRIPT: Final = 65_536
#: Bytes of a call with a script that are opened: the script, and the message that made the call.
MAX_PAYLOAD: Final = 768 << 10


class History:
    """The last decisions, the oldest first."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: deque[ApprovalRemembered] = deque()

    def restore(self, subject: str, record: ApprovalRemembered) -> None:
        """Take over a record of an earlier broker; they come in the order of their numbers."""
        self._kept.append(record)

    def add(self, item: Item, decided: ApprovalAnswered, asked: ApprovalAsked | None, asked_ms: int) -> None:
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


class ScriptDecisions:
    """The decisions about calls of scripts that run."""

    def __init__(self) -> None:
        #: The item about which a person was asked last, and how many other calls its yes was used for.
        self._items: dict[Group, Item] = {}
        self._used: Counter[Group] = Counter()

    def look(self, group: Group) -> Item | None:
        """The item whose decision is for such a call: it is open, denied, or approved (and one more call is counted).
        None: a person has to be asked.
        """
        item = self._items.get(group)
        if item is None or item.open or item.state == "denied":
            return item
        if self._used[group] >= COVERED - 1:  # the call that was asked about is one of those that the yes is for
            return None
        self._used[group] += 1
        return item

    def asked(self, item: Item) -> None:
        """A person is asked about a call of a script."""
        if item.group is not None:
            self._items[item.group] = item
            self._used.pop(item.group, None)

    def forget(self, item: Item) -> None:
        """Nobody could be asked about this item."""
        if item.group is not None and self._items.get(item.group) is item:
            del self._items[item.group]

    def over(self, script: tuple[str, str, str]) -> None:
        """A script has ended."""
        for group in [group for group in self._items if group.script == script]:
            del self._items[group]
            self._used.pop(group, None)


def read_script(payload: bytes) -> str | None:
    """The script in the payload of its call, for a person: None when it cannot be read, or is too long."""
    if not 0 < len(payload) <= MAX_PAYLOAD:
        return None
    try:
        args = from_raw(from_raw(Raw(payload), ToolCallPayload).args, dict)
    except GoondanError:
        return None
    code = args.get("code")
    return code if isinstance(code, str) and len(code) <= MAX_SCRIPT else None
