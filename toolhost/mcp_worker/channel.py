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
from goondan.toolhost.socket_end import SocketEnd

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HostFrame).decode
_plain = msgspec.msgpack.Decoder().decode
#: The fields of frames that have words of a server, and in two of them a field that has ours.
_THEIRS: Final = {"message": "", "output": "", "value": "", "uri": "", "error": "code", "listing": "era"}


class Channel(SocketEnd):
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
        super().__init__(channel, loop, on_data=self._take, on_left=self._ended, on_broken=self._ended)
        self._on_frame = on_frame
        self._on_end = on_end
        self._have = bytearray()
        self._redact: Redactor | None = None
        self.read()

    def hide(self, secrets: Iterable[str]) -> None:
        """From now on `***` is sent in the place of each of these."""
        self._redact = Redactor(*secrets)

    def send(self, frame: WorkerFrame) -> None:
        """Queue a frame. Frames of one turn of the loop are written together."""
        body = _encode(frame)
        if self._redact is not None and not isinstance(frame, LoginAsk):  # that one takes tokens to their keeper
            body = without(body, self._redact)
        self.put(len(body).to_bytes(4, "little") + body)
        self.flush_soon()

    async def drain(self, seconds: float) -> None:
        """Wait until everything is written, but no longer than this."""
        end = self._loop.time() + seconds
        self.flush()
        while self.unwritten and self._loop.time() < end:
            await asyncio.sleep(0.005)

    def _take(self, data: bytes) -> None:
        have = self._have
        have += data
        at = 0
        while len(have) - at >= 4:
            size = int.from_bytes(have[at : at + 4], "little")
            if size > MAX_WORKER_FRAME:
                self._ended()
                return
            if len(have) - at < 4 + size:
                break
            body = bytes(have[at + 4 : at + 4 + size])
            at += 4 + size
            self._on_frame(_decode(body))
        if at:
            del have[:at]

    def _ended(self) -> None:
        if not self.closed:
            self.close()
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
