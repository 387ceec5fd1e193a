"""The errors of the door: a request that is not let in, and one that is none. And its port.

Source: RFC 9110; docs/errors.md.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final

from goondan.schemas.wire.errors import ErrorCode, add_codes

#: Where a door listens if nothing is said: no other program is known by it.
PORT: Final = 7117
LOOPBACK: Final = "127.0.0.1"
ERRORS: Final = add_codes(
    {
        "E_DOOR_REFUSED": ErrorCode(
            "Send the token as `Authorization: Bearer TOKEN`, from a program, to the address that the door printed.",
        ),
        "E_DOOR_REQUEST": ErrorCode("Correct the request as the message says; `GET /api/v1/openapi.json` has all."),
    }
)
