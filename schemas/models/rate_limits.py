"""What a model server says of its limits.

Source: docs/design/turns.md section 13.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final

from msgspec import Meta, Struct

#: The most tokens, requests or milliseconds that are named.
MAX_NAMED: Final = 10**9

Amount = Annotated[int, Meta(ge=0, le=MAX_NAMED)]


class RateLimits(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a server says in the headers of an answer about its limits."""

    #: Requests that it still accepts.
    requests_left: Amount | None = None
    #: In how many milliseconds it accepts more of them.
    requests_reset_ms: Amount | None = None
    #: Tokens that it still accepts.
    tokens_left: Amount | None = None
    #: In how many milliseconds it accepts more of them.
    tokens_reset_ms: Amount | None = None
