"""What models have used in a workspace, for a program that asks again and again: only files are read that were written
since. What an instance had used when it was deleted stays counted, also when there is another one in its place.

Source: docs/usage.md; docs/design/traces.md section 4.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.kernel.traces.conversations import conversation_files, used_by
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.usage import Part, Used

#: Conversation files that are remembered; further ones are not counted.
MAX_FILES: Final = 20_000
#: Sums of what deleted files had; the rest is not told apart by its day and model.
MAX_SUMS: Final = 20_000


class _File(NamedTuple):
    """What was read of one file."""

    written: float
    agent: str
    parts: dict[Part, Used]


class UsedSoFar:
    """The sums of one workspace. Not for use by several threads."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._files: dict[str, _File] = {}
        #: What files had that are gone, by agent.
        self._gone: dict[tuple[str, Part], Used] = {}

    def look(self) -> list[tuple[str, Part, Used]]:
        """What each agent has used now, by day, model and currency, in rows to be added up."""
        seen = set()
        for place in conversation_files(self._state_dir, None, None):
            seen.add(place.path)
            known = self._files.get(place.path)
            if known is None and len(self._files) >= MAX_FILES:
                continue
            if known is None or known.written != place.written:
                with suppress(GoondanError):  # what was read before stays
                    parts = dict(used_by(place))
                    if known is not None and any(_less(parts.get(part), used) for part, used in known.parts.items()):
                        self._keep(known)
                    self._files[place.path] = _File(place.written, place.agent, parts)
        for path in [path for path in self._files if path not in seen and not os.path.lexists(path)]:
            self._keep(self._files.pop(path))
        now = [(file.agent, part, used) for file in self._files.values() for part, used in file.parts.items()]
        return [*((agent, part, used) for (agent, part), used in self._gone.items()), *now]

    def _keep(self, file: _File) -> None:
        """Count what a file had that is gone."""
        for part, used in file.parts.items():
            whose = (file.agent, part)
            if whose not in self._gone and len(self._gone) >= MAX_SUMS:
                whose = (file.agent, Part("", "", part.currency))
            self._gone.setdefault(whose, Used()).add(used)


def _less(now: Used | None, before: Used) -> bool:
    """Whether an amount, which only grows, has become less: it is of another file."""
    return now is None or now.model_calls < before.model_calls
