"""What the turns of one event have come to. Pure; the mailbox and the parts around it write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Raw

from schemas.frames import Blob

if TYPE_CHECKING:
    from kernel.broker.mailbox import Event


class Work:
    """What the turns of one event have come to, and its end."""

    __slots__ = (
        "answer",
        "answer_blob",
        "answered",
        "attempts",
        "calls",
        "cause",
        "dead_bytes",
        "ended_ms",
        "kept_here",
        "kept_in_file",
        "lease_until",
        "open_calls",
        "position",
        "progressed",
        "requests",
    )

    def __init__(self) -> None:
        #: What its own turn has asked for and waits for.
        self.requests: dict[Event, None] = {}
        #: What its own turn has asked for and has ended, in order.
        self.answered: dict[Event, None] = {}
        #: Every callId that it has made, with the incarnation of the tool host that had it.
        self.calls: dict[str, str | None] = {}
        #: How many of its calls are open.
        self.open_calls = 0
        #: Holders that were lost without progress.
        self.attempts = 0
        #: The present holder has stored something since it was handed the event.
        self.progressed = False
        #: How many messages its turn has stored, as its holder said last.
        self.position = 0
        #: A holder that is silent until then is taken for hung (seconds on the broker's clock).
        self.lease_until = 0.0
        #: Its answer, and what stands for that if it is large.
        self.answer: Raw | None = None
        self.answer_blob: Blob | None = None
        #: Of dead letters: why it ended, and when (milliseconds since 1970).
        self.cause = ""
        self.ended_ms = 0
        #: Of dead letters: what it held (bytes).
        self.dead_bytes = 0
        #: What is kept of the answer for the turn that asked: in memory, and in a file (bytes).
        self.kept_here = self.kept_in_file = 0
