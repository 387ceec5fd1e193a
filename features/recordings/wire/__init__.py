"""A recorded run: its file, and what an agent's specification says of one.

The file has what came from outside, what each model answered, and what each call resulted in. It is JSON Lines: the
first line is a `Recording`; each other one is a `RecordedTurn`, `RecordedStep`, `RecordedCall` or `RecordedListing`.
`gdn record` writes the file, agents and `gdn replay` read it. Nobody believes what is in it: it has bounds, and is read
with types.

A request to a model is a list of texts, `entries`: the system prompt, each message, what extensions add; and the names
of the tools. Requests are compared by these. A step stores only what differs from the step before: the first `shared`
entries are the same.

Source: docs/design/turns.md section 12; docs/replay.md.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more.

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from goondan.schemas.models.server_answers import LEAST_WINDOW, MOST_WINDOW
from goondan.schemas.wire.codec import MAX_DEPTH
from goondan.schemas.wire.errors import ASK, ErrorCode, GoondanError, add_codes, fail

ERRORS: Final = add_codes(
    {
        "E_REPLAY_DIFFERS": ErrorCode(
            "Make the run as it was, or record it again: gdn record.",
            for_models=ASK,
        )
    }
)

#: The version of the file's form.
FORMAT: Final = 1
#: The largest file that is written or read (bytes). A run of hundreds of steps with large results fits.
MAX_FILE_BYTES: Final = 64 << 20
#: The longest line (bytes): a turn with the files of one message (20 MiB), as base64.
MAX_LINE_BYTES: Final = 32 << 20
#: The most lines.
MAX_LINES: Final = 100_000
#: The most entries of all requests of one instance together. A line of a few bytes can share many with the one before,
#: so the size of the file is no bound. A run of 3,000 steps has half as many.
MAX_ENTRIES: Final = 1 << 24


#: A number of tokens that can be added up and stored.
Tokens = Annotated[int, Meta(ge=0, le=1 << 53)]
#: The code of an error.
Code = Annotated[str, Meta(pattern="^E_[A-Z0-9_]{1,60}$")]
#: The size of a context (tokens).
Window = Annotated[int, Meta(ge=LEAST_WINDOW, lt=MOST_WINDOW)]


class ReplaySpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A recorded run that an agent repeats. Its tools answer from it and never run. Nobody believes the file: what
    the agent does is kept within the replay (docs/replay.md).
    """

    #: The file: an absolute path.
    recording: str
    #: Of another model's answers only the tool calls are compared with the recorded ones.
    only_calls: bool = False


class RecordingsPart(Struct, frozen=True, omit_defaults=True):
    """The feature's part of an agent's specification."""

    #: The name of the run that is recorded; "": nothing is recorded.
    record: str = ""
    #: The recorded run that it repeats; None: it works by itself.
    replay: ReplaySpec | None = None


class Recording(Struct, frozen=True, tag_field="kind", tag="recording", rename="camel", omit_defaults=True):
    """The first line."""

    #: The version of the form.
    format: int
    #: The agent that got the messages that name no other.
    entry_agent: str = ""


