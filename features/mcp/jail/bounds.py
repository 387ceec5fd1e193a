"""What of a hostile server's values is let through. Pure.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final
from urllib.parse import urlsplit

from goondan.schemas.text.visible import BLANKS, IGNORABLE, is_needed

#: Levels of maps and arrays in one value. The host lets 60 through; the maps around a value need the rest.
MAX_DEPTH: Final = 56
#: Values, keys included, in one message. The host lets 200,000 of an output through.
MAX_VALUES: Final = 190_000
#: Characters of a name: of a tool, a prompt, a resource. The protocol says 128.
MAX_NAME: Final = 256
#: Characters of an URI.
MAX_URI: Final = 4096
#: Characters of a description that a model is shown in each step, so it pays for them.
MAX_DESCRIPTION: Final = 8192
#: Characters of a line of the log.
MAX_LINE: Final = 4096
#: Ends a text that was cut.
CUT: Final = "… (cut)"

# Control characters but tab and end of line; what turns the direction of text; what is there and not seen, in which
# text for models can be hidden from people (schemas/text/visible.py); lone surrogates.
_HIDDEN: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{IGNORABLE}{BLANKS}]")
_NOT_IN_LINES: Final = re.compile("[\t\n]")
_HALF: Final = re.compile("[\ud800-\udfff]")


class Excess(Exception):
    """A value that is larger than what is let through. Its text says which limit."""


def text(value: object, limit: int) -> str:
    """A text for people and models: without control characters and hidden ones, of at most `limit` characters.

    What is no string becomes "".
    """
    if not isinstance(value, str):
        return ""
    part = value[: limit + 1] if len(value) > 4 * limit else value
    shown = _HIDDEN.sub(lambda match: match[0] if is_needed(match) else "", part)
    return shown if len(shown) <= limit else shown[: limit - len(CUT)] + CUT


def line(value: object, limit: int = MAX_LINE) -> str:
    """The same on one line."""
    return _NOT_IN_LINES.sub(" ", text(value, limit)).strip()


def is_name(value: object, limit: int = MAX_NAME) -> bool:
    """Whether a name can be passed on as it is: by it, the server is asked."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= limit
        and all(map(is_needed, _HIDDEN.finditer(value)))
        and _NOT_IN_LINES.search(value) is None
    )


def is_page(url: str) -> bool:
    """Whether a person may be asked to open a URL. Its host is where it seems to be: no user stands before it
    (`https://bank.example@evil.example`), and no letter of it looks like another one.
    """
    if not is_name(url, MAX_URI) or not url.isascii() or "\\" in url:
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False


def check(value: Any, *, depth: int = MAX_DEPTH, values: int = MAX_VALUES) -> None:
    """Raise Excess when a JSON value has too many levels or too many values."""
    allowance = values
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                allowance -= 2 * len(item)
                below.extend(item.values())
            elif isinstance(item, list):
                allowance -= len(item)
                below.extend(item)
            if allowance < 0:
                raise Excess(f"it has more than {values} values")
        level = [item for item in below if isinstance(item, dict | list)]
    if level:
        raise Excess(f"it is nested deeper than {depth}")


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is int or type(value) is float:
        try:
            found = float(value)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None
    return None


def whole_characters(value: Any) -> Any:
    """The same JSON value with U+FFFD for each lone surrogate. Check its depth before."""
    if isinstance(value, str):
        return value if value.isascii() else _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return value


class Allowance:
    """So many at once, and so many a second after that. The time is passed in (seconds)."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._at = now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether there is room for `amount`; then it is taken."""
        passed = max(0.0, now - self._at)
        self._at = now
        self._left = min(self._burst, self._left + passed * self._per_s)
        if self._left < amount:
            return False
        self._left -= amount
        return True
