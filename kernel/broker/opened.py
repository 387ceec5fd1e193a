"""Bounds of the payloads that the broker opens itself. Pure.

Everybody shares the time of the broker's loop, and to open a payload takes time: a MiB that was made to be slow takes
0.4 s. The payloads of these frames are short, so longer ones are refused before a byte of them is read. Payloads that
only pass through are never opened and have no such bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from goondan.schemas.approvals import MAX_ANSWER_BYTES, MAX_ARGS_BYTES, MAX_MESSAGE
from goondan.schemas.errors import fail
from goondan.schemas.frames import Frame
from goondan.schemas.live_config import MAX_PROPOSAL_BYTES
from goondan.schemas.oauth import MAX_DOCUMENT

#: Names and numbers.
_SHORT: Final = 4 << 10
#: The same with a list of names, or with texts of 10,000 characters.
_LISTS: Final = 64 << 10
#: Bytes of one character at most.
_UTF8: Final = 4
#: Bytes of a payload, by the type of its frame.
MOST: Final = {
    "admin": MAX_PROPOSAL_BYTES + MAX_ANSWER_BYTES + _UTF8 * MAX_MESSAGE,
    "agents.list": _LISTS,
    "agents.spawn": _LISTS,
    "approval.ask": MAX_ARGS_BYTES + _UTF8 * MAX_MESSAGE + _SHORT,
    "budget.reserve": _SHORT,
    "budget.settle": _SHORT,
    "changeset.commit": _LISTS,
    "changeset.open": _LISTS,
    "config.propose": MAX_PROPOSAL_BYTES,
    "model.out": _SHORT,
    "model.over": _SHORT,
    "model.permit": _SHORT,
    "mcp.attach": _SHORT,
    "mcp.detach": _SHORT,
    "mcp.list": _SHORT,
    "mcp.news": _LISTS,
    "oauth.server": MAX_DOCUMENT + _LISTS,
    "oauth.token": _LISTS,
    "restart": _LISTS,
}


def bounded(kind: str, handle: Callable[[Any, Frame, float], None]) -> Callable[[Any, Frame, float], None]:
    """Wrap a handler: it is called only when the payload is short enough for its frame type.

    The returned handler raises GoondanError E_FRAME_TOO_LARGE for a longer payload.
    """
    most = MOST.get(kind)
    if most is None:
        return handle

    def checked(connection: Any, frame: Frame, now: float) -> None:
        size = len(memoryview(frame.payload))
        if size > most:
            raise fail("E_FRAME_TOO_LARGE", f"the payload of {kind} has {size} bytes, limit {most}")
        handle(connection, frame, now)

    return checked
