"""What models have used in a workspace, for a program that asks again and again: only files are read that were written
since. What an instance had used when it was deleted stays counted.

Source: docs/usage.md; docs/design/traces.md section 4.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple

from goondan.kernel.traces.conversations import conversation_files, used_by
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.usage import Part, Used

#: Conversation files that are remembered; further ones are not counted.
MAX_FILES: Final = 20_000


class _File(NamedTuple):
    """What was read of one file."""

    written: float
    agent: str
    parts: list[tuple[Part, Used]]


class UsedSoFar:
    """The sums of one workspace. Not for use by several threads."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._files: dict[str, _File] = {}

    def look(self) -> list[tuple[str, Part, Used]]:
        """What each agent has used now, by day, model and currency, in rows to be added up."""
        for place in conversation_files(self._state_dir, None, None):
            known = self._files.get(place.path)
            if known is None and len(self._files) >= MAX_FILES:
                continue
            if known is None or known.written != place.written:
                with suppress(GoondanError):  # what was read before stays
                    self._files[place.path] = _File(place.written, place.agent, used_by(place))
        return [(file.agent, part, used) for file in self._files.values() for part, used in file.parts]
