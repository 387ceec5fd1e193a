"""How often and how long a model may be asked: the limits of its server, and the patience with it.

Source: docs/design/turns.md section 6; docs/decisions/107.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final

from msgspec import Meta, Struct

#: The longest patience that a Model may ask for (seconds).
MAX_RETRY_S: Final = 86_400
#: The largest limit of a Model.
MAX_LIMIT: Final = 10**9
#: Models that are asked in place of one that does not answer.
MAX_FALLBACKS: Final = 8

_Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class ModelLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What the server of a Model allows. All agents of the kernel keep it together."""

    max_concurrent: Annotated[_Limit | None, Meta(description="Requests at once.")] = None
    requests_per_minute: Annotated[_Limit | None, Meta(description="Requests in any minute.")] = None
    tokens_per_minute: Annotated[_Limit | None, Meta(description="Tokens, read and written, in any minute.")] = None


class ModelRetry(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """How long a Model is asked again that does not answer, within the time of the turn (seconds)."""

    busy_s: Annotated[
        float, Meta(ge=0, le=MAX_RETRY_S, description="A server that is busy or out of reach, or that refuses.")
    ] = 60.0
    loading_s: Annotated[float, Meta(ge=0, le=MAX_RETRY_S, description="A server that says it loads its model.")] = (
        300.0
    )
