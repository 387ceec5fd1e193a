"""Steps against frames: names that the program chose are put into what it is sent, and found in what it sends. Pure.

Source: schemas/vectors/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Raw

#: Characters of a value that a report shows.
SHOWN: Final = 160
#: Lists in lists that are values, and may come back.
SHALLOW: Final = 60
#: Milliseconds by which a deadline may be more than the steps say: what was waited on a machine is never exact.
DEADLINE_SLACK_MS: Final = 250


class Names:
    """What `$name`, and each text of `chosen`, stands for. The first frame that has it decides."""

    def __init__(self, chosen: Iterable[str] = ()) -> None:
        self.known: dict[str, Any] = {}
        self._chosen = frozenset(chosen)

    def fill(self, value: Any) -> Any:
        """A value of a step as it is sent. {"repeat": text, "times": n} is a long text, {"nest": n} lists in lists.

        Raises KeyError for a text of `chosen` that the program has not said yet.
        """
        if isinstance(value, dict):
            if value.keys() == {"repeat", "times"}:
                return value["repeat"] * value["times"]
            if value.keys() == {"nest"}:
                return _nested(value["nest"])
            return {key: self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, str):
            name, colon, rest = value.partition(":")
            if value in self.known or value in self._chosen:
                return self.known[value]
            return f"{self.known[name]}:{rest}" if colon and name in self._chosen and name in self.known else value
        return value

    def differs(self, wanted: Any, got: Any, at: str = "") -> str | None:
        """Where `got` is not what a step wants; None when it is. It may have more fields. null: the field is absent."""
        if isinstance(wanted, dict) and not wanted.keys() & {"repeat", "nest"}:
            if not isinstance(got, dict):
                return f"{at or 'it'} is {short(got)}"
            return next(
                (
                    text
                    for key, item in wanted.items()
                    if (text := self._field(key, item, got.get(key), at)) is not None
                ),
                None,
            )
        if isinstance(wanted, str) and (wanted.startswith("$") or wanted in self._chosen):
            known = self.known.setdefault(wanted, got)
            good = known == got and isinstance(got, str | int)
            return None if good else f"{at} is {short(got)}, and was {short(known)}"
        if self.fill(wanted) == got and isinstance(wanted, bool) == isinstance(got, bool):
            return None
        return f"{at} is {short(got)}, not {short(self.fill(wanted))}"

    def _field(self, key: str, wanted: Any, got: Any, at: str) -> str | None:
        if got is None and (key == "versions" or (wanted is not None and wanted in (0, False, []))):
            return None  # what has its default is absent
        if key == "exports" and isinstance(got, list):
            return self.differs(sorted(wanted), sorted(map(str, got)), key)
        if key == "deadlineMs" and wanted is not None:
            good = isinstance(got, int) and 1 <= got <= wanted + DEADLINE_SLACK_MS
            return None if good else f"{at}{key} is {short(got)}, and {wanted} are left"
        return self.differs(wanted, got, f"{at}.{key}" if at else key)


def _nested(depth: int) -> Any:
    if depth > SHALLOW:
        return Raw(b"\x91" * (depth - 1) + b"\x90")  # an encoder of values would not go so deep
    return [_nested(depth - 1)] if depth > 1 else []


def short(value: Any) -> str:
    """A value for a report, on one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # TypeError: a key that is none of JSON's
        text = repr(type(value))
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
