"""Secrets are found in every form in which somebody who knows them can write them; ordinary text stays as it is."""

from __future__ import annotations

import base64
import json
import string
import time
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from goondan.schemas.text.redaction import HIDDEN, Redactor, redact

KEY = "sk-proj-Ab3dEf6hIj9_lMn0pQr2tUv4"
#: Keys as vendors make them: letters and digits, some of the marks of base64, never only marks.
REGULAR = string.ascii_letters + string.digits
SECRETS = st.builds(
    "{}{}{}".format,
    st.text(REGULAR, min_size=16, max_size=20),
    st.text(REGULAR + "-_+/=.~", max_size=60),
    st.sampled_from(REGULAR),
)
AROUND = st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs", "L", "N"]), max_size=12)


def every_character(form: str) -> Callable[[str], str]:
    """Each character of a secret written by its number."""
    return lambda secret: "".join(form.format(byte) for byte in secret.encode())


FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "upper case": str.upper,
    "lower case": str.lower,
    "the other case": str.swapcase,
    "spaced": " ".join,
    "line breaks": "\r\n".join,
    "hyphens": "-".join,
    "zero-width": "\u200b".join,
    "broken in two": lambda secret: secret[:7] + "-\n    " + secret[7:],
    "backwards": lambda secret: secret[::-1],
    "JSON": lambda secret: json.dumps(secret)[1:-1],
    "JSON with line breaks": lambda secret: json.dumps("\n\t".join(secret))[1:-1],
    "JSON by number": every_character("\\u{:04x}"),
    "JSON in JSON": lambda secret: json.dumps(json.dumps("\n".join(secret))),
    "Python by number": every_character("\\x{:02X}"),
    "HTML": every_character("&#{};"),
    "HTML hexadecimal": every_character("&#x{:X};"),
    "URL": lambda secret: quote(secret, safe=""),
    "URL, all of it": every_character("%{:02X}"),
    "URL in a URL": lambda secret: quote(quote(secret, safe=""), safe=""),
    "URL in a URL, all of it": every_character("%25{:02X}"),
    "URL as scripts escape it": every_character("%u{:04X}"),
    "JavaScript by number": every_character("\\u{{{:x}}}"),
    "Python by long number": every_character("\\U{:08X}"),
    "octal": every_character("\\{:03o}"),
    "HTML with zeros": every_character("&#{:04};"),
    "HTML hexadecimal with zeros": every_character("&#x{:04X};"),
    "quoted-printable, all of it": every_character("={:02X}"),
    "base32": lambda secret: base64.b32encode(secret.encode()).decode(),
    "UTF-16 in base64": lambda secret: base64.b64encode(secret.encode("utf-16-le")).decode(),
    "URL with spaces": "%20".join,
    "hexadecimal": lambda secret: secret.encode().hex(),
    "hexadecimal, upper case": lambda secret: secret.encode().hex(":").upper(),
    "hexadecimal numbers": lambda secret: ", ".join(f"0x{byte:02x}" for byte in secret.encode()),
    "decimal numbers": lambda secret: str(list(secret.encode())),
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode(),
    "base64 in lines": lambda secret: base64.encodebytes(secret.encode()).decode(),
    "base64 behind one byte": lambda secret: base64.b64encode(b":" + secret.encode()).decode(),
    "base64 of user and password": lambda secret: base64.b64encode(f"me:{secret}".encode()).decode(),
    "base64 of a document": lambda secret: base64.b64encode(json.dumps({"key": secret}).encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15)
@given(secret=SECRETS, before=AROUND, after=AROUND)
@example(secret=KEY, before="", after="")
@example(secret="B000000000000000a", before="\\", after="")
@example(secret="0000000000000000=a", before="=", after="")
@example(secret="0000000000000000=a", before="%", after="")
@example(secret="3030303030303030=a", before="%", after="")
@example(secret="0000000000000000=a", before="\\", after="")
def test_a_secret_is_found_in_every_form(form: str, secret: str, before: str, after: str) -> None:
    written = FORMS[form](secret)
    shown = redact(f"{before}{written}{after}", secret)
    assert HIDDEN in shown
    # Of base64 some letters hold bits of what stands beside the secret, and stay.
    kept = 8 if form.startswith("base64 ") else 3 if form.startswith("base64") else 0
    # Behind a backslash a first letter can be an escape: it stays, with what separates it.
    kept += 3 if before.endswith("\\") and secret[0].lower() in "nrtbf" else 0
    left = [letter for letter in shown.replace(before, "").replace(after, "") if letter.isalnum()]
    assert len(left) <= kept + (8 if "document" in form else 0), shown
    assert secret.lower() not in shown.lower()


