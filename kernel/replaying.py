"""The course of a replay: what is sent, what is compared, and what agents have found. `found` and `ended` read files.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.lookup import Unreadable
from goondan.kernel.trace_files import BUSY_S, conversation_files
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.recorded_texts import (
    DIFFERENCE_FILE,
    STATE,
    WORKDIR,
    Difference,
    FoundDifference,
    comparable,
    same,
    without_places,
)
from goondan.schemas.recordings import Part, RecordedCall, RecordedStep, RecordedTurn
from goondan.schemas.wire.frames import Answer

#: The largest difference that is read (bytes): two entries, with room for their escapes.
_MAX_DIFFERENCE: Final = 1 << 20

_decode: Final = msgspec.json.Decoder(FoundDifference).decode


class Course(Struct, frozen=True, kw_only=True):
    """What a recording holds, as a replay needs it."""

    #: The turns that messages from outside began, in their order.
    sent: list[RecordedTurn]
    #: How many turns each instance had: (agent, instance key) -> turns.
    turns: Counter[tuple[str, str]]
    #: How many requests to models there were.
    requests: int
    #: How many tool calls.
    calls: int


def course_of(parts: Iterable[Part]) -> Course:
    """The course of a recorded run."""
    listed = list(parts)
    turns = [part for part in listed if isinstance(part, RecordedTurn)]
    return Course(
        sent=sorted((turn for turn in turns if turn.outside), key=lambda turn: turn.outside),
        turns=Counter((turn.agent, turn.instance) for turn in turns),
        requests=sum(isinstance(part, RecordedStep) for part in listed),
        calls=sum(isinstance(part, RecordedCall) for part in listed),
    )


def compare_answer(turn: RecordedTurn, answer: Answer, state_dir: str) -> Difference | None:
    """How the answer to a message differs from the recorded one; None: it does not."""
    workdir = instance_workdir(state_dir, turn.agent, turn.instance)
    places = ((workdir, WORKDIR), (state_dir, STATE))
    error = None if answer.error is None else answer.error.code
    for what, expected, came in (
        ("the end of the turn", turn.status, answer.status),
        ("its error", turn.error, error),
        ("its answer", turn.response, answer.response),
    ):
        came = without_places(came or "", places)
        if not same(comparable(expected or ""), comparable(came)):
            return Difference(
                agent=turn.agent,
                instance=turn.instance,
                turn=turn.turn,
                step=0,
                what=what,
                expected=expected or "",
                came=came,
            )
    return None


def first(found: Sequence[FoundDifference]) -> Difference | None:
    """The difference that was met first. The others may be its consequences."""
    return min(found, key=lambda one: one.at).difference if found else None


def found(state_dir: str) -> list[FoundDifference]:
    """The differences that agent instances have met."""
    differences = []
    for place in conversation_files(state_dir, None, None):
        with suppress(Unreadable, msgspec.DecodeError):
            data = read_file(str(Path(place.path).with_name(DIFFERENCE_FILE)), _MAX_DIFFERENCE)
            differences.append(_decode(data))
    return differences


def ended(state_dir: str) -> Counter[tuple[str, str]]:
    """How many turns of each instance have ended: (agent, instance key) -> turns."""
    counted: Counter[tuple[str, str]] = Counter()
    for place in conversation_files(state_dir, None, None):
        uri = f"{Path(place.path).as_uri()}?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as db:
            rows = db.execute("SELECT count(*) FROM turns WHERE status != 'running'").fetchone()
            counted[place.agent, place.instance_key or ""] = rows[0]
    return counted


def missing(course: Course, ended_turns: Counter[tuple[str, str]]) -> tuple[str, str] | None:
    """An instance that has not had all of its turns; None: all of them have."""
    return next((place for place, count in sorted(course.turns.items()) if ended_turns[place] < count), None)
