"""Which large payloads the broker still may have to hand over, and which nobody needs any more. Pure.

Events and answers only: calls and results are deleted by the one who reads them. A payload is held once by every event,
answer and delivery that refers to it; what nobody holds any more is to be deleted (`removable`). An answer that a
receiver has not acknowledged is held on its own, since its event may be forgotten first.

Source: docs/design/wire.md section 7.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from schemas.blobs import MAX_BLOB_BYTES, MAX_REQUEST_BYTES, check_reference
from schemas.frames import Blob, Frame

#: Bytes of arguments, by reference, that the calls of all agents may have under way: a tool host has them in memory.
MAX_CALL_BYTES: Final = 64 << 20
#: Bytes of answers that were sent and are not acknowledged, beside those that the mailbox remembers: who reads slowly,
#: or has gone without a word, must not fill the folder for all.
MAX_SENT_BYTES: Final = 256 << 20


#: Who is given an answer.
Receiver = Literal["agent", "client", "toolhost"]


class HeldBlobs:
    """The payloads of events and answers."""

    def __init__(self) -> None:
        self._holders: Counter[str] = Counter()  # by file
        #: Answer id -> what a client or a tool host was sent and has not acknowledged, in which sweep's time, and who.
        self._sent: dict[str, tuple[Blob, int, Receiver]] = {}
        self._sent_bytes = 0
        self._sweeps = 0
        #: The same for agents, until they are back: their answers wait in a lane of their own.
        self._lanes: dict[str, Blob] = {}
        #: Files to be deleted; the loop takes them.
        self.removable: list[str] = []

    def hold(self, blob: Blob | None) -> None:
        """Something refers to this payload."""
        if blob is not None:
            self._holders[blob.file] += 1

    def release(self, blob: Blob | None) -> None:
        """It does not any more."""
        if blob is None:
            return
        self._holders[blob.file] -= 1
        self.discard(blob)

    def discard(self, blob: Blob | None) -> None:
        """A reference that was not taken, in a repeat: nothing needs its file unless it is the one that was."""
        if blob is not None and self._holders[blob.file] <= 0:
            del self._holders[blob.file]
            self.removable.append(blob.file)

    def leave(self, blob: Blob | None) -> None:
        """From now on only the journal refers to this payload: a sweep deletes it when the journal has forgotten it."""
        if blob is not None:
            self._holders[blob.file] -= 1
            if self._holders[blob.file] <= 0:
                del self._holders[blob.file]

    def sent(self, answer_id: str, blob: Blob | None, *, to: Receiver) -> None:
        """An answer is on its way, perhaps once more."""
        if blob is None:
            return
        self.hold(blob)
        if to == "agent":
            self.release(self._lanes.pop(answer_id, None))
            self._lanes[answer_id] = blob
            return
        self.leave(self._unsent(answer_id))
        self._sent[answer_id] = (blob, self._sweeps, to)
        self._sent_bytes += blob.size
        while self._sent_bytes > MAX_SENT_BYTES:
            self.leave(self._unsent(next(iter(self._sent))))

    def arrived(self, answer_id: str, *, at: Receiver) -> bool:
        """A receiver says that it has an answer; True when that was a client, and the answer is large. What was sent to
        somebody of another kind stays: a tool host knows the ids of events that clients wait for.
        """
        if at == "agent":
            self.release(self._lanes.pop(answer_id, None))
            return False
        if answer_id not in self._sent or self._sent[answer_id][2] != at:
            return False
        self.release(self._unsent(answer_id))
        return True

    def _unsent(self, answer_id: str) -> Blob | None:
        found = self._sent.pop(answer_id, None)
        blob = None if found is None else found[0]
        self._sent_bytes -= size_of(blob)
        return blob

    def referenced(self) -> frozenset[str]:
        """What must not be swept. Answers that were sent two sweeps ago and never acknowledged are given up."""
        for answer_id in [name for name, (_, sweep, _) in self._sent.items() if sweep < self._sweeps]:
            self.leave(self._unsent(answer_id))
        self._sweeps += 1
        return frozenset(self._holders)


def size_of(blob: Blob | None) -> int:
    """Bytes of a payload that goes by reference."""
    return 0 if blob is None else blob.size


def check(frame: Frame, *, from_host: bool) -> None:
    """Raise GoondanError for a bad reference, or for a payload that is too large for what it is for."""
    # A tool host's own events tell what pending work came to; one that wants an answer is a request like any other.
    asks = frame.type == "tool.call" or (frame.type == "event" and (not from_host or frame.reply_to is not None))
    check_reference(frame, MAX_REQUEST_BYTES if asks else MAX_BLOB_BYTES)
