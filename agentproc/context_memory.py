"""What one instance remembers of its context from turn to turn, in its conversation's file.

Source: docs/design/turns.md section 10.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct, structs

from goondan.agentproc.context.estimate import FIRST_GUESS, LEAST_RATIO, MOST_RATIO, Counted, corrected
from goondan.agentproc.context.shape import Shape
from goondan.agentproc.store import ConversationStore
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.codec import encode_value

#: The name under which the file keeps it.
NAME: Final = "context"
#: How often a server is asked for its window in a process, as long as it does not say.
ASKS: Final = 3


class Kept(Struct, frozen=True, omit_defaults=True):
    """What is kept."""

    #: The model and the server that the next three belong to.
    model: str = ""
    #: The tokens of a byte.
    ratio: float = FIRST_GUESS
    #: The window that a refusal has told (tokens).
    told: int | None = None
    #: What was known of the window before that refusal (tokens).
    known: int | None = None
    #: What is left out of the conversation.
    shape: Shape = Shape()
    #: The last request in this shape that a vendor has counted.
    counted: Counted | None = None


class ContextMemory:
    """The memory of one instance."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._kept: Kept | None = None
        self._stored: Kept | None = None
        #: What the server has said of its window in this process (tokens). None: it does not say, or was not asked.
        self.listed: int | None = None
        #: How often it may still be asked. Some servers say it of a model only after its first answer.
        self.asks_left = ASKS

    def of(self, model: ModelSpec) -> Kept:
        """What is kept. What was learned of another model is forgotten."""
        if self._kept is None:
            self._kept = self._stored = self._read()
        name = f"{model.provider}/{model.model}@{model.endpoint or ''}"
        if self._kept.model != name:
            self._kept = Kept(model=name, shape=self._kept.shape)
            self.listed, self.asks_left = None, ASKS
        return self._kept

    def _read(self) -> Kept:
        data = self._store.remembered(NAME)
        try:
            kept = Kept() if data is None else msgspec.msgpack.decode(data, type=Kept)
        except msgspec.DecodeError:
            return Kept()  # of another version: it is learned anew
        return kept if LEAST_RATIO <= kept.ratio <= MOST_RATIO else structs.replace(kept, ratio=FIRST_GUESS)

    def count(self, kept: Kept, counted: Counted) -> None:
        """A vendor has counted a request in the shape that is kept."""
        told = None if kept.told is None or counted.tokens > kept.told else kept.told
        self._kept = structs.replace(kept, ratio=corrected(kept.ratio, counted), told=told, counted=counted)

    def forget_told(self) -> None:
        """Forget what a refusal has told of the window."""
        if self._kept is not None:
            self._kept = structs.replace(self._kept, told=None, known=None)

    def store(self, kept: Kept) -> Kept:
        """Keep this, stored in a transaction of its own. Raises GoondanError as the store does."""
        with self._store.write():
            self._write(kept)
        self._kept = kept
        return kept

    def keep(self) -> None:
        """Store what a vendor's counts have changed (inside the store's `write`)."""
        if self._kept is not None and self._kept is not self._stored:
            self._write(self._kept)

    def _write(self, kept: Kept) -> None:
        self._store.remember(NAME, encode_value(kept))
        self._stored = kept
