"""Who may come in by the page: codes, and the tokens that they become. Pure: the time is given, and so is what is
secret.

- A code is for one browser: it is good for a short time, and once. It opens nothing itself.
- A token that looks lives as long as its door. There are a few; the oldest one goes.
- A token that acts is gone when nobody has used it for some time.
- All go with the token that has made them, and none makes further ones. They lead to the agents of that token.

Of each there is a digest, as of all tokens of a door.

Source: docs/decisions/176.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.features.serve.api.rules.callers import Caller, Role, digest_of
from goondan.schemas.wire.errors import fail

Kind = Literal["look", "act"]
ROLES: Final[dict[Kind, Role]] = {"look": "look", "act": "operate"}
#: How long a code is good (seconds): a browser starts in less.
CODE_S: Final = 120.0
#: How long a token that acts may be without use (seconds).
IDLE_S: Final = 1800.0
#: Codes at once, and tokens of each kind.
MAX_PASSES: Final = 64
#: What codes are made of: no two of these look the same.
_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz23456789"


class _Pass(Struct):
    """A code, or a token."""

    #: Who has it, or will have its token.
    caller: Caller
    #: When it is gone (seconds of the clock). None: with its door.
    until: float | None


class Passes:
    """The passes of one door."""

    def __init__(self) -> None:
        self._codes: dict[bytes, _Pass] = {}
        self._tokens: dict[Role, dict[bytes, _Pass]] = {role: {} for role in ROLES.values()}

    def make_code(self, kind: Kind, maker: Caller, digest: bytes, secret: bytes, now: float) -> str:
        """A code by whoever has the token with this digest. `secret`: 12 random bytes or more. Raises GoondanError
        E_FORBIDDEN.
        """
        if maker.behind:
            raise fail("E_FORBIDDEN", "a token of the page makes no codes", suggestion="Run gdn ui in a terminal.")
        letters = [_LETTERS[byte % len(_LETTERS)] for byte in secret]
        code = "-".join("".join(letters[place : place + 4]) for place in (0, 4, 8))
        caller = Caller(f"{maker.name}+page", ROLES[kind], maker.agents, digest)  # no line of a file has this name
        _keep(self._codes, code, _Pass(caller, now + CODE_S))
        return code

    def spend(self, digest: bytes, secret: bytes, now: float) -> tuple[str, Role] | None:
        """The token that a code becomes, and its role; None: there is no such code (any more). `secret`: 32 random
        bytes.
        """
        code = self._codes.pop(digest, None)
        if code is None or code.until is None or now >= code.until:
            return None
        token, role = secret.hex(), code.caller.role
        _keep(self._tokens[role], token, _Pass(code.caller, now + IDLE_S if role == "operate" else None))
        return token, role

    def known(self, digest: bytes, now: float) -> Caller | None:
        """Whose token has this digest. That is a use of it."""
        for tokens in self._tokens.values():
            if (found := tokens.get(digest)) is not None:
                if found.until is None:
                    return found.caller
                if now < found.until:
                    found.until = now + IDLE_S
                    return found.caller
                del tokens[digest]
        return None


def _keep(among: dict[bytes, _Pass], secret: str, one: _Pass) -> None:
    if len(among) == MAX_PASSES:
        del among[next(iter(among))]
    among[digest_of(secret.encode())] = one
