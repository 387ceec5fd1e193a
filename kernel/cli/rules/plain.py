"""Makes texts of models and errors harmless for a terminal, in pieces or whole. Pure. For names and tables see
schemas/text/visible.py.

Source: PROTOCOL.md "What a receiver checks itself".
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from goondan.schemas.text.visible import CONTROLS, TURNING, by_number, visible_line

#: Of the controls, line end and tab stay. A carriage return is removed, because line ends may hold one.
_KEPT: Final = "\n\t"
_TABLE: Final[dict[int, str | None]] = {
    **{code: by_number(chr(code)) for code in (*CONTROLS, *TURNING) if chr(code) not in _KEPT},
    ord("\r"): None,
}
#: What becomes a space in one line.
_BREAKS: Final = re.compile("[\n\t\u2028\u2029]")


def flowing(text: str) -> str:
    """Text of any origin for a terminal: controls become visible (`\\x1b`), line ends and tabs stay."""
    return text.translate(_TABLE)


def one_line(text: str, limit: int) -> str:
    """A name or message of any origin for a place in a line: at most `limit` characters."""
    return visible_line(_BREAKS.sub(" ", text[:limit].replace("\r", "")))[:limit]


def duration(ms: int) -> str:
    """A time span in about three digits: `7 ms`, `1.24 s`, `3 min 5 s`."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.2f} s"
    return f"{ms // 60_000} min {ms // 1000 % 60} s"


def fit(text: str, columns: int) -> str:
    """As much of a line as fits into so many columns. Wide characters take two columns, combining ones none."""
    used = 0
    for at, char in enumerate(text):
        used += 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used > columns:
            return text[:at]
    return text


def broken(line: str, width: int) -> list[str]:
    """The pieces of a line that fit into so many columns each. A character outside of ASCII may take two of them."""
    line = line.expandtabs(4)
    step = width if line.isascii() else width // 2
    return [line[at : at + step] for at in range(0, len(line), step)] or [""]
