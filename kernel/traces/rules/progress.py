"""How far a turn is, and what of it the reader of a stream has not got yet (pure).

The kernel's word on a turn comes in two ways. Live events are quick and may be lost. The conversation file is slower
and whole: a message of the model is stored before anything that follows from it. A Progress joins both, so that a
reader gets text as it comes, and of every step in the end exactly what is stored.

A reader's place is a Position. It says what the reader has got and nothing of this process, so it is good for every
program that reads turns of the same kernel, also for one that was started since.

Rules.
- Text goes out as far as it was heard without a gap. Where something was lost, a step waits for the conversation file,
  which has it when the step's message is stored.
- A step is told to its end, all of its text, all of its calls, all of their ends, before the next one begins.
- A position has a checksum of the text before it. If the step's text has become another (its model was asked again, or
  an extension has changed it), the reader is told `text.again`, and gets the text from its beginning.
- What is told beside that, reasoning and waits, has no position: it is for who watches, and may be missing.

Source: docs/design/wire.md section 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final
from zlib import crc32

from msgspec import Struct, structs

from goondan.schemas.wire.runtime_events import RuntimeEvent

#: The position behind everything.
END: Final = "end"
#: Characters of text in one event of a stream.
MAX_PIECE: Final = 16_000
#: Characters of one step's text that are kept as they are heard; a longer text comes when it is stored.
MAX_HEARD: Final = 1 << 17
#: Ends of calls that are remembered before the calls are known.
MAX_ENDED: Final = 4096
#: In a position: the step was told to be lost.
LOST: Final = "g"
#: The longest position that is read (characters): one for each call of a step, and the numbers before them.
MAX_POSITION: Final = 8192
_POSITION: Final = re.compile(r"(\d{1,6})\.(\d{1,9})\.([0-9a-f]{8})\.([-cdg]*)")


class Position(Struct, frozen=True):
    """What a reader has got."""

    #: The step that it reads, from 1. 0: nothing yet.
    step: int = 0
    #: Characters (code points) of the step's text.
    chars: int = 0
    #: CRC-32 of these characters as UTF-8.
    checksum: int = 0
    #: A sign for each call of the step, in the order of its message: `-` nothing, `c` that it was made, `d` its end as
    #: well. `g`: the step was told to be lost.
    calls: str = ""

    def __str__(self) -> str:
        return f"{self.step}.{self.chars}.{self.checksum:08x}.{self.calls}"


def position_of(text: str) -> Position | None:
    """The position that `text` says (Last-Event-ID); None for END. Raises ValueError."""
    if text == END:
        return None
    found = _POSITION.fullmatch(text) if len(text) <= MAX_POSITION else None
    if found is None:
        raise ValueError("no position of a stream")
    step, chars, checksum, calls = found.groups()
    return Position(int(step), int(chars), int(checksum, 16), calls)


class Call(Struct):
    """A tool call of a step's message."""

    #: The model's id of the call.
    tool_call_id: str
    #: The tool as the model named it.
    tool_name: str
    #: The arguments in one short line. None: there are none.
    arguments: str | None = None
    #: How it ended: `completed` or `failed`. "": it has no result yet.
    end: str = ""
    #: Of one that failed: the code of the error.
    code: str | None = None


class Stored(Struct, frozen=True):
    """What the conversation file has of a turn."""

    #: The text and the calls of each step that has a message, by number.
    steps: dict[int, tuple[str, list[Call]]]
    #: How the turn ended. None: it runs.
    answer: Any = None


class News(Struct, frozen=True):
    """One event of a stream."""

    #: What it is: a RuntimeEventKind, `text.again`, `gap`, `answer`.
    kind: str
    #: More about it.
    data: Any
    #: The reader's position behind it. None: it has none, and may be missing.
    position: str | None = None


class _Step(Struct):
    """One step, as far as it is known."""

    #: Its text from the beginning, as far as it is known without a gap.
    text: str = ""
    #: It has grown another text so many times.
    versions: int = 0
    #: Something of its text was lost.
    torn: bool = False
    #: Nothing more of its text will be heard.
    spoken: bool = False
    #: The text and the calls are all, as they are stored.
    whole: bool = False
    #: Its message is in no file any more.
    lost: bool = False
    #: Its calls.
    calls: list[Call] = []


