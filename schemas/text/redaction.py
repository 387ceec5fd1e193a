"""Secrets out of texts that others have written: errors of model servers, messages of modules.

Whoever writes such a text may know the secret, and need not write it as it is. So it is looked for in these forms, in
any mixture of upper and lower case, and with anything but letters and digits between its characters (spaces, line
breaks, hyphens, quotes, invisible characters):

- as it is, backwards, and with characters written as `%2f`, `%252f`, `\\u002f`, `\\x2f`, `\\057`, `=2F` or `&#47;`
- as base64 of either alphabet, alone or inside a longer base64 text; as base64 of UTF-16, and as base32, alone
- as its bytes in hexadecimal or decimal numbers, with or without `0x`

A text that was cut in the middle of a secret ends with its beginning, which is found as well. A secret that is short
is looked for as it is and no other way: everything else would hit ordinary words.

The cost is linear in the text's length: all but regular characters are deleted in one pass, and the rest is searched.
Where they have stood is worked out only around a hit.

Bundled tools import this file by a link to it in toolhost/base/goondan_base/, and a jail shows no other file of
`schemas`. It imports only what it needs, because a jail starts in milliseconds.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

#: Stands for a secret wherever it would show.
HIDDEN = "***"
#: A shorter text is no secret, and is not looked for (characters).
SHORTEST = 4
#: Letters and digits from which on other forms of a secret are looked for.
SHORTEST_IN_FORMS = 8
#: How much of a secret's beginning at the end of a text counts as the secret that was cut (letters and digits).
SHORTEST_CUT = 8
#: Bytes whose places are worked out at once around a hit.
_BLOCK = 4096

_LETTERS = b"0123456789abcdefghijklmnopqrstuvwxyz"
_WIDE = bytes(range(0x80, 0x100))
_LOWER = bytes(range(0x41)) + bytes(range(0x61, 0x7B)) + bytes(range(0x5B, 0x100))
#: Without a form of its own in a text: fills up what an escape was longer than its character.
_FILL = 0
#: Escapes of one byte: what they begin with, and how they are written in lower case.
_ESCAPES = (
    (b"%25", "%25{:02x}"), (b"%", "%{:02x}"), (b"%u", "%u{:04x}"),
    (b"\\u", "\\u{:08x}"), (b"\\u", "\\u{:04x}"), (b"\\u{", "\\u{{{:x}}}"), (b"\\x", "\\x{:02x}"), (b"\\", "\\{:03o}"),
    (b"&#x", "&#x{:x};"), (b"&#x0", "&#x{:04x};"), (b"&#", "&#{:d};"), (b"&#0", "&#{:03d};"), (b"&#0", "&#{:04d};"),
    (b"=", "={:02x}"),
)  # fmt: skip
#: What JSON and programming languages have short escapes for, and what else separates.
_SHORT = (b"\\n", b"\\r", b"\\t", b"\\b", b"\\f")
_SHORT_LETTERS = frozenset(written[1:] for written in _SHORT)
#: How many characters of a secret an escape can take that begins before it: `=00`, `\\000`, `\\u0000`.
_EATEN = (2, 3, 5)
_SEPARATING = b" \t\r\n\0-_.:,;'\"/\\"


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: in_texts(item, change) for key, item in value.items()}
    return [in_texts(item, change) for item in value] if isinstance(value, list) else value


class Redactor:
    """Takes secrets out of texts. Empty and very short secrets are none; white space around one is no part of it."""

    def __init__(self, *secrets: str | None) -> None:
        known = {secret.strip() for secret in secrets if secret is not None and len(secret.strip()) >= SHORTEST}
        self._exact = sorted(known, key=lambda secret: (-len(secret), secret))
        self._alike: list[_Alike] = []
        for wide in (False, True):
            group = [secret for secret in self._exact if secret.isascii() is not wide]
            needles = [needle for secret in group for needle in _forms(secret) if len(needle) >= SHORTEST_IN_FORMS]
            if needles:
                self._alike.append(_Alike(needles, "".join(group), _LETTERS + _WIDE if wide else _LETTERS))

    def __call__(self, text: str) -> str:
        """`text` with `***` in the place of every secret."""
        for secret in self._exact:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        for alike in self._alike:
            text = alike.without(text)
        return text


def redact(text: str, *secrets: str | None) -> str:
    """`text` with `***` in the place of every secret; for one text. See Redactor."""
    return Redactor(*secrets)(text)


def _forms(secret: str) -> Iterable[bytes]:
    """The forms of a secret as letters and digits in lower case."""
    data = secret.encode("utf-8", "surrogatepass")
    plain = _regular(data, _LETTERS if secret.isascii() else _LETTERS + _WIDE)
    if len(plain) < SHORTEST_IN_FORMS:
        return
    yield plain
    if plain[:1] in _SHORT_LETTERS and len(plain) > SHORTEST_IN_FORMS:
        yield plain[1:]  # behind a backslash the first letter reads as an escape
    # Behind the beginning of an escape (`=`, `%`, a backslash) the first characters read as its number.
    yield from (plain[eaten:] for eaten in _EATEN if len(plain) >= SHORTEST_IN_FORMS + eaten)
    yield plain[::-1] if secret.isascii() else _regular(secret[::-1].encode("utf-8", "surrogatepass"), _LETTERS + _WIDE)
    if not secret.isascii():  # as JSON is often written: one escape for a character, whatever its bytes
        escaped = "".join([char if char.isascii() else f"\\u{ord(char):04x}" for char in secret])
        yield _regular(escaped.encode(), _LETTERS)
    yield data.hex().encode()
    yield "".join([f"0x{byte:02x}" for byte in data]).encode()
    yield "".join([str(byte) for byte in data]).encode()
    from binascii import b2a_base64

    yield _base32(data)
    yield _regular(b2a_base64(secret.encode("utf-16-le", "surrogatepass")), _LETTERS)
    for before in range(3):
        # Of the first characters some bits are those of what stands before, of the last ones of what follows.
        encoded = b2a_base64(b"\0" * before + data, newline=False).rstrip(b"=")
        whole = (before + len(data)) // 3 * 4
        inner = encoded[(0, 2, 3)[before] : whole + (0, 1, 2)[(before + len(data)) % 3]]
        yield _regular(inner, _LETTERS)


def _base32(data: bytes) -> bytes:
    """In lower case, without the signs that fill it up. The library's own module costs a cold jail milliseconds."""
    digits, made = b"abcdefghijklmnopqrstuvwxyz234567", bytearray()
    for at in range(0, len(data), 5):  # five bytes are eight digits; one number of all would be shifted for each digit
        number = int.from_bytes(data[at : at + 5].ljust(5, b"\0"), "big")
        made += bytes([digits[number >> 35 - shift & 31] for shift in range(0, 40, 5)])
    return bytes(made[: (8 * len(data) + 4) // 5])


class _Alike:
    """Needles that are searched in the same way: in what is left of a text when only `kept` bytes stay."""

    def __init__(self, needles: list[bytes], secrets: str, kept: bytes) -> None:
        self._needles = sorted(set(needles))
        self._deleted = bytes(set(range(256)) - set(kept))
        self._flags = bytes([byte in kept for byte in range(256)])
        letters = sorted({*(secrets + secrets.swapcase()).encode("utf-8", "surrogatepass"), *_SEPARATING})
        self._escapes = [
            (begins, [(form.format(letter).encode(), bytes([letter]).lower()) for letter in letters])
            for begins, form in _ESCAPES
        ]

    def without(self, text: str) -> str:
        """`text` without the needles."""
        data = text.encode("utf-8", "surrogatepass")
        lower = data.translate(_LOWER)
        # A backslash may be an escape or stand for itself, also beside other escapes.
        unescaped = self._unescaped(lower)
        views = {lower, unescaped, _without_short(unescaped)}
        hits = _joined([place for shown in views for place in self._found(shown, lower)])
        if not hits:
            return text
        out: list[bytes] = []
        end = 0
        for start, stop in hits:
            out += [data[end:start], HIDDEN.encode()]
            end = stop
        return b"".join([*out, data[end:]]).decode("utf-8", "surrogatepass")

    def _found(self, shown: bytes, lower: bytes) -> list[tuple[int, int]]:
        """From where to where needles stand in a text in lower case; `shown` has its escapes as characters."""
        regular = shown.translate(None, self._deleted)
        hits: list[tuple[int, int]] = []
        for needle in self._needles:
            size = len(needle)
            at = regular.find(needle)
            while at >= 0:
                hits.append((at, at + size))
                at = regular.find(needle, at + size)
            at = regular.find(needle[:SHORTEST_CUT], max(0, len(regular) - size + 1))
            while at >= 0 and not needle.startswith(regular[at:]):
                at = regular.find(needle[:SHORTEST_CUT], at + 1)
            if at >= 0:
                hits.append((at, len(regular)))
        places = []
        for start, stop in self._places(shown, _joined(hits)) if hits else ():
            while stop < len(shown) and shown[stop] == _FILL:
                stop += 1  # the rest of an escape
            begin = start
            while begin and shown[begin - 1] == _FILL:
                begin -= 1
            if begin < start:  # an escape stands before it, which may be the beginning of the secret
                eaten = lower[begin:start].translate(None, self._deleted)
                start = begin if any(needle.startswith(eaten) for needle in self._needles) else start
            places.append((start, stop))
        return places

    def _places(self, shown: bytes, hits: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where the hits, which count regular characters only, stand in the whole text; in one pass over it."""
        from itertools import compress

        wanted = [position for start, stop in hits for position in (start, stop - 1)]
        found: list[int] = []
        seen = 0
        for block in range(0, len(shown), _BLOCK):
            if len(found) == len(wanted):
                break
            flags = shown[block : block + _BLOCK].translate(self._flags)
            here = flags.count(1)
            if wanted[len(found)] < seen + here:
                places = list(compress(range(block, block + len(flags)), flags))
                while len(found) < len(wanted) and wanted[len(found)] < seen + here:
                    found.append(places[wanted[len(found)] - seen])
            seen += here
        return [(start, last + 1) for start, last in zip(found[::2], found[1::2], strict=True)]

    def _unescaped(self, lower: bytes) -> bytes:
        """Escapes as their characters, filled up to the same length: every character stays in its place."""
        for begins, forms in self._escapes:
            if begins in lower:
                for written, letter in forms:
                    lower = lower.replace(written, letter.ljust(len(written), bytes([_FILL])))
        return lower


def _without_short(lower: bytes) -> bytes:
    """Short escapes as separators of the same length."""
    if b"\\" in lower:
        for written in _SHORT:
            lower = lower.replace(written, b"\\" + bytes([_FILL]))
    return lower


def _regular(data: bytes, kept: bytes) -> bytes:
    """What of a text is searched: its letters and digits, in lower case."""
    return data.translate(_LOWER).translate(None, bytes(set(range(256)) - set(kept)))


def _joined(hits: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that meet as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(hits):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
