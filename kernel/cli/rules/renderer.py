"""The display of one turn for a person: takes events, returns things to show. Pure.

Rules.
- Text is shown as it comes, as long as no piece of the step is known to be missing. The answer adds the rest. So at the
  end the text of the last step on the screen is exactly the answer.
- Reasoning is shown between remarks, by the same rule, and is no part of the answer.
- Text that turns out void stays on the screen, because nobody knows how many lines of the terminal it took. A remark
  after it says that it is void.
- A tool call that has ended leaves a remark: its name, its arguments in short, its outcome and how long it took.
- The line of status says what runs now: the step, the tools and their progress. It is made again whenever it is asked
  for.

Source: PROTOCOL.md "Live events".
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from goondan.kernel.cli.rules.plain import duration, one_line
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: The longest name of a tool in the status, and the longest message of it (characters).
MAX_NAME: Final = 60
MAX_WORDS: Final = 100
#: The most running tools that are known by name.
MAX_TOOLS: Final = 1000


#: News of waits, of which the broker is asked instead: they may be lost.
_WAITS: Final = ("model.waits", "extension.waits", "waits.over")


class Say(Struct, frozen=True):
    """More of the text."""

    #: The text.
    text: str


class Think(Struct, frozen=True):
    """More of the reasoning, which is no part of the text."""

    #: The text.
    text: str


class Break(Struct, frozen=True):
    """The text so far ends here. Something else follows."""


class Remark(Struct, frozen=True):
    """A remark of ours about the text, on a line of its own."""

    #: The remark.
    text: str


Shown = Say | Think | Break | Remark
#: The remark before reasoning. On a terminal without colours nothing else tells it from the answer.
REASONING: Final = "(reasoning)"


class _Call(Struct, frozen=True):
    """A tool call that runs."""

    #: Its tool.
    name: str
    #: Its arguments in short.
    arguments: str
    #: When it began (seconds).
    since: float


class TurnRenderer:
    """One turn as it is heard."""

    def __init__(self) -> None:
        self._step = 0
        self._said: list[str] = []
        self._length = 0
        self._whole = True
        self._thought = 0  # characters of reasoning that were heard of the step
        self._thought_whole = True
        self._thinking = False  # what was shown last is reasoning
        self._tools: dict[str, _Call] = {}
        self._progress = ""
        #: What the turn waits for, until the next news of it; "": nothing that is known (console/screen.py sets it).
        self.waits = ""

    def handle(self, event: RuntimeEvent, now: float = 0.0) -> list[Shown]:
        """The things to show for an event that comes at `now` (seconds on any clock)."""
        if event.kind not in _WAITS:
            self.waits = ""
        return self._handle(event, now)

    def _handle(self, event: RuntimeEvent, now: float) -> list[Shown]:
        shown: list[Shown] = []
        if event.kind == "text":
            return self._hear_text(event)
        if event.kind == "reasoning":
            return self._hear_reasoning(event)
        if event.kind == "turn.started":
            if event.again:
                shown = self._void()
            self._tools.clear()
        elif event.kind == "step.started":
            shown = self._break()
            self._begin(event.step)
            self._tools.clear()
        elif event.kind == "tool.called":
            shown = self._break()
            if len(self._tools) < MAX_TOOLS:
                name, arguments = one_line(event.tool_name or "", MAX_NAME), one_line(event.arguments or "", MAX_WORDS)
                self._tools[event.tool_call_id or ""] = _Call(name, arguments, now)
        elif event.kind == "tool.progress":
            self._progress = _progress(event)
        elif event.kind == "tool.waits":
            self._progress = "waits for a person"
        elif event.kind not in _WAITS:
            call = self._tools.pop(event.tool_call_id or "", None)
            self._progress = ""
            if event.kind in ("tool.completed", "tool.failed"):
                shown = [*self._break(), Remark(_call_line(event, call, now))]
        return shown

    def end(self, response: str) -> list[Shown]:
        """The things to show for the answer: the part of it that was not shown yet."""
        if response.startswith("".join(self._said)):
            rest = response[self._length :]
            return [*self._answer(), Say(rest), Break()] if rest else [Break()]
        return [*self._void(), Say(response), Break()]

    def status(self, seconds: float) -> str:
        """The line of status, `seconds` after the beginning."""
        parts = ["working"]
        if self._step > 1:
            parts.append(f"step {self._step}")
        if self._tools:
            first = next(iter(self._tools.values())).name
            more = len(self._tools) - 1
            parts.append(f"{first} and {more} more" if more else first)
            if self._progress:
                parts.append(self._progress)
        if self.waits:
            parts.append(self.waits)
        return ", ".join([*parts, f"{seconds:.0f} s"])

    # --- inside

    def _hear(self, event: RuntimeEvent) -> list[Shown]:
        """What a piece of a step shows before the piece itself."""
        shown: list[Shown] = []
        if event.step != self._step:  # the news of its beginning were lost
            shown = self._break()
            self._begin(event.step)
        return shown + self._void() if event.again else shown

    def _hear_reasoning(self, event: RuntimeEvent) -> list[Shown]:
        shown = self._hear(event)
        piece = event.text or ""
        if not piece or not self._thought_whole or event.at != self._thought:
            self._thought_whole = self._thought_whole and not piece
            return shown
        self._thought += len(piece)
        if not self._thinking:
            shown += [Break(), Remark(REASONING)]
            self._thinking = True
        return [*shown, Think(piece)]

    def _hear_text(self, event: RuntimeEvent) -> list[Shown]:
        shown = self._hear(event)
        piece = event.text or ""
        if not piece:
            return shown
        if not self._whole or event.at != self._length:
            self._whole = False
            return shown
        self._said.append(piece)
        self._length += len(piece)
        return [*shown, *self._answer(), Say(piece)]

    def _answer(self) -> list[Shown]:
        """What stands between reasoning and the text behind it."""
        thinking, self._thinking = self._thinking, False
        return [Break(), Remark("")] if thinking else []

    def _break(self) -> list[Shown]:
        return [Break()] if self._said or self._thinking else []

    def _begin(self, step: int) -> None:
        self._step = step
        self._progress = ""
        self._forget()

    def _forget(self) -> None:
        self._said.clear()
        self._length = self._thought = 0
        self._whole = self._thought_whole = True
        self._thinking = False

    def _void(self) -> list[Shown]:
        """The text that was shown of this step is void."""
        had = bool(self._said or self._thought)
        self._forget()
        return [Break(), Remark("(the answer begins anew)")] if had else []


def _call_line(event: RuntimeEvent, call: _Call | None, now: float) -> str:
    """A call that has ended, in one line. `call`: None when the news of its beginning were lost."""
    name = one_line(event.tool_name or "", MAX_NAME) if call is None else f"{call.name} {call.arguments}".rstrip()
    outcome = "ok" if event.kind == "tool.completed" else f"failed {one_line(event.code or '', MAX_NAME)}".rstrip()
    return ", ".join([name, outcome, *([] if call is None else [duration(round(1000 * max(0.0, now - call.since)))])])


def _progress(event: RuntimeEvent) -> str:
    """The progress of a tool, in its own words and numbers."""
    done, total = event.done, event.total
    parts = []
    if done is not None and total is not None and math.isfinite(done) and math.isfinite(total) and total > 0:
        parts.append(f"{max(0.0, min(1.0, done / total)):.0%}")
    if event.message:
        parts.append(one_line(event.message, MAX_WORDS))
    return " ".join(parts)
