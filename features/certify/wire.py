"""The error of a program that cannot be certified."""

from typing import Final

from goondan.schemas.wire.errors import ErrorCode, add_codes

CANNOT: Final = "E_CERTIFY"
ERRORS: Final = add_codes(
    {CANNOT: ErrorCode("See docs/certify.md: how the program is started, and which lines it reads and writes.")}
)