class Reader:
    """The place of one reader in a Progress."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self._checked: tuple[int, int] | None = None

    def knows(self, step: int, versions: int) -> bool:
        """Whether the text before the position was compared already. It counts as compared from now on."""
        known, self._checked = self._checked == (step, versions), (step, versions)
        return known


class Progress:
    """What is known of one turn."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._ended: dict[str, tuple[str, str | None]] = {}  # calls that are not known yet, and whose end was heard
        #: How the turn ended. None: it runs.
        self.answer: Any = None
        #: What has been heard has no beginning yet: steps before it may be stored.
        self._headless = True
        #: The conversation file has to be read: `begin_file`, then `fill`.
        self.wants_file = False
        #: It could not be read when it was wanted last.
        self._unread = False
        #: It is being read; and was the turn over before.
        self._reading = False
        self._over_before = False

    # --- what is heard

    def hear(self, event: RuntimeEvent) -> News | None:
        """A live event. Returns what readers are told of it at once, beside what `read` gives them."""
        kind, number = event.kind, event.step
        if self._headless and (kind != "turn.started" or event.again):
            self.wants_file = True  # a turn that was there before us
        self._headless = False
        if number and number not in self._steps:
            for before in [known for known in self._steps if known < number]:
                self._steps[before].spoken = True
                self._check(before, is_over=True)
            self._steps[number] = _Step(torn=kind != "step.started" and (kind != "text" or event.at > 0))
        if kind == "step.started" and not self._steps[number].whole:
            self._renew(self._steps[number])
        elif kind == "text":
            self._hear_text(self._steps[number], event)
        elif kind in ("tool.called", "tool.completed", "tool.failed", "step.completed", "step.failed"):
            self._hear_act(number, event)
        elif kind not in ("turn.started", "turn.completed", "turn.failed", "step.started"):
            return News(kind, event)
        return None

    def _hear_text(self, step: _Step, event: RuntimeEvent) -> None:
        text = event.text or ""
        if step.spoken:
            return
        if event.again:
            self._renew(step)
        overlap = step.text[event.at : event.at + len(text)]
        if event.at > len(step.text) or not text.startswith(overlap):
            step.torn = True
        if step.torn or len(step.text) + len(text) > MAX_HEARD:
            step.torn = True
        else:
            step.text += text[len(overlap) :]

    def _renew(self, step: _Step) -> None:
        """The step's text begins, or begins again."""
        step.versions += bool(step.text)
        step.text, step.torn, step.spoken = "", False, False

    def _hear_act(self, number: int, event: RuntimeEvent) -> None:
        """The model has spoken, and its calls are made."""
        step = self._steps[number]
        step.spoken = True
        if event.kind in ("tool.completed", "tool.failed"):
            end = event.kind.removeprefix("tool."), event.code
            known = [call for call in step.calls if call.tool_call_id == event.tool_call_id]
            for call in known:
                call.end, call.code = end
            if not step.whole and len(self._ended) < MAX_ENDED:
                self._ended[event.tool_call_id or ""] = end
        self._check(number, is_over=event.kind == "step.completed")

    def _check(self, number: int, *, is_over: bool) -> None:
        """Whether the conversation file has to say more of a step. `is_over`: all of its calls have ended."""
        step = self._steps[number]
        if not step.whole or (is_over and any(not call.end for call in step.calls)):
            self.wants_file = True

    # --- what is stored

    def begin_file(self) -> None:
        """The conversation file is read from now on."""
        self.wants_file, self._reading, self._over_before = False, True, self.answer is not None

    def fill(self, stored: Stored | None) -> None:
        """What the conversation file has; None: there is none, or it cannot be read."""
        self._reading, self._headless, self._unread = False, False, stored is None
        found = {} if stored is None else stored.steps
        for number, (text, calls) in found.items():
            step = self._steps.setdefault(number, _Step())
            step.versions += not text.startswith(step.text)
            step.text, step.whole, step.spoken, step.lost = text, True, True, False
            before = {call.tool_call_id: (call.end, call.code) for call in step.calls if call.end}
            for call in calls:
                heard = before.get(call.tool_call_id) or self._ended.pop(call.tool_call_id, None)
                if not call.end and heard is not None:
                    call.end, call.code = heard
            step.calls = calls
        if stored is not None and stored.answer is not None:
            self.answer = self.answer if self.answer is not None else stored.answer
            self._over_before = True
        last = max(found, default=0)
        for number, step in self._steps.items():
            if not step.whole and (self._over_before or (step.spoken and number < last)):
                step.whole, step.spoken, step.lost = True, True, step.torn  # no file has a message of it

    def end(self, answer: Any, response: str | None, steps: int) -> None:
        """The turn is over, after so many steps. `response`: the text of the last one, if it has one."""
        self.answer = answer
        last = self._steps.get(steps)
        if last is not None and not last.torn and last.text == response:
            last.whole = last.spoken = True  # the usual case: all of it was heard
        known = self._steps.values()
        missing = any(not step.whole or any(not call.end for call in step.calls) for step in known)
        missing = missing or len(known) < steps
        self.wants_file = self.wants_file or self._headless or self._unread or missing

    def drop_before(self, number: int) -> None:
        """Keep nothing of the steps before this one: every reader has them. Who comes later gets them from the file."""
        dropped = [known for known in self._steps if known < number]
        for known in dropped:
            del self._steps[known]
        self._headless = self._headless or bool(dropped)

    @property
    def characters(self) -> int:
        """How much text is kept."""
        return sum(len(step.text) for step in self._steps.values())

    # --- what a reader gets

    def read(self, reader: Reader) -> Iterator[News]:
        """What the reader has not got yet, as far as it is known; its position moves with each. `wants_file` may be set
        afterwards: then there is more for it in the file.
        """
        while True:
            number = reader.position.step
            step = self._steps.get(number)
            if step is not None:
                yield from self._of_step(reader, number, step)
            is_told = step is not None and step.whole and all(call.end for call in step.calls)
            if number and not is_told and not self._is_final:
                break
            following = min((known for known in self._steps if known > number), default=0)
            if following > number + 1 and not self._is_final:
                self.wants_file = self.wants_file or not self._reading  # those in between may be stored
                break
            if not following:
                if self._is_final:
                    yield News("answer", self.answer, END)
                break
            reader.position = Position(following)
            yield News("step.started", {"step": following}, str(reader.position))

    @property
    def _is_final(self) -> bool:
        """Whether nothing more will be known."""
        return self.answer is not None and not (self.wants_file or self._reading or self._headless)

    def _of_step(self, reader: Reader, number: int, step: _Step) -> Iterator[News]:
        at = reader.position
        if at.calls == LOST and not step.lost:
            at = reader.position = Position(number)
            yield News("text.again", {"step": number}, str(at))
        if not at.calls:  # a call was told only when the text before it was whole
            if len(step.text) < at.chars and not step.whole:
                return  # it is being made again: perhaps it is the same
            if not reader.knows(number, step.versions) and _checksum(step.text[: at.chars]) != at.checksum:
                at = reader.position = Position(number)
                yield News("text.again", {"step": number}, str(at))
            while at.chars < len(step.text):
                piece = step.text[at.chars : at.chars + MAX_PIECE]
                told = {"step": number, "at": at.chars, "text": piece}
                at = Position(number, at.chars + len(piece), _checksum(piece, at.checksum))
                reader.position = at
                yield News("text", told, str(at))
        if step.lost and not at.calls:
            reader.position = structs.replace(at, calls=LOST)
            yield News("gap", {"step": number}, str(reader.position))
        if step.whole:
            yield from self._calls(reader, number, step.calls)

    def _calls(self, reader: Reader, number: int, calls: Sequence[Call]) -> Iterator[News]:
        for sign in "cd":
            for place, call in enumerate(calls):
                signs = reader.position.calls.ljust(len(calls), "-")
                is_due = signs[place] == "-" if sign == "c" else bool(call.end) and signs[place] != "d"
                if not is_due:
                    continue
                signs = signs[:place] + sign + signs[place + 1 :]
                reader.position = structs.replace(reader.position, calls=signs)
                told: dict[str, Any] = {
                    "step": number,
                    "toolCallId": call.tool_call_id,
                    "toolName": call.tool_name,
                }
                if sign == "c" and call.arguments is not None:
                    told["arguments"] = call.arguments
                if sign == "d" and call.code is not None:
                    told["code"] = call.code
                yield News("tool.called" if sign == "c" else f"tool.{call.end}", told, str(reader.position))


def _checksum(text: str, before: int = 0) -> int:
    return crc32(text.encode("utf-8", "surrogatepass"), before)
