"""The output of commands: results, errors, answers, JSON documents, and lines with our colours. Only this module
prints, so only this module has to escape control characters.

Names of folders, texts of models, tools, instance keys and logs come from outside, and a terminal obeys bytes such as
ESC. Every line of a command goes through `shown_line`, which shows such characters by their number. So a `Style` writes
no control sequences. It writes marks that nobody else can write, and `shown_line` turns them into colours.

What a person is told about an answer besides its text goes to stderr, so a pipe gets the text alone.

Source: docs/design/commands.md sections 2 and 3.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec

from goondan.schemas.text.visible import by_number, visible_json, visible_line, visible_names
from goondan.schemas.wire.errors import ENVIRONMENT, GoondanError, fail, help_url
from goondan.schemas.wire.frames import Answer, ErrorPayload
from goondan.schemas.wire.usage import Usage

if TYPE_CHECKING:
    from goondan.schemas.worker.tool_host_reports import WorkerNews

#: A mark: between noncharacters of Unicode, a secret of this process and a colour. No text from outside can hold the
#: secret.
_SECRET: Final = os.urandom(8).hex()
_MARK: Final = re.compile(f"\ufdd0{_SECRET}([0-9]{{1,2}})\ufdd1")
_RESET: Final = "0"
#: What a list says of the agent that no bundle declares (goondan.schemas.wire.frames.OPERATOR_AGENT).
OPERATOR_NOTE: Final = "_operator is you: calls of `gdn call` run in its name, with every tool and without a model"


def printable(text: str, *, keep: str = "") -> str:
    """`text` on one line: characters that are not printable, and letters that look like others beside them, become
    `\\xNN` or `\\uNNNN`, except those in `keep`.

    Among them are line ends, the C1 controls, the characters that change the direction of text, and those that nobody
    sees.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else by_number(c) for c in visible_names(text))


def columns(lines: Iterable[Sequence[str]], *paints: Callable[[str], str]) -> list[str]:
    """A table: a line each, its cells from outside made printable and filled up to the widest of their column. The
    first columns are painted by `paints`.
    """
    table = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(width_of, column)) for column in zip(*table, strict=True)]
    made = []
    for line in table:
        cells = [filled(cell, width) for cell, width in zip(line, widths, strict=True)]
        painted = [paint(cell) for paint, cell in zip(paints, cells, strict=False)]
        made.append("  ".join([*painted, *cells[len(painted) :]]).rstrip())
    return made


def width_of(text: str) -> int:
    """How many cells a line of text takes on a terminal: a Korean letter takes two."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth  # most texts are ASCII

    width: int = wcswidth(text)
    return width if width >= 0 else len(text)  # a control character, which is printed by its number


def filled(text: str, width: int) -> str:
    """`text` with spaces behind it, up to `width` cells."""
    return text + " " * (width - width_of(text))


def shown_line(text: str) -> str:
    """A line as it is printed: with the colours of a Style, and with all other control characters escaped."""
    return shown_text(visible_line(text))


def shown_text(text: str) -> str:
    """A text of any number of lines with the colours of a Style. All other control characters are escaped already
    (plain.flowing).
    """
    return _MARK.sub("\x1b[\\1m", text)


def _mark(code: str) -> str:
    return f"\ufdd0{_SECRET}{code}\ufdd1"


class Style(msgspec.Struct, frozen=True):
    """Colours, or none. Its results are for goondan.kernel.cli.output, which prints them."""

    #: Whether there are colours.
    colour: bool = False

    def bold(self, text: str) -> str:
        """The most important text."""
        return self._paint("1", text)

    def dim(self, text: str) -> str:
        """The least important text."""
        return self._paint("2", text)

    def good(self, text: str) -> str:
        """Green."""
        return self._paint("32", text)

    def warning(self, text: str) -> str:
        """Yellow."""
        return self._paint("33", text)

    def bad(self, text: str) -> str:
        """Red."""
        return self._paint("31", text)

    def of(self, number: int, text: str) -> str:
        """One of six colours for telling things apart. A number always has the same colour."""
        return self._paint(str(("36", "35", "34", "33", "32", "31")[number % 6]), text)

    def _paint(self, code: str, text: str) -> str:
        return f"{_mark(code)}{text}{_mark(_RESET)}" if self.colour and text else text


def style_of(stream: TextIO, env: Mapping[str, str] | None = None) -> Style:
    """The style of a stream: colours on a terminal, unless NO_COLOR is set or the terminal is dumb. No colours in pipes
    and files.
    """
    variables = os.environ if env is None else env
    try:
        terminal = stream.isatty()
    except ValueError:
        terminal = False
    return Style(terminal and not variables.get("NO_COLOR") and variables.get("TERM") != "dumb")


_USAGE_CODES = ("E_USAGE", "E_CONFIG_")
#: The longest answer to a question (bytes).
MAX_ANSWER: Final = 100


def write(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines and flush them, on stdout by default. Each is one line on a terminal, whatever is in it: line ends
    and control characters are shown by their number. Characters that the terminal cannot show become `?`.
    """
    from goondan.kernel.cli.output import shown_line

    _put("\n".join(map(shown_line, lines)) + "\n", stream or sys.stdout)


