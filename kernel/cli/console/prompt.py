"""The prompt at which a person types: an editor with history and several lines, or a plain prompt if the terminal has
no cursor movement; and the whole lines that a person types while a turn runs.

In the editor, Enter sends. Alt-Enter, a backslash at the end, and pasted line ends begin another line. Ctrl-C clears
the text, Ctrl-D on an empty line ends the input. The editor is drawn on stderr, so that stdout holds nothing but
answers.

While a turn runs, the terminal keeps its line editing and its Ctrl-C. Only the echo is off, which would mix into the
answer. What is not a whole line yet stays in the terminal, and the next prompt gets it.

The lines that a person has typed are kept between sessions: a file of JSON texts, one a line, mode 0600.
- The file has the newest MAX_ENTRIES entries and at most MAX_HISTORY_BYTES. Longer entries are not kept. The file is
  cut when it is loaded.
- An entry that begins with a space is not kept, as in a shell. So a person can type a secret.
- A file that cannot be read or written costs the history, not the session. The same holds for a link, a pipe, and a
  file of another user: none of them is followed.

Source: docs/design/commands.md section 5; docs/design/processes.md section 8.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from goondan.kernel.cli.console.lines import CHUNK, Line, LineReader, LineSplitter
from goondan.kernel.cli.console.screen import has_cursor
from goondan.kernel.cli.output import drop_typed_ahead, style_of, write
from goondan.schemas.system.directories import replace_file

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.key_binding.key_processor import KeyPress

#: Keys that are no characters (arrows and the like), as a terminal sends them, and other control characters.
_KEYS: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?|[\x00-\x08\x0b-\x1f\x7f]")
#: The place of the local modes in what tcgetattr gives.
_LOCAL: Final = 3
#: The descriptor at which a person types.
_TERMINAL: Final = 0

#: Gets each line.
Take = Callable[[Line], None]


def _without_keys(line: Line) -> Line:
    """A line without the keys that moved a cursor which was not there."""
    if line.data is None:
        return line
    data = _KEYS.sub("", line.data.decode("utf-8", "replace")).encode()
    return Line(line.number, data, len(data))


PROMPT: Final = "> "
CONTINUED: Final = ". "


class Prompt:
    """Asks for one message after another. While a turn runs, whole lines that are typed are taken ahead."""

    #: A line for the person about the prompt.
    hint: str

    def __init__(self) -> None:
        #: The input has ended while a turn ran, and no reader says so itself.
        self.ended = False
        #: Takes what is typed while a turn runs. None: no turn runs.
        self._take: Take | None = None
        #: The modes of the terminal before the turn.
        self._modes: list[object] | None = None

    async def read(self) -> Line | None:
        """The next message, or None at the end of input. Raises OSError when the terminal cannot be read."""
        raise NotImplementedError

    def interrupted(self) -> None:
        """SIGINT came while a message is read."""
        raise NotImplementedError

    async def question(self, text: str) -> str | None:
        """Ask for a text. Text that was typed before is left out. None at the end of input or after Ctrl-C. No message
        may be read at the same time.
        """
        if self._take is not None:
            self._stop_taking()
        try:
            drop_typed_ahead()
            return await self._question(text)
        finally:
            if self._take is not None:  # the question may outlive the turn
                self._take_lines()

    async def notice(self, lines: list[str]) -> None:
        """Show lines on stderr, also while a message is read."""
        raise NotImplementedError

    @contextmanager
    def ahead(self, take: Take) -> Iterator[None]:
        """Inside this context a turn runs: nothing that is typed is echoed, and each whole line goes to `take`."""
        self._take = take
        self._take_lines()
        try:
            yield
        finally:
            self._take = None
            self._stop_taking()

    def forget_ahead(self) -> None:
        """Throw away what was typed and is not a whole line yet."""
        drop_typed_ahead()

    # --- inside

    def _take_lines(self) -> None:
        with suppress(termios.error, OSError):
            self._modes = termios.tcgetattr(_TERMINAL)
            quiet = termios.tcgetattr(_TERMINAL)
            quiet[_LOCAL] &= ~(termios.ECHO | termios.ECHONL)
            termios.tcsetattr(_TERMINAL, termios.TCSANOW, quiet)
        self._listen()

    def _stop_taking(self) -> None:
        self._listen_no_more()
        modes, self._modes = self._modes, None
        if modes is not None:
            with suppress(termios.error, OSError):
                termios.tcsetattr(_TERMINAL, termios.TCSANOW, modes)  # type: ignore[arg-type]

    def _taken(self, line: Line) -> None:
        if self._take is not None:
            self._take(_without_keys(line))

    async def _question(self, text: str) -> str | None:
        raise NotImplementedError

    def _listen(self) -> None:
        """Begin to take lines, or go on."""
        raise NotImplementedError

    def _listen_no_more(self) -> None:
        """Take no more lines."""
        raise NotImplementedError


def open_prompt(history_path: str, limit: int) -> Prompt:
    """The best prompt for this terminal. A message has at most `limit` bytes. Call inside the running loop."""
    return Editor(history_path, limit) if has_cursor() else PlainPrompt(limit)


class PlainPrompt(Prompt):
    """The line editing of the terminal. One line is one message."""

    hint = "end with Ctrl-D"

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._reader = LineReader(_TERMINAL, limit)
        self._lines: AsyncIterator[Line] = aiter(self._reader)
        self._pump: asyncio.Future[None] | None = None

    async def read(self) -> Line | None:
        """See Prompt."""
        _show_prompt()
        line = await anext(self._lines, None)
        if line is None:
            sys.stderr.write("\n")
            if self._reader.error is not None:
                raise self._reader.error
        return line

    def _listen(self) -> None:
        self._pump = asyncio.ensure_future(self._pass_on())

    def _listen_no_more(self) -> None:
        if self._pump is not None:
            self._pump.cancel()

    async def _pass_on(self) -> None:
        async for line in self._reader:
            self._taken(line)

    def interrupted(self) -> None:
        """The terminal has dropped the line."""
        sys.stderr.write("\n")
        _show_prompt()

    async def _question(self, text: str) -> str | None:
        sys.stderr.write(text)
        sys.stderr.flush()
        line = await self._reader.next_new()
        return None if line is None else (line.data or b"").decode("utf-8", "replace")

    async def notice(self, lines: list[str]) -> None:
        """See Prompt."""
        write("", *lines, stream=sys.stderr)


def _show_prompt() -> None:
    sys.stderr.write(PROMPT)
    sys.stderr.flush()


class Editor(Prompt):
    """The editor of prompt_toolkit. It is imported only when a person is there: the import takes a tenth of a
    second.
    """

    hint = "Alt-Enter for another line, Ctrl-D to end"

    def __init__(self, history_path: str, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._number = 0
        self._session = _session(history_path)
        self._splitter = LineSplitter(limit)
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
        try:
            with super().ahead(take):
                yield
        finally:  # the beginning of a line that was read and not sent is for the next prompt
            left = [_without_keys(line).data or b"" for line in self._splitter.finish()]
            self._begun += b"".join(left).decode("utf-8", "replace")

    def _listen(self) -> None:
        """Read the terminal itself: the editor reads only while it is shown."""
        if not self.ended:
            asyncio.get_running_loop().add_reader(_TERMINAL, self._read_ahead)

    def _listen_no_more(self) -> None:
        asyncio.get_running_loop().remove_reader(_TERMINAL)

    def _read_ahead(self) -> None:
        try:
            chunk = os.read(_TERMINAL, CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            self.ended = True
            self._listen_no_more()
        # What was typed while the prompt was still there has the line ends of its keys.
        for line in self._splitter.feed(chunk.replace(b"\r", b"\n")):
            self._taken(line)

    def forget_ahead(self) -> None:
        """See Prompt."""
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._session.input)
        self._begun = ""
        super().forget_ahead()

    async def _question(self, text: str) -> str | None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead

        keys = self._session.input
        before = get_typeahead(keys)  # read together with the line before it: it belongs to the next message
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
            return reversed(load_history(history_path))

        def store_string(self, string: str) -> None:
            keep_entry(history_path, string)

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


HISTORY_FILE: Final = "history"
MAX_ENTRIES: Final = 1000
#: The largest file (bytes), and the longest entry (characters).
MAX_HISTORY_BYTES: Final = 1 << 20
MAX_ENTRY: Final = 16 << 10
#: A entry_line of the file is at most so many times as long as its entry (`\\uXXXX` for a character).
_ESCAPED: Final = 12


def load_history(path: str) -> list[str]:
    """The entries, oldest first. A file that has grown too long is written again."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        size = _size(fd)
        if size is None:
            return []
        os.fchmod(fd, 0o600)
        entries = parse_history(os.pread(fd, 2 * MAX_HISTORY_BYTES, max(0, size - 2 * MAX_HISTORY_BYTES)))
        kept = newest_entries(entries)
        if len(kept) < len(entries) or size > MAX_HISTORY_BYTES:
            with suppress(OSError):
                _replace(path, kept)
        return kept
    except OSError:
        return []
    finally:
        os.close(fd)


