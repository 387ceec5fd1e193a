"""`gdn replay FILE`: repeats a recorded run, and shows where it differs first.

The run has a state of its own, which is gone afterwards: it begins without a history and leaves nothing. Its tools
answer from the recording and never run.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import click
import msgspec
from msgspec import Struct

from goondan.features.recordings.bundle import CALLS_VARIABLE, MODEL_VARIABLE, PROMPT_VARIABLE, REPLAY_VARIABLE
from goondan.features.recordings.command.record import Sent, asked
from goondan.features.recordings.wire import Part, RecordedCall, RecordedStep, RecordedTurn, read_recording
from goondan.features.recordings.wire.texts import (
    DIFFERENCE_FILE,
    STATE,
    WORKDIR,
    Difference,
    FoundDifference,
    comparable,
    same,
    without_places,
)
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.loader import PACKAGES, Asking, open_bundle
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.cli import options
from goondan.kernel.cli.attach import start
from goondan.kernel.cli.output import emit
from goondan.kernel.cli.session import OpenFile
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.kernel.paths import root_of
from goondan.kernel.spawn import memory_file
from goondan.kernel.traces.conversations import BUSY_S, conversation_files
from goondan.kernel.trust.policy import POLICY_FILE
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Answer

#: How long turns that nobody waits for may take to end after the last answer (seconds).
LATE_S: Final = 10.0
#: How often this is looked for (seconds).
_POLL_S: Final = 0.05
#: The largest difference that is read (bytes): two entries, with room for their escapes.
_MAX_DIFFERENCE: Final = 1 << 20

_decode: Final = msgspec.json.Decoder(FoundDifference).decode


@click.command(epilog="The exit status is 0 when the run is as it was recorded, and 1 when it differs.")
@click.argument("file", metavar="FILE", shell_complete=options.completed_path("file"))
@options.bundle
@options.trust
@click.option("--model", metavar="Model/NAME", help="Ask this Model of the bundle for every agent.")
@click.option(
    "--prompt",
    metavar="FILE",
    shell_complete=options.completed_path("file"),
    help="Ask the models with this system prompt for the entry agent.",
)
@click.option("--calls", is_flag=True, help="Compare the tool calls of models only, not their texts.")
@options.json
def replay(
    file: str,
    bundle: str | None,
    trust: bool,
    model: str | None,
    prompt: str | None,
    calls: bool,
) -> int:
    """Repeat a recorded run and show its first difference.

    Without --model and --prompt no model is asked: the recording answers, and each request has to be the recorded one.
    With one of them models are asked, and their answers are compared with the recorded ones. Tools never run.
    """
    if calls and model is None and prompt is None:
        raise fail("E_USAGE", "--calls belongs to --model or --prompt", suggestion="Leave it out.")
    path = os.path.abspath(file)
    course = course_of(read_recording(path)[1])
    _tell_kernel(path, model, prompt, calls)
    difference = _replayed(course, bundle, trust, asks_models=model is not None or prompt is not None)
    told = {"turns": course.turns.total(), "requests": course.requests, "calls": course.calls}
    same = f"as recorded: {told['turns']} turns, {told['requests']} requests to models, {told['calls']} calls"
    document = {"same": difference is None, **told, "difference": difference}
    emit(document, [same if difference is None else difference.text])
    return 0 if difference is None else 1


def _tell_kernel(path: str, model: str | None, prompt: str | None, calls: bool) -> None:
    """Tell the kernel that is started, and the checks of the bundle, by the environment."""
    os.environ[REPLAY_VARIABLE] = path
    for variable, value in (
        (MODEL_VARIABLE, model or ""),
        (PROMPT_VARIABLE, os.path.abspath(prompt) if prompt is not None else ""),
        (CALLS_VARIABLE, "1" if calls else ""),
    ):
        os.environ[variable] = value


def _replayed(course: Course, bundle: str | None, trust: bool, *, asks_models: bool) -> Difference | None:
    """Repeat the run in a state of its own. Returns its first difference. Raises GoondanError."""
    usual = locate(bundle)
    _trusted(usual, trust)
    with tempfile.TemporaryDirectory(prefix="goondan-replay-") as own:
        _copy_grants(usual, os.path.join(own, "state"))
        os.environ["GOONDAN_STATE_ROOT"] = os.path.join(own, "state")
        place = locate(usual.bundle, trust=True)
        differing: list[Difference] = []
        turns = iter(course.sent)

        def compare(answer: Answer) -> bool:
            turn = next(turns)
            if not asks_models and (difference := compare_answer(turn, answer, place.state_dir)) is not None:
                differing.append(difference)
            return not differing and not found(place.state_dir)

        with start(place) as kernel:
            asked(kernel, map(_sent, course.sent), compare)
            if not differing:
                differing += _late(course, place.state_dir)
        return first(found(place.state_dir)) or (differing[0] if differing else None)


def _sent(turn: RecordedTurn) -> Sent:
    """The message of a recorded turn."""
    files = [
        OpenFile(memory_file("attached", file.data), len(file.data), file.media_type, file.name or "")
        for file in turn.files
    ]
    return Sent(turn.agent, turn.instance, turn.input, files)


def _late(course: Course, state_dir: str) -> list[Difference]:
    """Wait until turns have ended that no answer waited for. Returns a difference when one of them does not come."""
    until = time.monotonic() + LATE_S
    while not found(state_dir):
        counted = ended(state_dir)
        place = missing(course, counted)
        if place is None:
            return []
        if time.monotonic() >= until:
            what, expected, came = "the number of turns", course.turns[place], counted[place]
            agent, instance = place
            return [
                Difference(
                    agent=agent,
                    instance=instance,
                    turn=came + 1,
                    step=0,
                    what=what,
                    expected=f"{expected} turns",
                    came=f"{came} turns",
                )
            ]
        time.sleep(_POLL_S)
    return []


def _trusted(place: BundleTarget, trust: bool) -> None:
    """See that the person has agreed to what the bundle asks for. Raises GoondanError."""
    asking = Asking(everything=trust)
    open_bundle(place.bundle, state_dir=place.state_dir, handlers=False, asking=asking, runs=False)


def _copy_grants(place: BundleTarget, root: str) -> None:
    """Take over what the person has granted and installed: a bundle that needs it could not start without."""
    usual = root_of(place.state_dir)
    os.mkdir(root, 0o700)
    if os.path.isfile(os.path.join(usual, POLICY_FILE)):
        shutil.copy(os.path.join(usual, POLICY_FILE), root)
    if os.path.isdir(os.path.join(usual, PACKAGES)):
        shutil.copytree(os.path.join(usual, PACKAGES), os.path.join(root, PACKAGES), symlinks=True)


# --- what is sent, what is compared, what agents have found ----------------------------------------------------------


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
