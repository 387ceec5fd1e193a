"""When files that change have come to rest. Pure.

Editors write in several steps: a new file, a rename, an attribute. A bundle is looked at when none of its files has
changed for REST_S, and once for each such change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: How long files rest before anything happens (seconds).
REST_S: Final = 0.3

#: Path -> what tells one content of it from another.
Marks = Mapping[str, tuple[int, ...]]


class Rest:
    """Told of the files again and again. `marks` are those that the revision which runs was read from."""

    def __init__(self, marks: Marks) -> None:
        self._settled = marks
        self._seen = marks
        self._since = 0.0

    def see(self, marks: Marks, now: float) -> bool:
        """Whether there is a change that has come to rest; it is told once. `now`: seconds of a steady clock."""
        if marks != self._seen:
            self._seen, self._since = marks, now
            return False
        if self._seen == self._settled or now - self._since < REST_S:
            return False
        self._settled = self._seen
        return True
