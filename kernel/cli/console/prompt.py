"""The prompt at which a person types: an editor with history and several lines, or a plain prompt if the terminal has
no cursor movement.

In the editor, Enter sends. Alt-Enter, a backslash at the end, and pasted line ends begin another line. Ctrl-C clears
the text, Ctrl-D on an empty line ends the input. The editor is drawn on stderr, so that stdout holds nothing but
answers.

Source: docs/design/commands.md section 5.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final, Protocol

from goondan.kernel.cli.console import history
from goondan.kernel.cli.console.screen import has_cursor
from goondan.kernel.cli.console.typed_ahead import FromReader, FromTerminal, Take, Taking
from goondan.kernel.cli.lines import Line, LineReader
from goondan.kernel.cli.output import write
from goondan.kernel.cli.terminal import style_of

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.key_binding.key_processor import KeyPress

PROMPT: Final = "> "
CONTINUED: Final = ". "


class Prompt(Protocol):
    """Asks for one message after another."""

    #: A line for the person about the prompt.
    hint: str

    async def read(self) -> Line | None:
        """The next message, or None at the end of input. Raises OSError when the terminal cannot be read."""

    def interrupted(self) -> None:
        """SIGINT came while a message is read."""

    async def question(self, text: str) -> str | None:
        """Ask for a text. Text that was typed before is left out. None at the end of input or after Ctrl-C. No message
        may be read at the same time.
        """

    async def notice(self, lines: list[str]) -> None:
        """Show lines on stderr, also while a message is read."""

    def ahead(self, take: Take) -> AbstractContextManager[None]:
        """Inside this context a turn runs: nothing that is typed is echoed, and each whole line goes to `take`."""

    def forget_ahead(self) -> None:
        """Throw away what was typed and is not a whole line yet."""

    @property
    def ended(self) -> bool:
        """Whether the input has ended while a turn ran."""


def open_prompt(history_path: str, limit: int) -> Prompt:
    """The best prompt for this terminal. A message has at most `limit` bytes. Call inside the running loop."""
    return Editor(history_path, limit) if has_cursor() else PlainPrompt(limit)


class PlainPrompt:
    """The line editing of the terminal. One line is one message."""

    hint = "end with Ctrl-D"

    def __init__(self, limit: int) -> None:
        self._reader = LineReader(0, limit)
        self._lines: AsyncIterator[Line] = aiter(self._reader)
        self._taking: Taking | None = None

    async def read(self) -> Line | None:
        """See Prompt."""
        _show_prompt()
        line = await anext(self._lines, None)
        if line is None:
            sys.stderr.write("\n")
            if self._reader.error is not None:
                raise self._reader.error
        return line

    @contextmanager
    def ahead(self, take: Take) -> Iterator[None]:
        """See Prompt."""
        self._taking = Taking(FromReader(0, self._reader, take))
        try:
            with self._taking:
                yield
        finally:
            self._taking = None

    def forget_ahead(self) -> None:
        """See Prompt."""
        _forget_typed()

    @property
    def ended(self) -> bool:
        """See Prompt. The reader says so itself."""
        return False

    def interrupted(self) -> None:
        """The terminal has dropped the line."""
        sys.stderr.write("\n")
        _show_prompt()

    async def question(self, text: str) -> str | None:
        """See Prompt."""
        with nullcontext() if self._taking is None else self._taking.paused():
            _forget_typed()
            sys.stderr.write(text)
            sys.stderr.flush()
            line = await self._reader.next_new()
        return None if line is None else (line.data or b"").decode("utf-8", "replace")

    async def notice(self, lines: list[str]) -> None:
        """See Prompt."""
        write("", *lines, stream=sys.stderr)


def _forget_typed() -> None:
    """Throw away text that was typed before a question: it is no answer."""
    import termios

    with suppress(termios.error, OSError):
        termios.tcflush(0, termios.TCIFLUSH)


def _show_prompt() -> None:
    sys.stderr.write(PROMPT)
    sys.stderr.flush()


class Editor:
    """The editor of prompt_toolkit. It is imported only when a person is there: the import takes a tenth of a
    second.
    """

    hint = "Alt-Enter for another line, Ctrl-D to end"

    def __init__(self, history_path: str, limit: int) -> None:
        self._limit = limit
        self._number = 0
        self._session = _session(history_path)
        self._taking: Taking | None = None
        self._ended = False
        #: The beginning of a message that was typed while a turn ran.
        self._begun = ""

    async def read(self) -> Line | None:
        """See Prompt."""
        while True:
            try:
                begun, self._begun = self._begun, ""
                text = await self._session.prompt_async(default=begun, set_exception_handler=False, handle_sigint=False)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None
            return self._line(text)

    def _line(self, text: str) -> Line:
        self._number += 1
        data = text.encode("utf-8", "replace")
        return Line(self._number, data if len(data) <= self._limit else None, len(data))

    @contextmanager
    def ahead(self, take: Take) -> Iterator[None]:
        """See Prompt. Whole lines that were read together with the last one come first."""
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead

        lines, rest = whole_lines(get_typeahead(self._session.input))
        store_typeahead(self._session.input, rest)
        for text in lines:
            take(self._line(text))
        terminal = FromTerminal(0, self._limit, take)
        self._taking = Taking(terminal)
        try:
            with self._taking:
                yield
        finally:
            self._ended = self._ended or terminal.ended
            self._begun += terminal.begun()
            self._taking = None

    def forget_ahead(self) -> None:
        """See Prompt."""
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._session.input)
        self._begun = ""
        _forget_typed()

    @property
    def ended(self) -> bool:
        """See Prompt."""
        return self._ended

    async def question(self, text: str) -> str | None:
        """See Prompt."""
        with nullcontext() if self._taking is None else self._taking.paused():
            return await self._question(text)

    async def _question(self, text: str) -> str | None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead

        keys = self._session.input
        before = get_typeahead(keys)  # read together with the line before it: it belongs to the next message
        _forget_typed()
        session: PromptSession[str] = PromptSession(input=keys, output=self._session.output)
        try:
            return await session.prompt_async(text, set_exception_handler=False, handle_sigint=False)
        except (KeyboardInterrupt, EOFError):
            return None
        finally:
            store_typeahead(keys, before + get_typeahead(keys))

    async def notice(self, lines: list[str]) -> None:
        """See Prompt."""
        from prompt_toolkit.application import run_in_terminal

        if self._session.app.is_running:
            await run_in_terminal(lambda: write(*lines, stream=sys.stderr))
        else:
            write(*lines, stream=sys.stderr)

    def interrupted(self) -> None:
        """Handle a SIGINT from another process as Ctrl-C, which is a key here."""
        app = self._session.app
        if app.is_running:
            app.exit(exception=KeyboardInterrupt())


def _session(history_path: str) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.output.vt100 import Vt100_Output

    class Kept(History):
        """The entries of earlier sessions, and of this one."""

        def load_history_strings(self) -> Iterable[str]:
            return reversed(history.load(history_path))

        def store_string(self, string: str) -> None:
            history.append(history_path, string)

    output = Vt100_Output.from_pty(sys.stderr)
    # The terminal answers the question for its cursor as if a person had typed the answer. A late answer reaches
    # whatever reads then.
    output.enable_cpr = False
    return PromptSession(
        [("class:prompt bold ansigreen", PROMPT)],
        multiline=True,
        prompt_continuation=lambda width, line, wrapped: CONTINUED,
        key_bindings=_keys(),
        history=Kept(),
        output=output,
        color_depth=None if style_of(sys.stderr).colour else ColorDepth.DEPTH_1_BIT,
        complete_while_typing=False,
        reserve_space_for_menu=0,
    )


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if continues(buffer.document.text_before_cursor) and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def whole_lines(keys: Sequence[KeyPress]) -> tuple[list[str], list[KeyPress]]:
    """The lines that these keys have typed and sent, and the keys behind the last one."""
    from prompt_toolkit.keys import Keys

    lines, typed, rest = [], "", 0
    for at, press in enumerate(keys):
        if press.key == Keys.ControlM:
            lines.append(typed)
            typed, rest = "", at + 1
        elif press.key == Keys.BracketedPaste or len(press.key) == 1:
            typed += press.data
    return lines, list(keys[rest:])


def continues(text: str) -> bool:
    """Whether a text ends with a backslash that asks for another line: an odd number of them."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1
