"""The error message in a tool's result, cut to the tool's limit.

Source: requirements ERROR-03, ERROR-04, ERROR-05, ERROR-10; recorded parity `executor/limit-*`.
"""

from __future__ import annotations

from typing import Final

#: Ends a cut message and counts towards its limit (ERROR-05).
CUT_MARK: Final = "... (truncated)"


def cut_message(text: str, limit: int) -> str:
    """`text` in at most `limit` Unicode code points; a cut one ends in the mark, if there is room for more than it.

    A limit of at most 15 cuts without the mark; a negative one takes that many characters off the end, as recorded.
    """
    if len(text) <= limit:
        return text
    room = limit - len(CUT_MARK)
    return text[:room] + CUT_MARK if room > 0 else text[:limit]
