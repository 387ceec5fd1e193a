"""`gdn record FILE`: a run as a file, from which `gdn replay` and `provider: replay` repeat it without a model.
`gdn replay FILE`: repeats a recorded run, and shows where it differs first.

- The instance of the run's own key is `default` in the file: a replay has no history either.
- Turns are numbered from 1 in each instance. Those that came from outside are numbered in the order in which they came.
- What is repeated by a later incarnation counts once. Lines are sorted, so the same run makes the same file.
- A replay has a state of its own, which is gone afterwards: it begins without a history and leaves nothing. Its tools
  answer from the recording and never run.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.features.recordings import wire
from goondan.features.recordings.bundle import (
    CALLS_VARIABLE,
    MODEL_VARIABLE,
    PROMPT_VARIABLE,
    RECORD_VARIABLE,
    REPLAY_VARIABLE,
)
from goondan.features.recordings.wire import Part, RecordedCall, RecordedStep, RecordedTurn, read_recording
from goondan.features.recordings.wire.texts import (
    DIFFERENCE_FILE,
    STATE,
    WORKDIR,
    Difference,
    FoundDifference,
    comparable,
    same,
    shortened,
    without_places,
)
from goondan.kernel import paths, spawn
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.loader import PACKAGES, Asking, inspect_bundle, open_bundle
from goondan.kernel.bundle.rules import lookup, variables
from goondan.kernel.cli import options
from goondan.kernel.cli.attach import Kernel, start
from goondan.kernel.cli.console.lines import MAX_LINE_BYTES, read_all
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.output import emit, error_lines, wants_json, write, write_json, write_text
from goondan.kernel.cli.session import OpenFile, Session, opened_files, over_session
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.kernel.traces.conversations import BUSY_S, conversation_files, instances
from goondan.kernel.trust.policy import POLICY_FILE
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Answer

#: The instance that stands for the run's own.
USUAL = "default"


class Made(Struct, frozen=True, kw_only=True):
    """A recording."""

    #: The content of its file.
    data: bytes
    #: How many turns it has.
    turns: int
    #: How many requests to models.
    steps: int
    #: How many tool calls.
    calls: int
    #: The agents that took part.
    agents: list[str]
    #: What a replay of it will not do, in sentences.
    warnings: list[str]


@click.command(epilog="Without MESSAGE each line of standard input is one.")
@click.argument("file", metavar="FILE", shell_complete=options.completed_path("file"))
@click.argument("messages", metavar="[MESSAGE]…", nargs=-1)
@options.bundle
@options.policy
@options.trust
@click.option("--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Who gets the messages.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--attach",
    "attached",
    metavar="FILE",
    multiple=True,
    shell_complete=options.completed_path("file"),
    help="A picture or a PDF that comes with the first message; may be given several times.",
)
@options.json
def record(
    file: str,
    messages: tuple[str, ...],
    attached: tuple[str, ...],
    bundle: str | None,
    policy: str | None,
    trust: bool,
    agent: str | None,
    force: bool,
) -> int:
    """Start a swarm, send it messages one after the other, and write the run to FILE.

    The run has instances of its own, so it begins without a history. What the models answered and what the tools
    resulted in is written without secrets. Other commands can use the swarm meanwhile; that is recorded as well.
    """
    if os.path.lexists(file) and not force:
        raise fail("E_USAGE", f"{file} is there already", suggestion="Give --force to replace it.")
    texts = messages or _lines()
    with opened_files(attached) as files:
        place = locate(bundle, policy, trust=trust)
        run = os.urandom(8).hex()
        os.environ[RECORD_VARIABLE] = run
        # The instance key stands in texts of the run, where `default` is put in its place: no other word has it.
        key = f"recorded-{run}"
        try:
            with start(place) as kernel:
                entry = agent or kernel.entry_agent
                if not entry:
                    raise fail("E_USAGE", "the bundle has no entry agent; name the agent (--agent)")
                sent = [Sent(entry, key, text, files if number == 0 else []) for number, text in enumerate(texts)]
                answers = asked(kernel, sent, None if wants_json() else _show)
        finally:
            noted = collect(place.state_dir, run)
    made = make(noted, key, entry, _redactor(place))
    _write(file, made.data)
    told = {"file": os.path.abspath(file), "turns": made.turns, "requests": made.steps, "calls": made.calls}
    if wants_json():
        write_json({**told, "agents": made.agents, "warnings": made.warnings})
    else:
        what = f"{made.turns} turns, {made.steps} requests to models, {made.calls} calls"
        write(f"{file}: {what}", *(f"warning: {text}" for text in made.warnings), stream=sys.stderr)
    return 0 if all(answer.status == "completed" for answer in answers) else 1


class Sent(NamedTuple):
    """A message."""

    #: The agent that gets it.
    agent: str
    #: Its instance.
    instance: str
    #: The text.
    text: str
    #: The pictures and PDFs that come with it.
    files: list[OpenFile]


def asked(kernel: Kernel, messages: Iterable[Sent], then: Callable[[Answer], bool] | None) -> list[Answer]:
    """Send messages, each when the one before is answered. `then` gets each answer, and says whether to go on. Returns
    the answers. Raises GoondanError.
    """

    async def ask_all(session: Session) -> list[Answer]:
        answers = []
        for agent, key, text, files in messages:
            answer = await session.ask(Message(agent, key, text, files=session.lay_down(files)))
            answers.append(answer)
            if then is not None and not then(answer):
                break
        return answers

    return over_session(kernel, ask_all)


def _show(answer: Answer) -> bool:
    if answer.error is not None:
        write(*error_lines(answer.error), stream=sys.stderr)
    else:
        write_text(answer.response or "")
    return True


def _lines() -> list[str]:
    """The lines of standard input. Raises GoondanError E_USAGE when there is none."""
    text = read_all(MAX_LINE_BYTES).decode("utf-8", "replace")
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise fail("E_USAGE", "there is no message to send", suggestion="gdn record FILE MESSAGE…")
    return lines


def _redactor(place: BundleTarget) -> Callable[[str], str]:
    """Takes values of the person's environment out of a text: those that look like secrets, and those that the bundle
    and its tools are given.
    """
    inspected = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy)
    granted = {name for tool in inspected.checked.runs_in_jails for name in (tool.granted or tool.sandbox).env}
    loaded = inspected.loaded
    named = granted.union(variables.wanted_variables(loaded.documents))
    return variables.EnvironmentRedactor(os.environ, named, [source.data for source in loaded.sources])


def _write(file: str, data: bytes) -> None:
    """Put the file in its place, whole. Raises GoondanError E_USAGE."""
    beside = f"{file}.new-{os.getpid()}"
    try:
        with open(beside, "xb") as made:
            made.write(data)
        os.replace(beside, file)
    except OSError as error:
        with suppress(OSError):
            os.unlink(beside)
        raise fail("E_USAGE", f"{file} cannot be written: {error.strerror}") from None


# --- one file of what the instances have written down ---------------------------------------------------------------


def collect(state_dir: str, run: str) -> list[list[wire.Noted]]:
    """What each instance has written down of a run, and delete it."""
    found = []
    for instance in instances(state_dir):
        path = os.path.join(instance.folder, wire.noted_file(run))
        try:
            data = read_file(path, 2 * wire.MAX_FILE_BYTES)
        except lookup.Unreadable:
            continue
        found.append(wire.read_noted(data))
        with suppress(OSError):
            os.unlink(path)
    return found


def make(noted: Iterable[list[wire.Noted]], key: str, entry_agent: str, redact: Callable[[str], str]) -> Made:
    """The recording of a run. `key` is the instance key that the run had of its own. `redact` takes secrets out of a
    text.

    Raises GoondanError E_STATE when the run was too large to be recorded, or not all of it could be written.
    """
    parts: list[wire.Part] = []
    outside: list[tuple[int, wire.RecordedTurn]] = []
    warnings: list[str] = []
    for lines in noted:
        stopped = next((line.part for line in lines if isinstance(line.part, wire.Stopped)), None)
        if stopped is not None:
            raise fail("E_STATE", f"not all of the run could be recorded: {stopped.why}", suggestion="Record less.")
        of_instance = _of_instance(lines, lambda text: redact(text).replace(key, USUAL))
        parts += of_instance.parts
        outside += of_instance.outside
        if of_instance.earlier:
            turn = of_instance.parts[0]
            warnings.append(
                f"agent {turn.agent} ({turn.instance}) had a conversation before: a replay has none, and will differ"
            )
    place = {id(turn): n for n, (_, turn) in enumerate(sorted(outside, key=lambda pair: pair[0]), 1)}
    parts = [
        replace(part, outside=place.get(id(part), 0)) if isinstance(part, wire.RecordedTurn) else part for part in parts
    ]
    parts.sort(key=wire.in_order)
    lines_of_file = [wire.Recording(wire.FORMAT, entry_agent), *parts]
    data = b"".join(map(wire.encode, lines_of_file))
    if len(data) > wire.MAX_FILE_BYTES:
        raise fail("E_STATE", f"the recording would have {len(data)} bytes, limit {wire.MAX_FILE_BYTES}")
    if any(isinstance(part, wire.RecordedTurn) and part.status is None for part in parts):
        warnings.append("a turn had not ended; a replay of it will differ")
    return Made(
        data=data,
        turns=sum(isinstance(part, wire.RecordedTurn) for part in parts),
        steps=sum(isinstance(part, wire.RecordedStep) for part in parts),
        calls=sum(isinstance(part, wire.RecordedCall) for part in parts),
        agents=sorted({part.agent for part in parts}),
        warnings=warnings,
    )


class _OfInstance(Struct):
    """The part of one instance."""

    #: Its lines, in the order of the file.
    parts: list[wire.Part]
    #: When each turn from outside began, and the turn, which is one of `parts`.
    outside: list[tuple[int, wire.RecordedTurn]]
    #: Whether it had turns before the run.
    earlier: bool


def _of_instance(lines: list[wire.Noted], clean: Callable[[str], str]) -> _OfInstance:
    turns: dict[int, wire.RecordedTurn] = {}
    began: dict[int, int] = {}
    calls: dict[tuple[int, str], wire.RecordedCall] = {}
    listings: dict[tuple[str, int], wire.RecordedListing] = {}
    for line in lines:
        part = line.part
        if isinstance(part, wire.RecordedTurn):
            earlier = turns.get(part.turn)  # the files stand only where the turn begins
            files = part.files or ([] if earlier is None else earlier.files)
            turns[part.turn] = replace(_cleaned(replace(part, files=[]), clean), files=files)
            began.setdefault(part.turn, line.at)
        elif isinstance(part, wire.RecordedCall):
            calls[part.turn, part.id] = _cleaned(part, clean)
        elif isinstance(part, wire.RecordedListing):
            listings[part.server, part.n] = _cleaned(part, clean)
    number = {turn: n for n, turn in enumerate(sorted(turns), 1)}
    numbered = {turn: replace(part, turn=number[turn], outside=0) for turn, part in turns.items()}
    return _OfInstance(
        parts=[
            *listings.values(),
            *numbered.values(),
            *_steps((line.part for line in lines if isinstance(line.part, wire.RecordedStep)), number, clean),
            *(replace(call, turn=number[call.turn]) for call in calls.values() if call.turn in number),
        ],
        outside=[(began[turn], numbered[turn]) for turn, part in turns.items() if part.outside],
        earlier=bool(turns) and min(turns) > 1,
    )


def _steps(
    steps: Iterable[wire.RecordedStep], number: dict[int, int], clean: Callable[[str], str]
) -> list[wire.RecordedStep]:
    """The last of each step, in order, with the entries that differ from the step before."""
    whole: dict[tuple[int, int, bool, int], tuple[wire.RecordedStep, wire.Request]] = {}
    for step, request in wire.whole_requests(steps):
        whole[step.turn, step.step, step.aside, step.n] = step, request
    kept: list[wire.RecordedStep] = []
    before = wire.NOTHING
    for place in sorted(whole):
        step, request = whole[place]
        if step.turn not in number:
            continue
        cleaned = wire.Request([shortened(clean(entry)) for entry in request.entries], request.tools)
        shared, entries, tools = wire.parts_of(cleaned, wire.NOTHING if step.aside else before)
        before = before if step.aside else cleaned
        plain = _cleaned(replace(step, entries=[]), clean)
        kept.append(replace(plain, turn=number[step.turn], shared=shared, entries=entries, tools=tools))
    return kept


def _cleaned(part: Any, clean: Callable[[str], str]) -> Any:
    """A line with each of its texts passed through `clean`."""
    kind = type(part)
    told = msgspec.to_builtins(part)
    return msgspec.convert({"kind": told.pop("kind"), **_texts(told, clean)}, kind)


def _texts(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _texts(item, clean) for name, item in value.items()}
    return [_texts(item, clean) for item in value] if isinstance(value, list) else value


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
        OpenFile(spawn.memory_file("attached", file.data), len(file.data), file.media_type, file.name or "")
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
            return [Difference(agent, instance, came + 1, 0, what, f"{expected} turns", f"{came} turns")]
        time.sleep(_POLL_S)
    return []


def _trusted(place: BundleTarget, trust: bool) -> None:
    """See that the person has agreed to what the bundle asks for. Raises GoondanError."""
    asking = Asking(everything=trust)
    open_bundle(place.bundle, state_dir=place.state_dir, handlers=False, asking=asking, runs=False)


def _copy_grants(place: BundleTarget, root: str) -> None:
    """Take over what the person has granted and installed: a bundle that needs it could not start without."""
    usual = paths.root_of(place.state_dir)
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
            return Difference(turn.agent, turn.instance, turn.turn, 0, what, expected or "", came)
    return None


def first(found: Sequence[FoundDifference]) -> Difference | None:
    """The difference that was met first. The others may be its consequences."""
    return min(found, key=lambda one: one.at).difference if found else None


def found(state_dir: str) -> list[FoundDifference]:
    """The differences that agent instances have met."""
    differences = []
    for place in conversation_files(state_dir, None, None):
        with suppress(lookup.Unreadable, msgspec.DecodeError):
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


COMMANDS: Final[Mapping[str, click.Command]] = {"record": record, "replay": replay}
