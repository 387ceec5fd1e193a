"""Lists for operators and agents that have to fit one frame, whatever the names and ids in them are. Pure.

Ids and keys are anybody's text. A frame that is too long would end the connection of whoever asked: nobody could look
any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from schemas.codec import encode_value

#: Bytes of the entries of one answer: what is left of a frame of 1 MiB is more than all else in it takes.
LIST_BYTES: Final = 768 << 10

T = TypeVar("T")


def fitting(entries: Iterable[T], room: int = LIST_BYTES) -> list[T]:
    """The first of these entries, as many as fit."""
    found: list[T] = []
    for entry in entries:
        room -= len(encode_value(entry))
        if room < 0:
            break
        found.append(entry)
    return found
