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

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from goondan.features.approvals.broker.item import (
    ApprovalAsked,
    ApprovalRemembered,
    Decided,
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


class ScriptDecisions:
    """The decisions about calls of scripts that run."""

    def __init__(self) -> None:
        self._asked: dict[Group, Item] = {}
        self._left: dict[Group, int] = {}
        self._denied: dict[Group, str | None] = {}
        self._groups: dict[tuple[str, str, str], set[Group]] = {}

    def look(self, group: Group) -> Item | Literal["covered", "denied"] | None:
        """What is known of such a call: it is covered by a yes (and counted now), was denied, waits for the decision
        about this item, or nothing.
        """
        if group in self._denied:
            return "denied"
        left = self._left.get(group, 0)
        if left > 0:
            self._left[group] = left - 1
            return "covered"
        item = self._asked.get(group)
        return item if item is not None and item.open else None

    def reason(self, group: Group | None) -> str | None:
        """What the person said who denied such calls."""
        return None if group is None else self._denied.get(group)

    def asked(self, item: Item) -> None:
        """A person is asked about a call of a script."""
        if item.group is not None:
            self._asked[item.group] = item
            self._groups.setdefault(item.group.script, set()).add(item.group)

    def decided(self, item: Item) -> None:
        """A person has decided. The call that was asked about is one of those that a yes is for."""
        group = item.group
        if group is None or self._asked.get(group) is not item:
            return
        del self._asked[group]
        if item.state == "approved":
            self._left[group] = COVERED - 1
        elif item.state == "denied":
            self._denied[group] = None if item.decided is None else item.decided.reason

    def forget(self, item: Item) -> None:
        """Nobody is asked about this item any more."""
        if item.group is not None and self._asked.get(item.group) is item:
            del self._asked[item.group]

    def over(self, script: tuple[str, str, str]) -> None:
        """A script has ended."""
        for group in self._groups.pop(script, ()):
            for known in (self._asked, self._left, self._denied):
                known.pop(group, None)


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
