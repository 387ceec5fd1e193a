"""Text of any origin made visible: no character of it steers a terminal, hides or turns round what stands beside it.

A terminal obeys what is printed on it: escape sequences move the cursor, set the title, answer as if a person typed,
write the clipboard. A name with a line end in it makes a line that looks like one of ours. So these characters are
shown by their number. This is the one list of them.
"""

from __future__ import annotations

import re
from typing import Final

#: C0, DEL and C1.
CONTROLS: Final = [*range(0x20), *range(0x7F, 0xA0)]
#: Embeddings, overrides and isolates of bidirectional text: text with them reads otherwise than it is.
TURNING: Final = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
#: Line and paragraph separator.
SEPARATORS: Final = [0x2028, 0x2029]

#: Tags: characters without a form, in which a whole sentence can hide.
_TAGS: Final = range(0xE0000, 0xE0080)
#: Characters that are there but are not seen: marks of direction, spaces of no width, fillers of Hangul, notes between
#: lines, tags. The two joiners stay: Persian, Hindi and emoji need them.
UNSEEN: Final = [
    0xAD, 0x61C, 0x115F, 0x1160, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x2060, 0x2066), *range(0x206A, 0x2070),
    0x3164, 0xFEFF, 0xFFA0, *range(0xFFF9, 0xFFFC), *_TAGS,
]  # fmt: skip

#: All of them but the tab, and the lone halves of surrogate pairs: bytes of a file's name that are no UTF-8.
#: Compiled at its first use, like the other: most programs never show text, and it takes half a millisecond. Ranges:
#: with 128 single characters that high the search is fifty times slower.
_STEERING: Final = (
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    + "".join(chr(code) for code in UNSEEN if code not in _TAGS) + f"{chr(_TAGS[0])}-{chr(_TAGS[-1])}]"
)  # fmt: skip
#: Above DEL, in UTF-8.
_IN_JSON: Final = (
    rb"\x7f|\xc2[\x80-\x9f\xad]|\xe2\x80[\xa8-\xae\x8b\x8e\x8f]|\xe2\x81[\xa0-\xaf]|\xd8\x9c|\xe1\x85[\x9f\xa0]"
    rb"|\xe1\xa0\x8e|\xe3\x85\xa4|\xef\xbb\xbf|\xef\xbe\xa0|\xef\xbf[\xb9-\xbb]|\xf3\xa0[\x80\x81][\x80-\xbf]"
)


def by_number(character: str) -> str:
    """A character as `\\xNN`, `\\uNNNN` or `\\UNNNNNNNN`."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def visible_line(text: str) -> str:
    """`text` as one line that is harmless on a terminal. Tabs stay, line ends become `\\x0a`."""
    return re.sub(_STEERING, lambda match: by_number(match[0]), text)


def visible_json(document: bytes) -> bytes:
    """A JSON document in UTF-8 that means the same and is harmless on a terminal.

    JSON itself escapes only the controls below 0x20. The others stand inside strings, where they may be escaped, too.
    """
    return re.sub(_IN_JSON, lambda match: _in_json(ord(match[0].decode())), document)


def _in_json(number: int) -> bytes:
    if number < 0x10000:
        return b"\\u%04x" % number
    number -= 0x10000
    return b"\\u%04x\\u%04x" % (0xD800 + (number >> 10), 0xDC00 + (number & 0x3FF))