@given(secret=SECRETS, cut=st.integers(9, 40))
def test_a_secret_that_was_cut_is_found(secret: str, cut: int) -> None:
    shown = redact(f"your key {secret}"[: len("your key ") + cut], secret)
    assert HIDDEN in shown
    assert secret[:cut] not in shown


@given(st.text(max_size=300), SECRETS)
def test_other_text_stays(text: str, secret: str) -> None:
    kept = "".join(c for c in text if c not in string.ascii_letters + string.digits)
    assert redact(kept, secret) == kept
    assert redact("The model is not there; see https://docs.example/errors.", secret).startswith("The model is not")


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        ("abc and a b c", ["abc"], "abc and a b c"),
        ("the key hunter2, not HUNTER2", ["hunter2"], "the key ***, not HUNTER2"),
        ("pass phrase: correct HORSE", ["correct horse"], "pass phrase: ***"),
        ("a", ["", None, "  "], "a"),
        ("x  12345678 ", ["  12345678\n"], "x  *** "),
        ("ключ-от-всего and x", ["ключ-от-всего"], "*** and x"),
        ("к л ю ч о т в с е г о", ["ключ-от-всего"], "***"),
        ('"\\u043a\\u043b\\u044e\\u0447-7" and x', ["ключ-7"], '"\\***" and x'),
        ("one-long-secret two-long-secret", ["one-long-secret", "two-long-secret"], "*** ***"),
        ("abcdefghij abcdefghijkl", ["abcdefghij", "abcdefghijkl"], "*** ***"),
        ("odd \udc80 ABCDEFGHIJ \udfff", ["abcdefghij"], "odd \udc80 *** \udfff"),
        ("----=+/.", ["-=-=-=-="], "----=+/."),
        ("its beginning: ABCDEFGH", ["abcdefghijkl"], "its beginning: ***"),
        ("its beginning: ABCDEFG", ["abcdefghijkl"], "its beginning: ABCDEFG"),
    ],
)
def test_examples(text: str, secrets: list[str | None], shown: str) -> None:
    assert redact(text, *secrets) == shown


MIB = 1 << 20
TEXTS: dict[str, Callable[[int], str]] = {
    "ordinary": lambda size: "The quick brown fox jumps over the lazy dog.\n" * (size // 45),
    "nothing but the secret": lambda size: (KEY + " ") * (size // 33),
    "nothing but the spaced secret": lambda size: (" ".join(KEY) + " ") * (size // 64),
    "almost the secret": lambda size: (KEY[:-1] + "x") * (size // 32),
    "escapes": lambda size: "%73" * (size // 3),
    "one letter": lambda size: "s" * size,
    "separators": lambda size: "-" * size,
}


def spent(redactor: Redactor, text: str) -> float:
    """Processor time (seconds), the best of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        redactor(text)
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.parametrize("kind", TEXTS)
def test_the_cost_is_linear(kind: str) -> None:
    redactor = Redactor(KEY)
    small, large = (spent(redactor, TEXTS[kind](size)) for size in (MIB // 2, 2 * MIB))
    assert large < 12 * small + 0.02, "four times the text"


def test_a_large_text_is_quickly_looked_through() -> None:
    # 40 ms on an idle machine; the bound is for busy ones.
    assert spent(Redactor(KEY), TEXTS["ordinary"](4 * MIB)) < 0.25


def test_a_periodic_secret_costs_no_more() -> None:
    redactor = Redactor("a" * 60 + "b")
    assert spent(redactor, "a" * MIB) < 0.5
    assert spent(redactor, ("a" * 59 + "b") * (MIB // 60)) < 0.5
