"""Cuts lists for operators and agents so that they fit in one frame, whatever names and ids they contain. Pure.

Anybody can choose ids and keys. A frame that is too long would end the connection of the asker, and nobody could see
the list any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from goondan.schemas.wire.codec import encode_value

#: Bytes of the entries of one answer. The rest of a frame of 1 MiB is enough for everything else in it.
LIST_BYTES: Final = 768 << 10

T = TypeVar("T")


def fitting(entries: Iterable[T], room: int = LIST_BYTES) -> list[T]:
    """The first entries, as many as fit into `room` bytes."""
    found: list[T] = []
    for entry in entries:
        room -= len(encode_value(entry))
        if room < 0:
            break
        found.append(entry)
    return found
