"""What of one event stands still while a person is asked. Pure; kernel/broker/approvals drives it."""

from __future__ import annotations


class Standing:
    """Of one event. Times are seconds on the broker's clock."""

    __slots__ = ("asked", "asked_bytes", "held_since", "holds", "items", "ready", "unread")

    def __init__(self) -> None:
        #: Items of its own turn that wait for a person.
        self.items = 0
        #: All items of its own turn, also those that were decided, and their bytes: they stay until the event ends.
        self.asked = 0
        self.asked_bytes = 0
        #: Items that were decided, and of which its turn has not heard.
        self.unread = 0
        #: It is to be handed out although items wait: one was decided since it was handed out last.
        self.ready = False
        #: Items for which its clock stands still: its own, and those of turns that it waits for.
        self.holds = 0
        #: Since when.
        self.held_since = 0.0

    def lost(self) -> bool:
        """The process whose turn it was is gone; whether it only waited, so that this is no attempt that failed."""
        self.ready = self.unread > 0
        return self.items > 0 and not self.unread

    @property
    def waits(self) -> bool:
        """Whether it is not to be handed out now, because only a person can bring it further."""
        return self.items > 0 and not self.ready
