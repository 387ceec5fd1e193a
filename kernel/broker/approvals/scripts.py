"""What people have decided about the calls of scripts (code mode). Pure.

Rules.
- A decision about a call of a script holds for calls of the same tool that the same rule wants a person to decide,
  made by the same script: yes for COVERED of them in all, no for all of them. Then a person is asked again.
- While a person is asked, other such calls of the script wait for the same decision.
- Decisions end with their script. They are kept in memory only: a new broker asks again.

Source: docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from msgspec import Raw

from goondan.kernel.broker.approvals.items import Group, Item
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ToolCallPayload

#: Calls that one yes is for.
COVERED: Final = 20
#: Characters of a script that a person is shown. A longer one is decided call by call.
MAX_SCRIPT: Final = 65_536
#: Bytes of a call with a script that are opened: the script, and the message that made the call.
MAX_PAYLOAD: Final = 768 << 10


class Script(NamedTuple):
    """A script that makes calls."""

    #: Its callId.
    call_id: str
    #: What it says. None: it is larger than a person is shown, or not known here.
    text: str | None


class Decisions:
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
