"""Assistant messages on their way to jails: sent by an agent once, handed to each jail once. Pure.

Source: design section 7; schemas/WORKER.md "message".
"""

from __future__ import annotations

from typing import Final

#: Messages in all (bytes): what some hundred agents have in hand at a time; the oldest go first.
CACHE_BYTES: Final = 32 << 20
#: Messages that a worker keeps; WORKER.md says the same number.
WORKER_MESSAGES: Final = 8

#: (agent, instanceKey, messageId)
Name = tuple[str, str, str]


class MessageCache:
    """What agents have sent."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._messages: dict[Name, bytes] = {}

    def put(self, name: Name, message: bytes) -> None:
        """Keep a message, as the agent encoded it."""
        old = self._messages.pop(name, None)
        if old is not None:
            self._bytes -= len(old)
        self._messages[name] = message
        self._bytes += len(message)
        while self._bytes > self._max_bytes and len(self._messages) > 1:
            self._bytes -= len(self._messages.pop(next(iter(self._messages))))

    def get(self, name: Name) -> bytes | None:
        """The message, if it is still here."""
        return self._messages.get(name)


class SentMessages:
    """Which messages one worker has, by the names it knows them by. It drops the oldest beyond WORKER_MESSAGES."""

    __slots__ = ("_count", "_names")

    def __init__(self) -> None:
        self._names: dict[Name, str] = {}
        self._count = 0

    def name(self, name: Name, message: bytes | None) -> tuple[str | None, bool]:
        """The worker's name for a message, and whether the message must be sent first; None when nobody has it."""
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
