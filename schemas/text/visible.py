"""Text of any origin made visible: no character of it steers a terminal, hides, or turns round what stands beside it.

A terminal obeys what is printed on it: escape sequences move the cursor, set the title, answer as if a person typed,
write the clipboard. A name with a line end in it makes a line that looks like one of ours. A character that nobody
sees can carry a sentence, or make two names look the same. So these characters are shown by their number. This is the
one list of them.

Source: Unicode's properties Default_Ignorable_Code_Point and White_Space, version 17.0; docs/decisions/122;
docs/design/wire.md section 8; docs/design/commands.md section 9.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import islice
from typing import Any, Final

#: C0, DEL and C1.
CONTROLS: Final = [*range(0x20), *range(0x7F, 0xA0)]
#: Embeddings, overrides and isolates of bidirectional text: text with them reads otherwise than it is.
TURNING: Final = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]

# The following are insides of a class of a regular expression.
#: Default_Ignorable_Code_Point: characters that are there and have no form.
IGNORABLE: Final = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
#: White_Space but for the space and for controls.
SPACES: Final = "\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
#: As empty as those, though Unicode calls them symbols, letters or formats: the blank of braille, a filler of Khitan, a
#: note without a head, notes between lines.
BLANKS: Final = "\u2800\ufff9-\ufffb\U00016fe4\U0001d159"

#: All of them but the tab, and the lone halves of surrogate pairs: bytes of a file's name that are no UTF-8.
_STEERING: Final = f"[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff{IGNORABLE}{SPACES}{BLANKS}]"
_IN_JSON: Final = f"[\x7f-\x9f{IGNORABLE}{SPACES}{BLANKS}]"

#: Scripts whose letters join or part by a joiner between them: Arabic and its kin, those of India and its neighbours.
_JOINED: Final = "\u0620-\u109f\u1780-\u17b3\u17b6-\u18aa\ua840-\uabff\ufb50-\ufdff\ufe70-\ufefc"
#: Emoji, and signs that have a form as an emoji.
_EMOJI: Final = "\xa9\xae\u203c\u2049\u2122\u2139\u2190-\u27ff\u2900-\u2bff\u3030\u303d\U0001f000-\U0001faff"
#: Letters and signs of Chinese, Japanese and Korean.
_WIDE: Final = "\u2e80-\u2fff\u3001-\u3163\u3165-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"
#: Where a language needs one of them: joiners within words and emoji, forms of emoji and of Mongolian letters, the wide
#: space beside wide letters, spaces of no break as French and numbers have them, and the blank within braille. Each
#: stands beside something that is seen, so no sentence can hide in them.
_NEEDED: Final = (
    f"(?<=[{_JOINED}])[\u200c\u200d](?=[{_JOINED}])|(?<=[{_EMOJI}\ufe0f])\u200d(?=[{_EMOJI}])"
    f"|(?<=[{_EMOJI}])[\ufe0e\ufe0f]|(?<=[0-9#*])\ufe0f(?=\u20e3)|(?<=[\u1820-\u18aa])[\u180b-\u180f]"
    f"|(?<=[{_WIDE}])\u3000|\u3000(?=[{_WIDE}])|(?<=[\u2801-\u28ff])\u2800(?=[\u2801-\u28ff])"
    "|(?<=\u00ab)[\xa0\u202f]|(?<=\\w)[\xa0\u202f](?=[:;!?\u00bb%\u20ac])|(?<=[0-9])[\xa0\u202f](?=[0-9])"
)

#: Letters that look like letters of ASCII: of Greek, Cyrillic, Armenian, Cherokee, and of Latin itself. Those whose
#: compatibility form is a letter of ASCII, such as wide and mathematical ones, need no list.
_LOOK_ALIKES: Final = frozenset(
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03b1\u03b9\u03bd\u03bf\u03c1"
    "\u03c5\u03f2\u03f3\u0405\u0406\u0408\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0430"
    "\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u0475\u04ae\u04af\u04bb\u04c0\u04cf\u0501\u050c\u051a\u051b"
    "\u051c\u051d\u054d\u0555\u0563\u0566\u0570\u0578\u057d\u0581\u0585\u13a0\u13a1\u13a2\u13a5\u13aa\u13ab\u13ac\u13b3"
    "\u13b7\u13bb\u13c0\u13c3\u13cf\u13d2\u13da\u13de\u13df\u13e2\u13e6\u13e7\u0131\u0251\u0261\u0269\u028b\u1d04\u1d0f"
    "\u1d1c\u1d20\u1d21\u1d22"
)
#: A name, a path or a host: what stands between spaces and quotes. And a word in it.
_NAME: Final = "[^\\s\"'`]+"
_WORD: Final = r"[^\W\d_]+"


def by_number(character: str) -> str:
    """A character as `\\xNN`, `\\uNNNN` or `\\UNNNNNNNN`."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def is_needed(match: re.Match[str]) -> bool:
    """Whether a language needs the character that was found where it stands."""
    return re.compile(_NEEDED).match(match.string, match.start()) is not None


