"""`gdn replay FILE`: repeats a recorded run, and shows where it differs first.

The run has a state of its own, which is gone afterwards: it begins without a history and leaves nothing. Its tools
answer from the recording and never run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from goondan.kernel.cli import options

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import BundleTarget
    from goondan.kernel.cli.commands.record import Sent
    from goondan.kernel.replaying import Course
    from goondan.schemas.recorded_texts import Difference
    from goondan.schemas.recordings import RecordedTurn
    from goondan.schemas.wire.frames import Answer

#: How long turns that nobody waits for may take to end after the last answer (seconds).
LATE_S: Final = 10.0
#: How often this is looked for (seconds).
_POLL_S: Final = 0.05


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
@options.as_json
def command(
    file: str,
    bundle: str | None,
    trust: bool,
    model: str | None,
    prompt: str | None,
    calls: bool,
    as_json: bool,
) -> int:
    """Repeat a recorded run and show its first difference.

    Without --model and --prompt no model is asked: the recording answers, and each request has to be the recorded one.
    With one of them models are asked, and their answers are compared with the recorded ones. Tools never run.
    """
    from goondan.kernel.cli.output import write, write_json
    from goondan.kernel.replaying import course_of
    from goondan.schemas.system.recording_file import read_recording
    from goondan.schemas.wire.errors import fail

    if calls and model is None and prompt is None:
        raise fail("E_USAGE", "--calls belongs to --model or --prompt", suggestion="Leave it out.")
    path = os.path.abspath(file)
    course = course_of(read_recording(path)[1])
    _tell_kernel(path, model, prompt, calls)
    difference = _replayed(course, bundle, trust, asks_models=model is not None or prompt is not None)
    told = {"turns": course.turns.total(), "requests": course.requests, "calls": course.calls}
    if as_json:
        write_json({"same": difference is None, **told, "difference": difference})
    elif difference is None:
        write(f"as recorded: {told['turns']} turns, {told['requests']} requests to models, {told['calls']} calls")
    else:
        write(difference.text)
    return 0 if difference is None else 1


def _tell_kernel(path: str, model: str | None, prompt: str | None, calls: bool) -> None:
    """Tell the kernel that is started, and the checks of the bundle, by the environment."""
    from goondan.kernel.bundle.recordings import CALLS_VARIABLE, MODEL_VARIABLE, PROMPT_VARIABLE, REPLAY_VARIABLE

    os.environ[REPLAY_VARIABLE] = path
    for variable, value in (
        (MODEL_VARIABLE, model or ""),
        (PROMPT_VARIABLE, os.path.abspath(prompt) if prompt is not None else ""),
        (CALLS_VARIABLE, "1" if calls else ""),
    ):
        os.environ[variable] = value


def _replayed(course: Course, bundle: str | None, trust: bool, *, asks_models: bool) -> Difference | None:
    """Repeat the run in a state of its own. Returns its first difference. Raises GoondanError."""
    import tempfile

    from goondan.kernel.cli.attach import locate, start
    from goondan.kernel.cli.commands.record import asked
    from goondan.kernel.replaying import compare_answer, first, found

    usual = locate(bundle)
    _trusted(usual, trust)
    with tempfile.TemporaryDirectory(prefix="goondan-replay-") as own:
        _copy_grants(usual, os.path.join(own, "state"))
        os.environ["GOONDAN_STATE_ROOT"] = os.path.join(own, "state")
        place = locate(usual.bundle, trust=True)
        kernel = start(place)
        differing: list[Difference] = []
        turns = iter(course.sent)

        def compare(answer: Answer) -> bool:
            turn = next(turns)
            if not asks_models and (difference := compare_answer(turn, answer, place.state_dir)) is not None:
                differing.append(difference)
            return not differing and not found(place.state_dir)

        try:
            asked(kernel, map(_sent, course.sent), compare)
            if not differing:
                differing += _late(course, place.state_dir)
        finally:
            kernel.finish()
        return first(found(place.state_dir)) or (differing[0] if differing else None)


def _sent(turn: RecordedTurn) -> Sent:
    """The message of a recorded turn."""
    from goondan.kernel.cli.commands.record import Sent
    from goondan.kernel.cli.message_files import OpenFile
    from goondan.kernel.spawn import memory_file

    files = [
        OpenFile(memory_file("attached", file.data), len(file.data), file.media_type, file.name or "")
        for file in turn.files
    ]
    return Sent(turn.agent, turn.instance, turn.input, files)


def _late(course: Course, state_dir: str) -> list[Difference]:
    """Wait until turns have ended that no answer waited for. Returns a difference when one of them does not come."""
    import time

    from goondan.kernel.replaying import ended, found, missing
    from goondan.schemas.recorded_texts import Difference

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
    from goondan.kernel.bundle.loader import open_bundle
    from goondan.kernel.trust.asking import Asking

    asking = Asking(everything=trust)
    open_bundle(place.bundle, state_dir=place.state_dir, handlers=False, asking=asking, runs=False)


def _copy_grants(place: BundleTarget, root: str) -> None:
    """Take over what the person has granted and installed: a bundle that needs it could not start without."""
    import shutil

    from goondan.kernel.bundle.loader import PACKAGES
    from goondan.kernel.grants.policy_file import POLICY_FILE
    from goondan.kernel.paths import root_of

    usual = root_of(place.state_dir)
    os.mkdir(root, 0o700)
    if os.path.isfile(os.path.join(usual, POLICY_FILE)):
        shutil.copy(os.path.join(usual, POLICY_FILE), root)
    if os.path.isdir(os.path.join(usual, PACKAGES)):
        shutil.copytree(os.path.join(usual, PACKAGES), os.path.join(root, PACKAGES), symlinks=True)