class RecordedFile(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A picture or a PDF that came with a message."""

    #: What it is.
    media_type: str
    #: Its bytes, in the file as base64.
    data: bytes
    #: The name that its sender gave it.
    name: str | None = None


class RecordedTurn(Struct, frozen=True, tag_field="kind", tag="turn", rename="camel", omit_defaults=True, kw_only=True):
    """One turn of an agent instance: what it was asked, and how it ended."""

    #: The agent.
    agent: str
    #: The instance key.
    instance: str
    #: The number of the turn in its instance, from 1.
    turn: int
    #: What the turn was asked.
    input: str = ""
    #: The pictures and PDFs that came with it.
    files: list[RecordedFile] = []
    #: The place among the messages that came from outside, from 1. 0: another agent, or the end of work, asked.
    outside: int = 0
    #: How it ended. None: it did not, while the run was recorded.
    status: Literal["completed", "failed"] | None = None
    #: The text of the answer.
    response: str | None = None
    #: The code of the error of a failed turn.
    error: str | None = None


class RecordedModelCall(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A tool call in a model's answer."""

    #: Its id.
    id: str
    #: The tool.
    name: str
    #: The arguments; {} when the model wrote no JSON object.
    args: dict[str, Any] = {}
    #: Why the arguments cannot be used; None when they can.
    broken: str | None = None


class RecordedAnswer(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A model's answer."""

    #: The text.
    text: str = ""
    #: The tool calls, in order.
    calls: list[RecordedModelCall] = []
    #: The reasoning in front of the text.
    reasoning: str = ""
    #: Why the model stopped.
    finish_reason: str | None = None
    #: It was cut off at the limit of tokens.
    cut_off: bool = False
    #: The model that answered, as its server names it.
    model: str | None = None
    #: Tokens, by the names of goondan.agentproc.providers.base.Usage.
    usage: dict[str, Tokens] | None = None


class RecordedFault(Struct, frozen=True, omit_defaults=True):
    """Why there was no answer."""

    #: The code of the error.
    code: Code
    #: Its message.
    message: str
    #: Of E_CONTEXT_OVERFLOW: the tokens of the request, as the server said; None: it did not say.
    tokens: Tokens | None = None
    #: Of the same: the tokens of the context.
    window: Tokens | None = None


class RecordedStep(Struct, frozen=True, tag_field="kind", tag="step", rename="camel", omit_defaults=True, kw_only=True):
    """One request to a model, and what came of it."""

    #: The agent.
    agent: str
    #: The instance key.
    instance: str
    #: The number of the turn in its instance, from 1.
    turn: int
    #: The number of the model call in its turn, from 1.
    step: int
    #: An extension or an MCP server asked, outside of the conversation.
    aside: bool = False
    #: Which of several requests of this step, from 1.
    n: int = 1
    #: The request had the messages of its turn only (the embedded console).
    own: bool = False
    #: The model was asked in place of another one, which gave no answer (`fallback`).
    in_place: bool = False
    #: How many entries it has in common with the last request before that was not aside.
    shared: int = 0
    #: The other entries.
    entries: list[str] = []
    #: The names of the tools, sorted. None: those of that request.
    tools: list[str] | None = None
    #: How many tokens the model's context holds; None: nobody knew it.
    window: Window | None = None
    #: The answer; None when there was none.
    answer: RecordedAnswer | None = None
    #: Why there was none.
    fault: RecordedFault | None = None


class RecordedCall(Struct, frozen=True, tag_field="kind", tag="call", rename="camel", omit_defaults=True, kw_only=True):
    """One tool call of a step, with its result."""

    #: The agent.
    agent: str
    #: The instance key.
    instance: str
    #: The number of the turn in its instance, from 1.
    turn: int
    #: The number of the step in its turn.
    step: int
    #: The id of the call.
    id: str
    #: The tool.
    tool: str
    #: The arguments that the tool got.
    args: Any = None
    #: The ToolResult without its receipt, as JSON values.
    result: dict[str, Any]


class RecordedListing(
    Struct, frozen=True, tag_field="kind", tag="listing", rename="camel", omit_defaults=True, kw_only=True
):
    """What an MCP server offered."""

    #: The agent.
    agent: str
    #: The instance key.
    instance: str
    #: The prefix of the server.
    server: str
    #: Which of the listings of this server, from 1.
    n: int
    #: The ServerListing as JSON values.
    listing: Any = None


Line = Recording | RecordedTurn | RecordedStep | RecordedCall | RecordedListing
Part = RecordedTurn | RecordedStep | RecordedCall | RecordedListing


class Stopped(Struct, frozen=True, tag_field="kind", tag="stopped"):
    """An agent instance has written nothing more from here on."""

    #: Why.
    why: str


class Noted(Struct, frozen=True):
    """A line of the file in which an agent instance writes down its part of a run. `gdn record` collects these."""

    #: When it was written (nanoseconds since 1970): the order of turns of different instances.
    at: int
    #: What was written.
    part: RecordedTurn | RecordedStep | RecordedCall | RecordedListing | Stopped


_encode: Final = msgspec.json.Encoder().encode
_decode_noted: Final = msgspec.json.Decoder(Noted).decode
_decode: Final = msgspec.json.Decoder(Line).decode


# --- the file -------------------------------------------------------------------------------------------------------


def encode(line: Line) -> bytes:
    """A line with its end."""
    return _encode(line) + b"\n"


def encode_noted(noted: Noted) -> bytes:
    """A line of an agent instance's own file."""
    return _encode(noted) + b"\n"


def read_noted(data: bytes) -> list[Noted]:
    """The lines of an agent instance's own file. A line that was cut off by the end of its process is left out."""
    found = []
    for text in data.splitlines():
        try:
            found.append(_decode_noted(text))
        except msgspec.DecodeError:
            continue
    return found


def noted_file(run: str) -> str:
    """The name of that file, beside the instance's conversation. `run` names the recorded run."""
    return f"recording-{run}.jsonl"


def read_recording(path: str, wanted: Callable[[Part], bool] = lambda part: True) -> tuple[Recording, list[Part]]:
    """The first line, and the wanted parts, of the recording at `path`, which has to be a regular file. Raises
    GoondanError E_CONFIG_NOT_FOUND, E_CONFIG_INVALID_VALUE.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise fail("E_CONFIG_INVALID_VALUE", f"the recording {path} is not a regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise fail("E_CONFIG_NOT_FOUND", f"the recording {path} cannot be read: {error.strerror}") from None
    return read_lines(data, path, wanted)


def read_lines(data: bytes, whose: str, wanted: Callable[[Part], bool]) -> tuple[Recording, list[Part]]:
    """The first line and the wanted parts of a recording. `whose` names it in errors. Raises GoondanError
    E_CONFIG_INVALID_VALUE for what is no recording, or too large.
    """
    if len(data) > MAX_FILE_BYTES:
        raise _unreadable(whose, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    head: Recording | None = None
    parts: list[Part] = []
    for number, text in enumerate(data.splitlines(), 1):
        if number > MAX_LINES:
            raise _unreadable(whose, f"it has more than {MAX_LINES} lines")
        line = _read_line(text, number, whose)
        if isinstance(line, Recording) != (number == 1):
            raise _unreadable(whose, f"line {number}: the first line, and no other, is a `recording`")
        if isinstance(line, Recording):
            if line.format != FORMAT:
                raise _unreadable(whose, f"it has format {line.format}, this version reads {FORMAT}")
            head = line
        elif wanted(line):
            parts.append(line)
    if head is None:
        raise _unreadable(whose, "it is empty")
    return head, parts


def _read_line(text: bytes, number: int, whose: str) -> Line:
    if len(text) > MAX_LINE_BYTES:
        raise _unreadable(whose, f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        line: Line = _decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(whose, f"line {number}: {str(error)[:200]}") from None
    if _is_deep(_values_of(line)):
        raise _unreadable(whose, f"line {number}: its values nest deeper than {MAX_DEPTH}")
    return line


def _values_of(line: Line) -> Any:
    """The values of a line whose shape is not fixed."""
    if isinstance(line, RecordedCall):
        return [line.args, line.result]
    if isinstance(line, RecordedListing):
        return line.listing
    if isinstance(line, RecordedStep) and line.answer is not None:
        return [call.args for call in line.answer.calls]
    return None


def _is_deep(value: Any) -> bool:
    """Whether a value nests deeper than anything on the wire. A loop, because it may be very deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _unreadable(whose: str, why: str) -> GoondanError:
    hint = "Record the run again: gdn record FILE MESSAGE."
    return fail("E_CONFIG_INVALID_VALUE", f"the recording {whose} cannot be read: {why}", suggestion=hint)


class Request(Struct, frozen=True):
    """A request to a model, as it is compared."""

    #: The system prompt, the messages and what extensions add, as texts.
    entries: list[str]
    #: The names of the tools, sorted.
    tools: list[str]


NOTHING: Final = Request([], [])


def parts_of(request: Request, before: Request) -> tuple[int, list[str], list[str] | None]:
    """What a step stores of its request when the last one was `before`: `shared`, `entries`, `tools`."""
    shared = shared_entries(before.entries, request.entries)
    return shared, request.entries[shared:], None if request.tools == before.tools else request.tools


def whole_requests(steps: Iterable[RecordedStep]) -> Iterator[tuple[RecordedStep, Request]]:
    """Each step with all of its request. The steps are those of one instance, in the order of the file. Raises
    GoondanError E_CONFIG_INVALID_VALUE when one shares more than there is, and for more than MAX_ENTRIES.
    """
    last, left = NOTHING, MAX_ENTRIES
    for step in steps:
        before = NOTHING if step.aside else last
        if step.shared > len(before.entries) or step.shared < 0:
            raise _unreadable(f"of agent {step.agent}", f"turn {step.turn}, step {step.step}: shared is {step.shared}")
        left -= step.shared + len(step.entries)
        if left < 0:
            raise _unreadable(f"of agent {step.agent}", f"its requests have more than {MAX_ENTRIES} entries")
        tools = before.tools if step.tools is None else step.tools
        whole = Request([*before.entries[: step.shared], *step.entries], tools)
        last = last if step.aside else whole
        yield step, whole


def shared_entries(before: Sequence[str], now: Sequence[str]) -> int:
    """How many entries two requests have in common, from the first on."""
    for at, (one, other) in enumerate(zip(before, now, strict=False)):
        if one != other:
            return at
    return min(len(before), len(now))


def in_order(part: Part) -> tuple[Any, ...]:
    """The key that sorts a recording: the same run always makes the same file."""
    if isinstance(part, RecordedListing):
        return (part.agent, part.instance, 0, 0, 0, part.server, part.n)
    if isinstance(part, RecordedTurn):
        return (part.agent, part.instance, part.turn, 0, 0, "", 0)
    if isinstance(part, RecordedStep):
        return (part.agent, part.instance, part.turn, part.step, 1 + part.aside, "", part.n)
    return (part.agent, part.instance, part.turn, part.step, 3, "", 0)  # calls keep their order
