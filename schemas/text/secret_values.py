"""Which texts of a configuration may be secrets, and what stands in their places. Pure.

A file of another program has secrets among harmless settings, and nothing says which is which. A text is copied only
when it is plainly no secret. Every other becomes `${NAME}`, and a person sets NAME where the kernel starts.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

#: Names of what is secret.
_SECRET_NAME: Final = re.compile(
    r"token|secret|passw|passphrase|pwd|key|credential|auth|cookie|session|bearer|signature|private|dsn|conn|webhook|"
    r"salt|otp|(^|[^a-z])(pin|pass|pat|jwt|uri|url)($|[^a-z])",
    re.IGNORECASE,
)
#: Values that mean the same for everybody.
_HARMLESS: Final = re.compile(
    r"true|false|yes|no|on|off|none|null|debug|info|notice|warn|warning|error|trace|silent|quiet|verbose|production|"
    r"development|test|testing|staging|local|utf-?8|stdio|http|https|json|text|latest|stable|default|auto|\d{1,5}|"
    r"[a-z]{2}([-_][A-Z]{2})?(\.UTF-8)?",
    re.IGNORECASE,
)
#: A path below a folder that every machine has, with nothing in it but names.
_PATH: Final = re.compile(r"(/(home|Users|usr|opt|var|tmp|etc|srv|mnt|media|data|root)|~|\.\.?)(/[\w.@+ -]{1,64})*/?")
#: How known tokens begin.
_TOKEN: Final = re.compile(
    r"(sk-|pk_|sk_|rk_|gh[opsru]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|eyJ|npm_|hf_|whsec_|ya29\.|Bearer\s|Basic\s)"
)
#: A long piece of letters and digits that nobody would call a name.
_RANDOM: Final = re.compile(r"[A-Za-z0-9_+=-]{20,}|[0-9a-fA-F-]{32,}")
_BASE64: Final = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9+/=_-]{32,}")
#: Words, with nothing random about them.
_WORD: Final = re.compile(r"[a-z]+([-_][a-z]+)*|[A-Z][a-z]+([A-Z][a-z]+)*|[A-Z]+(_[A-Z]+)*")
#: What stands for a variable in other programs: `${NAME}`, `${env:NAME}`, `${NAME:-default}`, `${input:name}`.
REFERENCE: Final = re.compile(r"\$\{([^{}$]{1,200})\}")
#: What separates the parts of a value: of JSON, of a list, of a query.
_BETWEEN: Final = re.compile(r"""[\s"'{}\[\],;:=&?@]+""")
#: The shortest part of a granted variable that is taken out of what its tool says (characters).
SHORTEST_GRANTED: Final = 8
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SCHEME: Final = re.compile(r"(Bearer|Basic|Token|ApiKey|Digest|DPoP|Key)?\s*", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether what has this name may be a secret."""
    return _SECRET_NAME.search(name) is not None


def is_harmless(name: str, value: str) -> bool:
    """Whether a value of this name is plainly no secret: a switch, a number, a level, a path."""
    if value == "":
        return True
    if is_secret_name(name):
        return False
    return _HARMLESS.fullmatch(value) is not None or _PATH.fullmatch(value) is not None


def secret_parts(values: Iterable[str]) -> list[str]:
    """What may not be shown of the values of variables and headers, each text once.

    That is every value but those that mean the same for everybody, paths, and URLs without a secret. Of a value that
    is made of several parts these are also secrets by themselves: what follows the scheme of a header, user and
    password of `Basic` and of a URL, and every part that looks like a token, as in JSON.
    """
    parts: dict[str, None] = {}
    for value in map(str.strip, values):
        if _HARMLESS.fullmatch(value) is not None:
            continue
        is_place = value.startswith(("/", "./", "~/")) or "://" in value
        if not is_place or looks_secret(value):
            scheme, rest = without_scheme(value)
            parts |= dict.fromkeys((value, rest, *_passwords(scheme, rest)))
        parts |= dict.fromkeys(piece for piece in _BETWEEN.split(value) if looks_secret(piece))
    return [part for part in parts if part]


def granted_secrets(granted: Mapping[str, str]) -> list[str]:
    """What may not be shown of variables that a tool was granted: parts of SHORTEST_GRANTED characters and more, of
    those variables whose name or value says that it is a secret. The others are settings, and words of any output.
    """
    values = [value for name, value in granted.items() if is_secret_name(name) or looks_secret(value)]
    return [part for part in secret_parts(values) if len(part) >= SHORTEST_GRANTED]


def _passwords(scheme: str, rest: str) -> list[str]:
    """User and password of a header `Basic`, or the password of a URL as it is and as it is written there."""
    if scheme.lower().startswith("basic"):
        try:
            pair = a2b_base64(rest).decode()
        except (ValueError, UnicodeDecodeError):
            return []
        return [pair, pair.partition(":")[2]]
    try:
        written = urlsplit(rest).password or ""
    except ValueError:
        return []
    return [written, unquote(written)]


def looks_secret(text: str) -> bool:
    """Whether an argument of a program, or a part of a URL, may be a secret."""
    if _TOKEN.match(text) is not None:
        return True
    if "://" in text:
        return url_secret(text) is not None
    if _PATH.fullmatch(text) is None and _BASE64.fullmatch(text) is not None and _is_random(text):
        return True
    return any(_is_random(piece) for piece in _RANDOM.findall(text.replace("/", " ")))


def _is_random(piece: str) -> bool:
    if _WORD.fullmatch(piece) is not None:
        return False
    cases = any(char.islower() for char in piece) and any(char.isupper() for char in piece)
    return cases or any(char.isdigit() for char in piece)


def url_secret(text: str) -> str | None:
    """The part of a URL that may be a secret: `user`, `query`, `path`; None when there is none."""
    try:
        parts = urlsplit(text)
        if parts.username is not None or parts.password is not None or "@" in parts.netloc:
            return "user"
    except ValueError:
        return "user"
    if parts.query or parts.fragment:
        return "query"
    if any(looks_secret(segment) for segment in parts.path.split("/") if segment):
        return "path"
    return None


def variable_name(*words: str) -> str:
    """The name of a variable that is made of these words: `GITHUB_API_KEY`."""
    joined = re.sub(r"[^A-Z0-9]+", "_", "_".join(words).upper()).strip("_") or "VALUE"
    return (f"_{joined}" if joined[0].isdigit() else joined)[:128]


def own_reference(inside: str) -> tuple[str, str | None]:
    """The variable that a reference of another program means, and what a person has to know about it, in words."""
    kind, colon, rest = inside.partition(":")
    if colon and rest.startswith("-"):
        return _variable(kind), "has a default there, and none here"
    if colon and kind == "input":
        return _variable(rest), "was asked for at the start there; here it is a variable"
    if colon and kind == "env":
        return _variable(rest), None
    if VARIABLE.fullmatch(inside) is not None and inside.upper() == inside:
        return inside, None
    return _variable(inside), "is known to the other program only; here it is a variable"


def without_scheme(value: str) -> tuple[str, str]:
    """A header's value: `Bearer ` and its like, and the rest."""
    match = _SCHEME.match(value)
    end = match.end() if match is not None and match.group(1) and match.end() > len(match.group(1)) else 0
    return value[:end], value[end:]


def _variable(name: str) -> str:
    return name if VARIABLE.fullmatch(name) is not None else variable_name(name)
