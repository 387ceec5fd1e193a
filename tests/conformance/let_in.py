"""A forwarder on loopback that adds our token to every request: the conformance package cannot send one.

What names this forwarder's own address in Host and Origin names the server's behind it. Everything else stays as it was
sent, byte by byte, so that a foreign Host or a strange header is judged by the server itself.
"""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from typing import Final

#: The longest head of a request (bytes).
HEAD: Final = 64 << 10


class LetIn:
    """Forwards the connections of `listening` to a port, one request each, with the token."""

    def __init__(self, listening: socket.socket, target_port: int, token: str) -> None:
        own = listening.getsockname()[1]
        self._listening = listening
        self._target_port = target_port
        self._own = re.compile(
            rb"^((?:host|origin):\s*(?:http://)?)(?:localhost|127\.0\.0\.1):%d\s*$" % own, re.I | re.M
        )
        self._there = rb"\g<1>127.0.0.1:%d" % target_port
        self._added = b"\r\nAuthorization: Bearer " + token.encode() + b"\r\nConnection: close"

    def serve(self) -> None:
        """Forward until the listening socket is closed."""
        while True:
            try:
                stream, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(stream,), daemon=True).start()

    def _forward(self, stream: socket.socket) -> None:
        with stream, suppress(OSError), socket.create_connection(("127.0.0.1", self._target_port)) as there:
            data = b""
            while b"\r\n\r\n" not in data and len(data) < HEAD:
                if not (chunk := stream.recv(65536)):
                    return
                data += chunk
            head, _, body = data.partition(b"\r\n\r\n")
            there.sendall(self.rewritten(head) + b"\r\n\r\n" + body)
            back = threading.Thread(target=_pipe, args=(there, stream), daemon=True)
            back.start()
            _pipe(stream, there)
            back.join()

    def rewritten(self, head: bytes) -> bytes:
        """The head as the server gets it."""
        lines = re.sub(rb"\r\nconnection:[^\r\n]*", b"", head, flags=re.I)
        return self._own.sub(self._there, lines.replace(b"\r\n", b"\n")).replace(b"\n", b"\r\n") + self._added


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
