"""Comparing a run with its recording: what in a text may differ, and the first difference. Pure.

Source: docs/design/turns.md section 12; docs/replay.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from goondan.features.recordings.wire import Request, shared_entries
from goondan.schemas.text.redaction import HIDDEN
from goondan.schemas.wire.errors import GoondanError, fail

#: How much of an entry is kept as it is (characters). Behind it stand its length and digest.
MAX_ENTRY: Final = 2_000
#: How much of a differing text an error shows (characters), and how much of that is before the difference.
SHOWN: Final = 160
_BEFORE: Final = 40


class Difference(Struct, frozen=True, rename="camel"):
    """Where a run differs from the recorded one."""

    #: The agent.
    agent: str
    #: The instance key.
    instance: str
    #: The number of the turn in its instance, from 1.
    turn: int
    #: The number of the step; 0: of the turn as a whole.
    step: int
    #: What differs.
    what: str
    #: What was recorded.
    expected: str
    #: What came.
    came: str

    @property
    def text(self) -> str:
        """One sentence for a person."""
        place = f"agent {self.agent} ({self.instance}), turn {self.turn}" + (f", step {self.step}" if self.step else "")
        expected, came = around(self.expected, self.came)
        return f"{place}: {self.what} differs: recorded {expected!r}, came {came!r}"


class FoundDifference(Struct, frozen=True):
    """The content of DIFFERENCE_FILE."""

    #: When it was found (nanoseconds since 1970).
    at: int
    #: What was found.
    difference: Difference


#: Beside an instance's conversation: the first difference that it met.
DIFFERENCE_FILE: Final = "difference.json"


def differs(difference: Difference) -> GoondanError:
    """The error of a run that differs from the recorded one."""
    return fail("E_REPLAY_DIFFERS", difference.text)


# --- texts that may differ ------------------------------------------------------------------------------------------

#: Times of RFC 3339 and of ISO 8601.
_TIME: Final = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:Z\b|[+-]\d\d:?\d\d\b)?")
#: Ids that the kernel makes: UUIDs, traces, turns with their attempt, digests of questions, events of commands.
_ID: Final = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b[0-9a-f]{32}\b|\bt[0-9a-f]{20}(?:-\d{1,9})?(?![0-9a-f])|~[0-9a-f]{24}\b|\b[0-9a-f]{16}-\d{1,9}\b"
)
TIME: Final = "<time>"
ID: Final = "<id>"
#: What stands for the workdir of an instance, and for the state of its workspace.
WORKDIR: Final = "<workdir>"
STATE: Final = "<state>"


def without_places(text: str, places: Iterable[tuple[str, str]]) -> str:
    """A text with names for folders of this machine: `places` are pairs of a path and its name, longest first."""
    for path, name in places:
        if path:
            text = text.replace(path, name)
    return text


def comparable(text: str) -> str:
    """A text without what differs from run to run: times, and ids that the kernel makes."""
    return _ID.sub(ID, _TIME.sub(TIME, text))


def shortened(entry: str) -> str:
    """An entry as it is compared and stored: a long one has its length and digest in place of its rest."""
    if len(entry) <= MAX_ENTRY:
        return entry
    digest = hashlib.sha256(entry.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{entry[:MAX_ENTRY]}… ({len(entry)} characters, sha256:{digest})"


# --- comparing ------------------------------------------------------------------------------------------------------


def same(expected: str, came: str) -> bool:
    """Whether a text is the recorded one. Anything may come where a secret was recorded as `***`."""
    if expected == came:
        return True
    if HIDDEN not in expected:
        return False
    first, *rest = expected.split(HIDDEN)
    if not came.startswith(first):
        return False
    at, last = len(first), rest.pop()
    for piece in rest:
        found = came.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return len(came) - len(last) >= at and came.endswith(last)


def first_difference(recorded: Request, now: Request) -> tuple[str, str, str] | None:
    """What differs first in two requests: its name, the recorded text and the text that came ("": nothing). None: they
    are the same. A tool that has come in addition is no difference: bundled tools get more functions with the kernel.
    """
    expected, came = recorded.entries, now.entries
    missing = sorted(set(recorded.tools).difference(now.tools))
    if missing:
        return "the tools of the request", ", ".join(missing), ""
    for at in range(max(len(expected), len(came))):
        one = expected[at] if at < len(expected) else ""
        other = came[at] if at < len(came) else ""
        if not same(one, other):
            name = (one or other).partition(":")[0]
            return (f"entry {at + 1} of the request ({name})", one, other)
    return None


def around(expected: str, came: str) -> tuple[str, str]:
    """Both texts, cut to the place where they begin to differ."""
    at = shared_entries(expected, came)
    start = max(0, at - _BEFORE)
    return _cut(expected, start), _cut(came, start)


def _cut(text: str, start: int) -> str:
    if not text:
        return "nothing"
    return ("…" if start else "") + text[start : start + SHOWN] + ("…" if len(text) > start + SHOWN else "")
