"""The calls that scripts of code mode make: what a script may call, and what has become of its calls. Pure.

A script is a running call of CODE_TOOL. Its calls are inner calls. Each has the id `<the script's id>><number>`, which
stays the same for ever, so all that is said about a call can be said about it. Nobody reads the script out of it.

States of a script: `running` -> `over`. Of an inner call: `open` -> `ended`; it is forgotten when it was still open at
the end of its script.

Rules.
- A script makes MAX_INNER_CALLS calls in all, has MAX_UNHEARD without a result here, and searches MAX_SEARCHES times.
- No script runs a script.
- The limits are kept here whatever the tool host lets through. A number is never given twice.

Source: docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from goondan.features.code_mode.wire import CODE_TOOL
from goondan.schemas.wire import questions
from goondan.schemas.wire.errors import fail

#: How many calls of a script may have no result here. Its tool host lets MAX_OPEN be open. After a lost connection they
#: may come before the results of as many whose outputs the script has already.
MAX_UNHEARD: Final = 2 * questions.MAX_OPEN
#: How often one script may look for tools: each look goes through the whole catalog.
MAX_SEARCHES: Final = 100
#: How many calls an error names. The others are counted.
MAX_NAMED: Final = 40
#: Characters of a call's arguments that an error repeats.
MAX_SHOWN_ARGS: Final = 100

Outcome = Literal["began", "ok", "error", "pending"]


class Record(Struct, frozen=True, array_like=True):
    """What has become of one inner call."""

    #: Its number in its script.
    number: int
    #: `began` until it has ended.
    outcome: Outcome
    #: The tool.
    tool: str = ""
    #: The beginning of its arguments, as JSON.
    args: str = ""


class _Script(Struct):
    """One running script."""

    #: How many calls it has made.
    made: int = 0
    #: How often it has searched.
    searches: int = 0
    #: The numbers of its open calls.
    open: set[int] = set()


class Scripts:
    """The running scripts of one turn, by their tool call ids."""

    def __init__(self) -> None:
        self._running: dict[str, _Script] = {}

    def begin(self, script: str) -> None:
        """A script runs."""
        self._running.setdefault(script, _Script())

    def is_running(self, script: str) -> bool:
        """Whether this script runs."""
        return script in self._running

    def call(self, script: str, tool: str) -> int:
        """The number of the call that a script asks for. Raises GoondanError: it may not make it."""
        found = self._of(script)
        if tool == CODE_TOOL:
            raise fail("E_FORBIDDEN", "a script cannot run a script", suggestion="Do it in this one.")
        if found.made >= questions.MAX_INNER_CALLS:
            raise fail("E_TOOL_LIMIT", f"a script makes at most {questions.MAX_INNER_CALLS} calls")
        if len(found.open) >= MAX_UNHEARD:
            raise fail("E_TOOL_LIMIT", f"a script has at most {MAX_UNHEARD} calls open")
        found.made += 1
        found.open.add(found.made)
        return found.made

    def search(self, script: str) -> None:
        """A script looks for tools. Raises GoondanError: it may not."""
        found = self._of(script)
        if found.searches >= MAX_SEARCHES:
            raise fail("E_TOOL_LIMIT", f"a script searches at most {MAX_SEARCHES} times")
        found.searches += 1

    def _of(self, script: str) -> _Script:
        if script not in self._running:
            raise fail("E_CALL_ENDED", "the script has ended")
        return self._running[script]

    def ended(self, script: str, number: int) -> bool:
        """An inner call has its result. False when nobody waits for it any more."""
        found = self._running.get(script)
        if found is None or number not in found.open:
            return False
        found.open.discard(number)
        return True

    def over(self, script: str) -> list[int]:
        """A script has ended, in whatever way. Returns the numbers of its calls that were still open, in order."""
        found = self._running.pop(script, None)
        return [] if found is None else sorted(found.open)


def inner_id(script: str, number: int) -> str:
    """The tool call id of an inner call. No other call has it (goondan.schemas.bundle.address.is_given_id)."""
    return f"{script}>{number}"


def told(records: Iterable[Record]) -> str:
    """What has become of a script's calls, for the model that gets no result. "" when it made none.

    Calls that had an effect, or may have had one, are named: they are not to be made again by mistake.
    """
    last: dict[int, Record] = {}
    for record in records:
        known = last.get(record.number)
        if known is None:
            last[record.number] = record
        elif record.outcome != "began":
            last[record.number] = Record(record.number, record.outcome, known.tool, known.args)
    if not last:
        return ""
    began = [one for one in last.values() if one.outcome == "began"]
    finished = [one for one in last.values() if one.outcome != "began"]
    parts = []
    if finished:
        parts.append(f"Calls that had finished: {_named(finished)}.")
    if began:
        parts.append(f"Calls whose outcome is not known: {_named(began)}.")
    return " ".join(parts)


def _named(records: list[Record]) -> str:
    counted: dict[str, int] = {}
    for one in records:
        how = "" if one.outcome in ("ok", "began") else f" ({one.outcome})"
        what = f"{one.tool} {one.args}{how}"
        counted[what] = counted.get(what, 0) + 1
    shown = [what if times == 1 else f"{what} ({times} times)" for what, times in list(counted.items())[-MAX_NAMED:]]
    more = len(records) - sum(list(counted.values())[-MAX_NAMED:])
    return (f"{more} earlier ones; " if more else "") + "; ".join(shown)
