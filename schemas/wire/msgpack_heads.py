"""The meaning of a msgpack value's first byte, as a table for walks over hostile bytes. Pure.

Two walks use it. codec.py counts and measures any value; toolhost/untrusted.py demands that a value is JSON.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

from typing import Final

#: Kinds of values. OTHER is what JSON does not have: bin, ext, and the byte that is never used.
STRING, SCALAR, LIST, MAP, OTHER = range(5)

#: For each first byte: the kind, how many bytes a length has that follows, and the size without that length. A size is
#: bytes, items of a list, or keys and values of a map. A length that follows counts pairs of a map.
HEADS: Final = (
    *[(SCALAR, 0, 0)] * 0x80,
    *((MAP, 0, size * 2) for size in range(16)),
    *((LIST, 0, size) for size in range(16)),
    *((STRING, 0, size) for size in range(32)),
    (SCALAR, 0, 0), (OTHER, 0, 0), (SCALAR, 0, 0), (SCALAR, 0, 0),
    (OTHER, 1, 0), (OTHER, 2, 0), (OTHER, 4, 0), (OTHER, 1, 1), (OTHER, 2, 1), (OTHER, 4, 1),
    *((SCALAR, 0, size) for size in (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)),
    *((OTHER, 0, size) for size in (2, 3, 5, 9, 17)),
    (STRING, 1, 0), (STRING, 2, 0), (STRING, 4, 0), (LIST, 2, 0), (LIST, 4, 0), (MAP, 2, 0), (MAP, 4, 0),
    *[(SCALAR, 0, 0)] * 0x20,
)  # fmt: skip
