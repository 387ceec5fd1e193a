"""Takes fields of binary protocols (TLS, DNS) off the front of bytes that somebody else has written. Pure."""

from __future__ import annotations


class TooShort(ValueError):
    """A field is longer than the bytes that are left."""


class Fields:
    """Takes fields off the front. Each method raises TooShort when the field is not all there."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        #: Where the next field begins.
        self.at = at

    def take(self, size: int) -> bytes:
        """So many bytes."""
        end = self.at + size
        if end > len(self._data):
            raise TooShort("a field ends too early")
        found = self._data[self.at : end]
        self.at = end
        return found

    def number(self, width: int) -> int:
        """A number of so many bytes, the highest one first."""
        return int.from_bytes(self.take(width), "big")

    def vector(self, width: int) -> bytes:
        """A field with its length before it, which is a number of so many bytes."""
        return self.take(self.number(width))

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return self.at == len(self._data)
