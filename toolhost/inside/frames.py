"""Frames on a worker's socket: four bytes of length before each (schemas/WORKER.md section 2)."""

from __future__ import annotations

#: The worker's socket.
FD = 3
#: One read of the socket (bytes); larger buffers would come from mmap each time.
READ_BYTES = 65536
#: One frame in either direction (bytes).
MAX_FRAME = 8 << 20


def framed(body: bytes) -> bytes:
    """A frame with its length before it."""
    return len(body).to_bytes(4, "little") + body


class Frames:
    """Makes frames of what has been read. A long frame is copied once, however many reads it takes."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._have = 0
        self._want = 4

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now, without their lengths. Raises ValueError for one that is too long."""
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._want:
            return []
        buffer = b"".join(self._chunks)  # which copies nothing where there is one chunk
        frames: list[bytes] = []
        at, end = 0, len(buffer)
        self._want = 4
        while end - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "little")
            if size > MAX_FRAME:
                raise ValueError(f"frame of {size} bytes")
            if end - at - 4 < size:
                self._want = 4 + size
                break
            frames.append(buffer[at + 4 : at + 4 + size])
            at += 4 + size
        self._chunks = [buffer[at:]]
        self._have = end - at
        return frames
