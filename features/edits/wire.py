"""The error of a change of a conversation that cannot be made."""

from typing import Final

from goondan.schemas.wire.errors import ErrorCode, add_codes

UNDO_REFUSED: Final = "E_UNDO_REFUSED"
ERRORS: Final = add_codes(
    {UNDO_REFUSED: ErrorCode("`gdn instance show` says what there is; ask again if its last turn is the one you mean.")}
)