def write_text(text: str, *, stream: TextIO | None = None, raw: bool = False) -> None:
    """Print a text of a model, on stdout by default, exactly as it is but for control characters. They are shown by
    their number in pipes and files, too, because at the end of most pipes is a terminal. `raw`: they stay.
    """
    from goondan.kernel.cli.rules.plain import flowing

    _put((text if raw else flowing(text)) + "\n", stream or sys.stdout)


def _put(text: str, out: TextIO) -> None:
    out.buffer.write(text.encode(out.encoding or "utf-8", "replace"))
    out.buffer.flush()


def columns_of(stream: TextIO, unknown: int) -> int:
    """The width of a terminal; `unknown` for what is none, or does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or unknown
    except (OSError, ValueError):
        return unknown


def write_json(value: Any) -> None:
    """Print one JSON document on one line."""
    sys.stdout.buffer.write(visible_json(_encoded(value)) + b"\n")
    sys.stdout.buffer.flush()


def emit(document: Any, lines: Iterable[str] = ()) -> None:
    """Print what a command has found or done: with --json (options.json) the document, else the lines, which are for a
    person. Lines that nobody reads are not made if `lines` is a generator.
    """
    if wants_json():
        write_json(document)
    elif made := list(lines):
        write(*made)


#: `--json` of the command that runs.
_as_json = False


def say_json(*, wanted: bool) -> None:
    """The command that runs was called with --json, or not."""
    global _as_json
    _as_json = wanted


def wants_json() -> bool:
    """Whether the command that runs was called with --json."""
    return _as_json


def pretty_lines(value: Any) -> list[str]:
    """A JSON document as lines for a person."""
    return visible_json(msgspec.json.format(_encoded(value), indent=2)).decode().split("\n")


def _encoded(value: Any) -> bytes:
    """A value as JSON. Bytes of a file's name that are not UTF-8 have no form in JSON and become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        from goondan.schemas.wire.codec import replace_surrogates

        return msgspec.json.encode(replace_surrogates(msgspec.to_builtins(value)))


def print_error(error: GoondanError, *, as_json: bool) -> None:
    """Print an error as the one JSON document on stdout, or as text on stderr. For a bundle, print all its problems."""
    problems = getattr(error, "problems", None)
    dropped = getattr(error, "dropped", 0)
    if as_json:
        document: dict[str, Any] = {"error": error.info}
        if problems:
            document["errors"] = problems
        if dropped:
            document["dropped"] = dropped
        write_json(document)
    elif problems:
        from goondan.kernel.bundle.rules.problems import counts, problem_lines

        lines = problem_lines(problems, os.getcwd())
        if dropped:
            lines.append(f"… and {dropped} more")
        write(*lines, counts(len(problems) + dropped, 0), stream=sys.stderr)
    else:
        write(*error_lines(error.info), stream=sys.stderr)


def error_lines(info: ErrorPayload) -> list[str]:
    """An error for a person: what happened, what to do, where to read more."""
    page = f"gdn explain {info.code}" if info.help_url == help_url(info.code) else info.help_url
    more = [f"  {text}" for text in (info.suggestion, page) if text]
    return [f"error: {info.message} [{info.code}]", *more]


def exit_code(error: GoondanError) -> int:
    """The exit status of an error: 2 for mistakes of the caller, 1 for everything else."""
    return 2 if error.info.code.startswith(_USAGE_CODES) else 1


def unexpected(error: BaseException) -> GoondanError:
    """The error that a person sees for a bug of ours, or for a refusal of the operating system."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return fail("E_STATE", f"{where}{error.strerror or error}")
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return fail("E_INTERNAL", f"{type(error).__name__}: {error}{where}")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it."""
    try:
        return stream.isatty()
    except ValueError:
        return False


#: The exit status of `gdn send` for an answer that was cut off.
CUT_OFF_STATUS = 3


def answer_document(event_id: str, answer: Answer, *, reasoning: bool = False) -> dict[str, Any]:
    """An answer as the JSON document of `send` and `run`. `reasoning`: with the model's reasoning, if there is any."""
    document: dict[str, Any] = {
        "eventId": event_id,
        "turnId": answer.turn_id,
        "traceId": answer.trace_id,
        "status": answer.status,
        "response": answer.response,
        "finishReason": answer.finish_reason,
    }
    if answer.object is not None:
        from goondan.schemas.wire.codec import from_raw

        document["object"] = from_raw(answer.object, dict)
    if answer.model is not None:
        document["model"] = answer.model
    if answer.usage is not None:
        document["usage"] = answer.usage
    if answer.cut_off:
        document["cutOff"] = True
    if reasoning and answer.reasoning:
        document["reasoning"] = answer.reasoning
    if answer.error is not None:
        document["error"] = answer.error
    return document