def visible_line(text: str) -> str:
    """`text` as one line that is harmless on a terminal. Tabs stay, line ends become `\\x0a`."""
    return re.sub(_STEERING, lambda match: match[0] if is_needed(match) else by_number(match[0]), text)


def is_visible(text: str) -> bool:
    """Whether `text` is one line of characters that are seen: visible_line would change none, and it has no tab."""
    if text.isascii():
        return text.isprintable()
    return "\t" not in text and visible_line(text) == text


def visible_names(text: str) -> str:
    """The same, with letters shown by their number that look like those of ASCII beside them: `p\\u0430ypal.com`."""
    if text.isascii():
        return visible_line(text)
    return visible_line(re.sub(_NAME, lambda name: _without_look_alikes(name[0]), text))


def _without_look_alikes(name: str) -> str:
    if name.isascii() or not any(letter.isascii() and letter.isalpha() for letter in name):
        return name

    def shown(word: re.Match[str]) -> str:
        told = "".join(by_number(one) if _looks_like_ascii(one) else one for one in word[0])
        mixed = any(one.isascii() for one in word[0]) or told.isascii()
        return told if mixed else word[0]

    return re.sub(_WORD, shown, name)


def _looks_like_ascii(letter: str) -> bool:
    if letter.isascii():
        return False
    plain = unicodedata.normalize("NFKC", letter)
    return letter in _LOOK_ALIKES or (len(plain) == 1 and plain.isascii() and plain.isalpha())


def visible_json(document: bytes) -> bytes:
    """A JSON document in UTF-8 that means the same and is harmless on a terminal.

    JSON itself escapes only the controls below 0x20. The others stand inside strings, where they may be escaped, too.
    """
    text = document.decode()
    shown = re.sub(_IN_JSON, lambda match: match[0] if is_needed(match) else _in_json(ord(match[0])), text)
    return document if shown == text else shown.encode()


def _in_json(number: int) -> str:
    if number < 0x10000:
        return f"\\u{number:04x}"
    number -= 0x10000
    return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"


# --- the arguments of a call ------------------------------------------------------------------------------------------

#: The longest line (characters).
MAX_LINE: Final = 100


def argument_line(args: Any) -> str:
    """`name=value` for each argument, at most MAX_LINE characters in all. Short words stand as they are, other texts as
    JSON, lists and objects as their brackets. "" for what is no object.
    """
    if not isinstance(args, dict):
        return ""
    line = " ".join(f"{_value(str(name))}={_value(value)}" for name, value in islice(args.items(), MAX_LINE))
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


def _value(value: Any) -> str:
    import json  # most programs show no arguments

    if isinstance(value, str):
        text = value[:MAX_LINE]
        return text if text and " " not in text and text.isprintable() else json.dumps(text, ensure_ascii=False)
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list):
        return "[…]" if value else "[]"
    return json.dumps(value, default=str)[:MAX_LINE]
