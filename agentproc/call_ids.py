"""The ids of tool calls within a turn. Pure.

Source: docs/design/turns.md section 1.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.bundle.address import is_given_id

#: Longer ids from a model are replaced: an id becomes part of a callId, of a header and of a database key.
MAX_TOOL_CALL_ID: Final = 128


def unique_id(given: str, instead: str, used: set[str]) -> str:
    """The id of a call, which is then `used`: what the model has given, `instead` of it when it is not usable, and with
    a number behind it when another call of the turn has it.
    """
    wanted = given if is_given_id(given, MAX_TOOL_CALL_ID) else instead
    call_id, copy = wanted, 1
    while call_id in used:
        copy += 1
        call_id = f"{wanted}_{copy}"
    used.add(call_id)
    return call_id
