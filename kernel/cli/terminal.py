"""What reaches a person's terminal: our colours, and nobody else's control sequences.

Text of models, tools, instance keys and logs is anybody's. A terminal obeys bytes such as ESC, so whatever is no
printable character is shown by its number. Colours are ours alone and are added after that.

Source: design section 11 ("interactive use gets colour … pipes get plain text").
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, TextIO

import msgspec

_RESET: Final = "\x1b[0m"


def printable(text: str, *, keep: str = "") -> str:
    """`text` on one line: characters that are not printable become `\\xNN` or `\\uNNNN`, except those in `keep`.

    Among them are line ends, the C1 controls, and the characters that change the direction of text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


class Style(msgspec.Struct, frozen=True):
    """Colours, or none."""

    colour: bool = False

    def bold(self, text: str) -> str:
        """What matters most."""
        return self._paint("1", text)

    def dim(self, text: str) -> str:
        """What matters least."""
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
        """One of six colours that tell things apart, always the same for a number."""
        return self._paint(str(("36", "35", "34", "33", "32", "31")[number % 6]), text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}{_RESET}" if self.colour and text else text


def style_of(stream: TextIO, env: Mapping[str, str] | None = None) -> Style:
    """Colours on a terminal, unless NO_COLOR is set or the terminal is dumb; none in pipes and files."""
    variables = os.environ if env is None else env
    try:
        terminal = stream.isatty()
    except ValueError:
        terminal = False
    return Style(terminal and not variables.get("NO_COLOR") and variables.get("TERM") != "dumb")
