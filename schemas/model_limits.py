"""How long a model is asked again, and how many others may be asked in its place.

Source: docs/design/turns.md section 6; docs/decisions/108.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final

from msgspec import Meta, Struct

#: The longest patience that a Model may ask for (seconds).
MAX_RETRY_S: Final = 86_400
#: Models that are asked in place of one that does not answer.
MAX_FALLBACKS: Final = 8


class ModelRetry(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """How long a Model is asked again that does not answer, within the time of the turn (seconds)."""

    busy_s: Annotated[
        float, Meta(ge=0, le=MAX_RETRY_S, description="A server that is busy or out of reach, or that refuses.")
    ] = 60.0
    loading_s: Annotated[float, Meta(ge=0, le=MAX_RETRY_S, description="A server that says it loads its model.")] = (
        300.0
    )