def tell_reasoning(answer: Answer) -> None:
    """Print the reasoning, unless the terminal on stdout has shown it while it came."""
    if answer.reasoning and not is_terminal(sys.stdout):
        write_text(answer.reasoning, stream=sys.stderr)


def tell_cut_off(answer: Answer) -> None:
    """Say that an answer was cut off, if it was."""
    if not answer.cut_off:
        return
    reason = f" ({printable(answer.finish_reason)})" if answer.finish_reason else ""
    told = (
        f"gdn: the answer was cut off at the model's limit of tokens{reason}; max_tokens in the Model's params sets it"
    )
    write(style_of(sys.stderr).warning(told), stream=sys.stderr)


def kept_lines(error: ErrorPayload, event_id: str) -> list[str]:
    """Where a message is that failed by no fault of its own."""
    kept = error.code in ENVIRONMENT
    return [f"  the message is kept: gdn dead requeue {printable(event_id)} sends it again"] if kept else []


def tell_usage(answer: Answer) -> None:
    """Say on a terminal what the turn has used, in one dim line; nothing where the server has counted nothing."""
    usage = answer.usage
    if usage is not None and (usage.input_tokens or usage.output_tokens) and is_terminal(sys.stderr):
        write(style_of(sys.stderr).dim(usage_line(usage, answer.model)), stream=sys.stderr)


def tell_servers(state_dir: str, told: set[str]) -> None:
    """Say which servers have ended by themselves, or never began, with their last words; each once. What was said
    is added to `told`.
    """
    from goondan.kernel.supervisor_client import ask_supervisor

    servers: Sequence[WorkerNews] = ()
    with suppress(GoondanError, OSError):  # the kernel has ended, and that is said elsewhere
        reply = ask_supervisor(state_dir, "ps")
        servers = () if reply is None else reply.servers or ()
    for news in servers:
        state = news.server
        if state is not None and state.state == "ended" and state.last_error and state.last_error not in told:
            told.add(state.last_error)
            from goondan.kernel.bundle.rules.kinds import server_rules  # of a bundle, and hardly any server ends

            rules = server_rules()
            shown = "" if rules is None else f"; `{rules.shown_by}` shows how it is"
            line = f"gdn: {printable(state.last_error)}{shown}"
            write(style_of(sys.stderr).warning(line), stream=sys.stderr)


def usage_line(usage: Usage, model: str | None) -> str:
    """What was used, in one line: `1,204 tokens in (980 cached), 40 out, $0.012300, openai/gpt-5.5`."""
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    thought = f" ({usage.reasoning_tokens:,} reasoning)" if usage.reasoning_tokens else ""
    parts = [f"{usage.input_tokens:,} tokens in{cached}", f"{usage.output_tokens:,} out{thought}"]
    if usage.cost is not None:
        parts.append(money(usage.cost, usage.currency))
    return ", ".join([*parts, *([] if model is None else [printable(model)])])


def token_text(used: Usage | None) -> str:
    """What model calls have used, for a person."""
    if used is None:
        return "none"
    calls = "1 model call" if used.model_calls == 1 else f"{used.model_calls} model calls"
    cached = f" ({used.cached_tokens} of them cached)" if used.cached_tokens else ""
    return f"{used.input_tokens} in{cached}, {used.output_tokens} out, in {calls}"


def money(cost: float, currency: str | None) -> str:
    """An amount of money: dollars with their sign, at least two digits behind the point and at most six."""
    whole = f"{cost:,.6f}".rstrip("0")
    digits = whole + "0" * max(0, 2 - len(whole.partition(".")[2]))
    return f"${digits}" if currency in (None, "USD") else f"{digits} {currency}"


def can_ask() -> bool:
    """Whether a person is at the terminal, and did not ask for JSON."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr) and "--json" not in sys.argv


def asked_at_terminal(*lines: str) -> str:
    """What the person at the terminal answers to these lines, in small letters. Text that was typed or pasted before
    them is no answer, and is thrown away.
    """
    drop_typed_ahead()
    write(*lines, stream=sys.stderr)
    # Read from the descriptor: later text is for the conversation, and must not stay in a buffer here.
    return os.read(sys.stdin.fileno(), MAX_ANSWER).decode("utf-8", "replace").strip().lower()


def confirmed(question: str) -> bool:
    """Whether the person at the terminal says yes. Anything but a clear yes is a no."""
    return asked_at_terminal(question) in ("y", "yes")


def drop_typed_ahead() -> None:
    """Throw away text that was typed or pasted before a question appeared: it is no answer."""
    import termios

    with suppress(termios.error, OSError, ValueError):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
