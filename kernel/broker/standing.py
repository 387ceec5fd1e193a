"""The state of one event whose calls a person is asked about. Pure; the part that asks people changes it."""

from __future__ import annotations


class Standing:
    """The items of one event. Times are seconds on the broker's clock."""

    __slots__ = ("asked", "asked_bytes", "held_since", "holds", "inner", "items", "ready", "unread")

    def __init__(self) -> None:
        #: How many items of its own turn wait for a person.
        self.items = 0
        #: How many of them belong to inner calls. Such a call ends with the process of the turn, so the turn is handed
        #: over without a decision.
        self.inner = 0
        #: How many items its own turn has, with decided ones: they stay until the event ends.
        self.asked = 0
        #: Bytes of these items.
        self.asked_bytes = 0
        #: How many decided items its turn was not told of.
        self.unread = 0
        #: True when it may be handed over although items wait: one was decided after the last time.
        self.ready = False
        #: How many items stop its clock: its own, and those of turns that it waits for.
        self.holds = 0
        #: Since when its clock stands still.
        self.held_since = 0.0

    def lost(self) -> bool:
        """The process of its turn is gone. Returns whether the turn only waited; then this is not a failed attempt."""
        self.ready = self.unread > 0
        return self.items > self.inner and not self.unread

    @property
    def waits(self) -> bool:
        """Whether it must not be handed over now, because its work needs a person's decision first."""
        return self.items > self.inner and not self.ready
