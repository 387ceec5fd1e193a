"""Who may come in: tokens, the roles that they give, and the agents that they lead to. Pure.

A token file has a line for each token: its name, its role, the token, and patterns of the agents that its bearer may
speak to. Empty lines and those that begin with `#` say nothing.

    phone    talk     4d1f…   assistant  help-*
    grafana  look     90ab…   *

A token is never kept: of each there is a digest, and what a request has given is compared with all of them, each in
constant time. So the time of an answer does not tell which one was nearly right.

Source: docs/commands.md.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import blake2s
from typing import Final

from goondan.kernel.cli.rules.callers import ROLES, Caller, Role
from goondan.schemas.wire.errors import GoondanError, fail

__all__ = ["MAX_TOKEN", "MIN_TOKEN", "Caller", "Role", "Tokens", "digest_of", "is_token", "parse"]

#: A token has so many characters of ASCII: fewer can be guessed, more fit no head.
MIN_TOKEN: Final = 16
MAX_TOKEN: Final = 4096
#: Lines of a token file that count.
MAX_CALLERS: Final = 256

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
#: Names of agents have no other characters, so a pattern with others is a mistake.
_PATTERN: Final = re.compile(r"[a-z0-9_*?-]{1,64}\Z")
_TOKEN: Final = re.compile(rf"[!-~]{{{MIN_TOKEN},{MAX_TOKEN}}}\Z")


def digest_of(token: bytes) -> bytes:
    """What is kept of a token."""
    return blake2s(b"goondan door\0" + token).digest()


class Tokens:
    """The tokens of a door, by their digests."""

    def __init__(self, known: Sequence[tuple[bytes, Caller]]) -> None:
        self._known = tuple(known)

    @classmethod
    def single(cls, token: str, caller: Caller) -> Tokens:
        """One token."""
        return cls([(digest_of(token.encode()), caller)])

    def known(self, given: bytes) -> Caller | None:
        """Whose token has this digest. All are compared, whichever fits."""
        found = None
        for digest, caller in self._known:
            if hmac.compare_digest(given, digest):
                found = caller
        return found


def is_token(text: str) -> bool:
    """Whether a text may be a token: one word of ASCII, long enough."""
    return _TOKEN.match(text) is not None


def parse(text: str) -> Tokens:
    """The tokens of a token file. Raises GoondanError E_USAGE, which names the line and never what stands there."""
    known: list[tuple[bytes, Caller]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(known) == MAX_CALLERS:
            raise _wrong(number, f"a file has at most {MAX_CALLERS} tokens")
        digest, caller = _entry(number, words)
        if any(other.name == caller.name for _, other in known):
            raise _wrong(number, f"the name {caller.name} is another token's")
        if any(other == digest for other, _ in known):
            raise _wrong(number, "it has the token of another line")
        known.append((digest, caller))
    if not known:
        raise fail("E_USAGE", "the token file has no token", suggestion=_FORM)
    return Tokens(known)


_FORM: Final = "A line is: NAME look|talk|operate TOKEN AGENT..., and * are all agents."


def _entry(number: int, words: Sequence[str]) -> tuple[bytes, Caller]:
    if len(words) < 4:
        raise _wrong(number, "it has fewer than four words")
    name, role, token, *agents = words
    if not _NAME.match(name):
        raise _wrong(number, "a name has lowercase letters, digits, '.', '_' and '-', at most 64")
    if role not in ROLES:
        raise _wrong(number, "the second word is look, talk or operate")
    if not is_token(token):
        raise _wrong(number, f"a token is one word of {MIN_TOKEN} to {MAX_TOKEN} characters of ASCII")
    if not all(map(_PATTERN.match, agents)):
        raise _wrong(number, "a pattern of agents has lowercase letters, digits, '_', '-', * and ?")
    return digest_of(token.encode()), Caller(name, role, tuple(agents))


def _wrong(number: int, why: str) -> GoondanError:
    return fail("E_USAGE", f"line {number} of the token file: {why}", suggestion=_FORM)