def keep_entry(path: str, entry: str) -> None:
    """Append an entry to the file, if it is one that is kept."""
    if not is_kept(entry):
        return
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
        try:
            if _size(fd) is not None:
                os.write(fd, entry_line(entry))  # one write: lines of two sessions do not mix
        finally:
            os.close(fd)


def is_kept(entry: str) -> bool:
    """Whether an entry is kept."""
    return bool(entry.strip()) and not entry.startswith(" ") and len(entry) <= MAX_ENTRY


def entry_line(entry: str) -> bytes:
    """An entry as a entry_line of the file. Lone surrogates and all controls are escaped."""
    return json.dumps(entry).encode() + b"\n"


def parse_history(data: bytes) -> list[str]:
    """The entries in the bytes of a file. Lines that are no entry, such as a torn one, are left out."""
    entries = []
    for text in data.split(b"\n"):
        with suppress(ValueError, RecursionError):
            entry = json.loads(text) if len(text) <= MAX_ENTRY * _ESCAPED else None
            if isinstance(entry, str) and is_kept(entry):
                entries.append(entry)
    return entries


def newest_entries(entries: list[str]) -> list[str]:
    """The newest_entries entries, as many as are kept."""
    room = MAX_HISTORY_BYTES
    kept: list[str] = []
    for entry in reversed(entries[-MAX_ENTRIES:]):
        room -= len(entry_line(entry))
        if room < 0:
            break
        kept.append(entry)
    return kept[::-1]


def _size(fd: int) -> int | None:
    """The size of a file that is ours (bytes). None for anything else."""
    state = os.fstat(fd)
    return state.st_size if stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() else None


def _replace(path: str, entries: list[str]) -> None:
    replace_file(path, b"".join(map(entry_line, entries)))
