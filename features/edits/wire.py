"""The error of a change of a conversation that cannot be made, and what is said of a fork."""

from typing import Final

from msgspec import Struct

from goondan.schemas.wire.errors import ErrorCode, add_codes

UNDO_REFUSED: Final = "E_UNDO_REFUSED"
ERRORS: Final = add_codes(
    {UNDO_REFUSED: ErrorCode("`gdn instance show` says what there is; ask again if its last turn is the one you mean.")}
)


class Forked(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The output of the result of an `operator.fork` event."""

    #: How many messages the new conversation begins with.
    copied: int
    #: Of a fork before a turn: the text of the turn's own message, whole.
    message: str | None = None
