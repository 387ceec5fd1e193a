"""Knows which large payloads the broker may still have to hand over, and which nobody needs any more. Pure.

This is about events and answers only: the reader of a call or a result deletes its payload. Every event, answer and
delivery that refers to a payload holds it once. A payload that nothing holds is to be deleted (`removable`). An answer
that its receiver has not acknowledged is held separately, because its event may be forgotten first.

Source: docs/design/wire.md section 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from goondan.schemas.wire import blobs, errors
from goondan.schemas.wire.frames import Blob, FilePart, Frame

#: Bytes of arguments by reference that all open calls together may have: the tool host holds them in memory.
MAX_CALL_BYTES: Final = 64 << 20
#: Bytes of answers that were sent and not acknowledged, besides those that the mailbox remembers. A receiver that reads
#: slowly, or has gone silently, must not fill the folder for all others.
MAX_SENT_BYTES: Final = 256 << 20


#: The kind of receiver of an answer.
Receiver = Literal["agent", "client", "toolhost"]


class HeldBlobs:
    """The payloads of events and answers."""

    def __init__(self) -> None:
        self._holders: Counter[str] = Counter()  # by file
        #: Answers that a client or a tool host has not acknowledged. Answer id -> payload, number of the sweep before
        #: which it was sent, kind of receiver.
        self._sent: dict[str, tuple[Blob, int, Receiver]] = {}
        self._sent_bytes = 0
        self._sweeps = 0
        #: Answers that agents have not acknowledged, by id: they wait in the agent's lane until it is back.
        self._lanes: dict[str, Blob] = {}
        #: Files to delete. The loop takes them from here.
        self.removable: list[str] = []

    def hold(self, blob: Blob | None, files: Sequence[FilePart] | None = None) -> None:
        """One more thing refers to this payload, and has these files."""
        if blob is not None:
            self._holders[blob.file] += 1
        for file in files or ():
            self._holders[file.blob.file] += 1

    def release(self, blob: Blob | None, files: Sequence[FilePart] | None = None) -> None:
        """One thing less refers to this payload, and has these files."""
        if blob is not None:
            self._holders[blob.file] -= 1
            self.discard(blob)
        for file in files or ():
            self.release(file.blob)

    def discard(self, blob: Blob | None) -> None:
        """A repeat brought a reference that is not used. Its file goes, unless the first frame named the same file."""
        if blob is not None and self._holders[blob.file] <= 0:
            del self._holders[blob.file]
            self.removable.append(blob.file)

    def leave(self, blob: Blob | None) -> None:
        """Only the journal refers to this payload now. A sweep deletes it when the journal has forgotten it."""
        if blob is not None:
            self._holders[blob.file] -= 1
            if self._holders[blob.file] <= 0:
                del self._holders[blob.file]

    def sent(self, answer_id: str, blob: Blob, *, to: Receiver) -> None:
        """A large answer was sent, perhaps not for the first time."""
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
        """A receiver acknowledges an answer. True when the receiver is a client and the answer is large.

        An acknowledgement counts only from the kind of receiver that the answer was sent to: a tool host knows the ids
        of events that clients wait for.
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
        """The files that a sweep must keep. Gives up answers that were sent two sweeps ago and never acknowledged."""
        for answer_id in [name for name, (_, sweep, _) in self._sent.items() if sweep < self._sweeps]:
            self.leave(self._unsent(answer_id))
        self._sweeps += 1
        return frozenset(self._holders)


def size_of(blob: Blob | None) -> int:
    """Bytes of a payload that goes by reference."""
    return 0 if blob is None else blob.size


def check(frame: Frame, *, from_host: bool, by_operator: bool = False) -> None:
    """Raise GoondanError for a bad reference, for a payload that is too large for what it is for, or for files that
    may not be there.
    """
    # A tool host's own events carry the result of pending work. An event that wants an answer is an ordinary request.
    asks = frame.type == "tool.call" or (frame.type == "event" and (not from_host or frame.reply_to is not None))
    if frame.blob is not None:
        blobs.check_reference(frame, blobs.MAX_REQUEST_BYTES if asks else blobs.MAX_BLOB_BYTES)
    if frame.files is not None:
        if frame.type != "event" or not by_operator:
            raise errors.fail("E_FORBIDDEN", "only the events of an operator have files")
        blobs.check_files(frame.files)
