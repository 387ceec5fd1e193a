"""Runs that are recorded, and repeated without a model and without tools (docs/replay.md)."""

from typing import Final

#: The name of the feature's part of a specification.
NAME: Final = "recordings"
#: The provider of a Model that answers from a recording.
PROVIDER: Final = "replay"
