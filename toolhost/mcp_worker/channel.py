"""The worker's end of its channel to the tool host: frames of schemas/WORKER.md, both ways.

The tool host is trusted. A frame that is none ends the worker. What a server, or a library of ours, says of the
server's secrets ends here: everything that the worker says passes `send`.

Source: schemas/WORKER.md section 10.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from goondan.schemas.redaction import Redactor
from goondan.schemas.secret_values import in_texts
from goondan.schemas.worker_frames import MAX_WORKER_FRAME, HostFrame, LoginAsk, WorkerFrame
from goondan.toolhost.mcp_worker.outlet import Outlet

#: Bytes of one read.
READ_BYTES: Final = 65536

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HostFrame).decode
_plain = msgspec.msgpack.Decoder().decode
#: The fields of frames that have words of a server, and in two of them a field that has ours.
_THEIRS: Final = {"message": "", "output": "", "value": "", "uri": "", "error": "code", "listing": "era"}


class Channel:
    """Use from the loop's thread only."""

    def __init__(
        self,
        channel: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_frame: Callable[[HostFrame], None],
        on_end: Callable[[], None],
    ) -> None:
        """`channel` becomes ours. `on_end` is called when the host has closed its end."""
        channel.setblocking(False)
        self._socket = channel
        self._fd = channel.fileno()
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._have = bytearray()
        self._outlet = Outlet(channel, loop, on_broken=self._close)
        self._scheduled = False
        self._redact: Redactor | None = None
        loop.add_reader(self._fd, self._readable)

    def hide(self, secrets: Iterable[str]) -> None:
        """From now on `***` is sent in the place of each of these."""
        self._redact = Redactor(*secrets)

    def send(self, frame: WorkerFrame) -> None:
        """Queue a frame. Frames of one turn of the loop are written together."""
        body = _encode(frame)
        if self._redact is not None and not isinstance(frame, LoginAsk):  # that one takes tokens to their keeper
            body = without(body, self._redact)
        self._outlet.put(len(body).to_bytes(4, "little") + body)
        if not self._scheduled and not self._outlet.is_blocked:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    async def drain(self, seconds: float) -> None:
        """Wait until everything is written, but no longer than this."""
        end = self._loop.time() + seconds
        self.flush()
        while self._outlet.unwritten and self._loop.time() < end:
            await asyncio.sleep(0.005)

    def flush(self) -> None:
        """Write what is queued, as far as there is room."""
        self._scheduled = False
        self._outlet.flush()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        have = self._have
        have += data
        at = 0
        while len(have) - at >= 4:
            size = int.from_bytes(have[at : at + 4], "little")
            if size > MAX_WORKER_FRAME:
                self._close()
                return
            if len(have) - at < 4 + size:
                break
            body = bytes(have[at + 4 : at + 4 + size])
            at += 4 + size
            self._on_frame(_decode(body))
        if at:
            del have[:at]

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._outlet.close()
            self._fd = -1
            self._socket.close()
            self._on_end()


def without(body: bytes, redact: Redactor) -> bytes:
    """An encoded frame without secrets. A tool whose name has one is left out: it could not be called."""
    text = body.decode("utf-8", "replace")
    if redact(text) == text:
        return body  # what stands between two strings can make a hit of none, and never hides one
    frame: dict[str, Any] = _plain(body)
    for key in _THEIRS.keys() & frame.keys():
        shown = in_texts(frame[key], redact)
        if isinstance(shown, dict) and (ours := _THEIRS[key]) in shown:
            shown[ours] = frame[key][ours]
        if key == "listing" and shown is not None:
            both = zip(frame[key].get("tools", ()), shown.get("tools", ()), strict=True)
            shown["tools"] = [
                it for before, it in both if (before["export"], before["name"]) == (it["export"], it["name"])
            ]
        frame[key] = shown
    return _encode(frame)
