"""The lines for a person's terminal: with our colours, and without control sequences of others.

Names of folders, texts of models, tools, instance keys and logs come from outside, and a terminal obeys bytes such as
ESC. Every line of a command goes through `shown_line`, which shows such characters by their number. So a `Style` writes
no control sequences. It writes marks that nobody else can write, and `shown_line` turns them into colours.

Source: docs/design/commands.md section 3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

import msgspec

from goondan.schemas.text.visible import by_number, visible_line, visible_names

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


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """A table: a line each, its cells from outside made printable and filled up to the widest of their column."""
    table = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(width_of, column)) for column in zip(*table, strict=True)]
    return ["  ".join(filled(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


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
