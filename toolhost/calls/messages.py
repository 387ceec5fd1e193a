"""Assistant messages on their way to jails: sent by an agent once, handed to each jail once. Pure.

An agent makes the calls of one message at a time, so of each instance only the last few messages are kept.

Source: docs/design/tools.md section 7; schemas/WORKER.md "message".
"""

from __future__ import annotations

from typing import Final

from goondan.toolhost.calls.fair_store import FairStore

#: Messages in all (bytes): what some hundred agents use at a time. The oldest of the owner that has most go first.
CACHE_BYTES: Final = 8 << 20
#: Messages of one instance: that of its step, and of steps whose calls are sent again.
INSTANCE_MESSAGES: Final = 4
#: What a kept message takes beside its bytes, as an estimate.
ENTRY_BYTES: Final = 512
#: Messages that a worker keeps; WORKER.md says the same number.
WORKER_MESSAGES: Final = 8

#: (agent, instanceKey, messageId)
Name = tuple[str, str, str]


class MessageCache:
    """What agents have sent."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._messages: FairStore[Name, bytes] = FairStore()

    def put(self, name: Name, message: bytes) -> None:
        """Keep a message, as the agent encoded it."""
        messages = self._messages
        messages.put(name, name[:2], len(message) + ENTRY_BYTES, message)
        if len(names := messages.names_of(name[:2])) > INSTANCE_MESSAGES:
            messages.take(names[0])
        while messages.total > self._max_bytes and len(messages) > 1:
            messages.take(messages.first_to_go())

    def get(self, name: Name) -> bytes | None:
        """The message, if it is still here."""
        return self._messages.get(name)


class SentMessages:
    """The messages that one worker has, and their names there. It drops the oldest beyond WORKER_MESSAGES."""

    __slots__ = ("_count", "_names")

    def __init__(self) -> None:
        self._names: dict[Name, str] = {}
        self._count = 0

    def name(self, name: Name, message: bytes | None) -> tuple[str | None, bool]:
        """The worker's name for a message, and whether the message must be sent first; None when the message is
        unknown.
        """
        known = self._names.get(name)
        if known is not None:
            return known, False
        if message is None:
            return None, False
        self._count += 1
        made = self._names[name] = f"m{self._count}"
        if len(self._names) > WORKER_MESSAGES:
            del self._names[next(iter(self._names))]
        return made, True
