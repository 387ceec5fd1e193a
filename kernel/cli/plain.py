"""Prose of models and errors as a terminal may get it, in pieces or whole. Pure; terminal.py has names and tables.

A terminal obeys what is printed on it: escape sequences move the cursor, set the title, answer as if a person typed,
write the clipboard. So no control character reaches one, and none of the marks that turn the order of letters round.

Source: PROTOCOL.md "What a receiver checks itself".
"""

from __future__ import annotations

import unicodedata
from typing import Final

#: What stays of the controls: line end and tab. A carriage return goes without a trace, since line ends may hold one.
_KEPT: Final = "\n\t"
_CONTROLS: Final = [*range(0x20), *range(0x7F, 0xA0)]
#: Embeddings, overrides and isolates: text that reads otherwise than it is.
_TURNING: Final = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_TABLE: Final[dict[int, str | None]] = {
    **{code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in _KEPT},
    **{code: f"\\u{code:04x}" for code in _TURNING},
    ord("\r"): None,
}
#: The same for one line: what would end it becomes a space.
_LINE_TABLE: Final[dict[int, str | None]] = {**_TABLE, **dict.fromkeys(map(ord, "\n\t\u2028\u2029"), " ")}


def flowing(text: str) -> str:
    """Text of any origin for a terminal: controls become visible (`\\x1b`), line ends and tabs stay."""
    return text.translate(_TABLE)


def one_line(text: str, limit: int) -> str:
    """A name or message of any origin for a place in a line: at most `limit` characters."""
    flat = text[:limit].translate(_LINE_TABLE)
    return flat if len(flat) <= limit else flat[:limit]


def fit(text: str, columns: int) -> str:
    """As much of a line as fits into so many columns; wide characters take two, combining ones none."""
    used = 0
    for at, char in enumerate(text):
        used += 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used > columns:
            return text[:at]
    return text
