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

#: All of them but the tab, and the lone halves of surrogate pairs: bytes of a file's name that are no UTF-8.
#: Compiled at its first use, like the other: most programs never show text, and it takes half a millisecond.
_STEERING: Final = "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_IN_JSON: Final = rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]"


def by_number(character: str) -> str:
    """A character as `\\xNN` or `\\uNNNN`."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def visible_line(text: str) -> str:
    """`text` as one line that is harmless on a terminal. Tabs stay, line ends become `\\x0a`."""
    return re.sub(_STEERING, lambda match: by_number(match[0]), text)


def visible_json(document: bytes) -> bytes:
    """A JSON document in UTF-8 that means the same and is harmless on a terminal.

    JSON itself escapes only the controls below 0x20. The others stand inside strings, where they may be escaped, too.
    """
    return re.sub(_IN_JSON, lambda match: b"\\u%04x" % ord(match[0].decode()), document)
