"""Requests from inside a jail: addresses, heads, answers of servers that do not keep to HTTP, time."""

from __future__ import annotations

import posix
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.base.goondan_base.fetch import Address, TimedOut, Unreachable, send
from goondan.toolhost.inside.api import ToolError

PEM = Path(__file__).parents[2] / "servers" / "model.test.pem"


@contextmanager
def server(*replies: bytes, hold: bool = False, pause_s: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """A server for one connection after another: its URL, and what it was sent. `hold`: it does not close."""
    listening = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []
    done = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            for reply in replies:
                connection, _ = listening.accept()
                with connection:
                    heard.append(connection.recv(65536))
                    if not pause_s:
                        connection.sendall(reply)
                    elif any(connection.send(bytes([byte])) and done.wait(pause_s) for byte in reply):
                        return
                    if hold:
                        done.wait(20)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", heard
    finally:
        done.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"http_proxy", b"HTTP_PROXY", b"https_proxy", b"HTTPS_PROXY"):
        monkeypatch.delitem(posix.environ, name, raising=False)


@pytest.mark.parametrize(
    ("url", "origin", "target"),
    [
        ("http://a.example", ("http", "a.example", 80), "/"),
        ("https://A.Example:8443/x?y=1#z", ("https", "a.example", 8443), "/x?y=1"),
        ("http://127.0.0.1:9/한글 파일.bin", ("http", "127.0.0.1", 9), "/%ED%95%9C%EA%B8%80%20%ED%8C%8C%EC%9D%BC.bin"),
        ("http://h/a%20b'c\"d", ("http", "h", 80), "/a%20b'c%22d"),
        ("http://h/?q=a b&r=한", ("http", "h", 80), "/?q=a%20b&r=%ED%95%9C"),
        ("http://[::1]:80/", ("http", "::1", 80), "/"),
        ("https://bücher.example/", ("https", "xn--bcher-kva.example", 443), "/"),
    ],
)
def test_an_address_and_what_is_asked(url: str, origin: tuple[str, str, int], target: str) -> None:
    address = Address(url)
    assert (address.origin, address.target) == (origin, target)


@pytest.mark.parametrize(
    "url",
    ["", "not a url", "ftp://h/", "file:///etc/passwd", "data:text/plain,hi", "http://", "http://u:secret@h/",
     "http://h:99999/", "http://h:x/", "http://[::1/", "http://a b/", "http://a%00b/", "//h/", "http://" + "a" * 9000],
)  # fmt: skip
def test_what_is_no_address_is_said_without_repeating_it(url: str) -> None:
    with pytest.raises(Unreachable) as caught:
        Address(url)
    assert "secret" not in str(caught.value)
    assert str(caught.value).startswith("the address ")


@given(st.text(max_size=40), st.sampled_from(["", "http://", "http://h/", "https://h:1/?"]))
def test_any_address_is_one_line_of_ascii_or_none(text: str, start: str) -> None:
    with suppress(Unreachable):
        address = Address(start + text)
        assert all("!" <= c <= "~" for c in address.target + address.authority)


def test_a_request_as_it_is_sent() -> None:
    with server(b"HTTP/1.1 201 Made\r\nX-A: 1\r\nContent-Length: 2\r\n\r\nhi") as (url, heard):
        with send("POST", f"{url}/p", headers={"X-B": "2"}, body=b"{}", timeout_s=5) as answer:
            assert (answer.status, answer.reason, answer.length) == (201, "Made", 2)
            assert (answer.header("x-a"), answer.header("x-c")) == ("1", None)
            assert answer.read(100) == b"hi"
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.splitlines() == [
        b"POST /p HTTP/1.1",
        b"Host: " + url.removeprefix("http://").encode(),
        b"User-Agent: goondan",
        b"Accept: */*",
        b"Accept-Encoding: identity",
        b"Connection: close",
        b"Content-Length: 2",
        b"X-B: 2",
    ]
    assert body == b"{}"


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\0b", "한", "a\x7f"])
def test_a_header_cannot_become_two(value: str) -> None:
    with server() as (url, heard):
        with pytest.raises(Unreachable, match="'X-B' holds characters") as caught:
            send("GET", url, headers={"X-B": value}, timeout_s=5)
    assert value not in str(caught.value)
    assert heard in ([], [b""])


@pytest.mark.parametrize("name", ["", "X B", "X:B", "X\r\nB", "한"])
def test_a_name_that_no_header_has(name: str) -> None:
    with server() as (url, _), pytest.raises(Unreachable, match="holds characters that no header may have"):
        send("GET", url, headers={name: "1"}, timeout_s=5)


def test_nothing_is_read_that_was_not_asked_for() -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000) as (url, _):
        with send("GET", url, timeout_s=5) as answer:
            assert answer.read(3) == b"xxx"
            assert answer.length is None
            assert len(answer.read(10_000)) == 997
            assert answer.read(1) == b""


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nonly ten b", "the answer broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "the answer broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "the answer broke off"),
        (b"", "the server closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the answer is no HTTP"),
        (b"HTTP/1.1 abc OK\r\n\r\n", "the answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: 1\r\n" * 5000 + b"\r\n", "the answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000 + b"\r\n\r\n", "the answer is no HTTP"),
    ],
)
def test_what_is_no_answer(reply: bytes, said: str) -> None:
    with server(reply) as (url, _):
        with pytest.raises(Unreachable, match=said):
            with send("GET", url, timeout_s=5) as answer:
                answer.read(1000)


def test_a_server_that_says_nothing_or_too_slowly() -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\n", pause_s=0.25) as (url, _):  # each byte in time, all of them not
        began = time.monotonic()
        with pytest.raises(TimedOut):
            send("GET", url, timeout_s=0.3)
        assert time.monotonic() - began < 4
    with server(b"HTTP/1.1 200 OK\r\n\r\nx", hold=True) as (url, _):
        with send("GET", url, timeout_s=0.3, body_s=0.4) as answer:
            assert answer.read(1) == b"x"
            with pytest.raises(TimedOut):
                answer.read(1)


def test_a_cancelled_call_stops_waiting() -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\n", hold=True) as (url, _):
        asked = iter([False, True])
        with send("GET", url, timeout_s=5, cancelled=lambda: next(asked)) as answer:
            with pytest.raises(ToolError) as caught:
                answer.read(1)
    assert caught.value.code == "E_CANCELLED"


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"^ECONNREFUSED: no connection to 127.0.0.1:{port}$"):
        send("GET", f"http://127.0.0.1:{port}/secret", timeout_s=5)


@contextmanager
def proxied(monkeypatch: pytest.MonkeyPatch, reply: bytes) -> Iterator[list[bytes]]:
    with server(reply) as (url, heard):
        monkeypatch.setitem(posix.environ, b"http_proxy", url.encode())
        monkeypatch.setitem(posix.environ, b"HTTPS_PROXY", url.encode())
        yield heard


def test_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxied(monkeypatch, b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx") as heard:
        with send("GET", "http://a.example:81/x?y", timeout_s=5) as answer:
            assert answer.read(5) == b"x"
    assert heard[0].splitlines()[:2] == [b"GET http://a.example:81/x?y HTTP/1.1", b"Host: a.example:81"]
    with proxied(monkeypatch, b"HTTP/1.1 403 Forbidden\r\n\r\n") as heard:
        with pytest.raises(Unreachable, match=r"the proxy refused a connection to a.example: HTTP 403"):
            send("GET", "https://a.example/secret", headers={"Authorization": "Bearer xyz"}, timeout_s=5)
    assert heard[0].splitlines() == [b"CONNECT a.example:443 HTTP/1.1", b"Host: a.example:443", b""]
    with proxied(monkeypatch, b"HTTP/1.1 502 Bad Gateway\r\nProxy-Status: x; error=y\r\n\r\n"):
        with pytest.raises(Unreachable, match=r"^the proxy could not reach a.example$"):
            send("GET", "http://a.example/", timeout_s=5)


def test_what_speaks_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (url, _):
        with pytest.raises(Unreachable, match=r"no encrypted connection to 127.0.0.1"):
            send("GET", url.replace("http:", "https:"), timeout_s=5)


@contextmanager
def tls_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A proxy that answers for model.test itself: what came through it, encrypted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    listening = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                with context.wrap_socket(connection, server_side=True) as secure:
                    heard.append(secure.recv(65536))
                    secure.sendall(b"HTTP/1.1 200 OK\r\nProxy-Status: not; error=for-us\r\nContent-Length: 2\r\n\r\nhi")

    thread = threading.Thread(target=serve)
    thread.start()
    monkeypatch.setitem(posix.environ, b"https_proxy", b"http://127.0.0.1:%d" % listening.getsockname()[1])
    try:
        yield heard
    finally:
        listening.close()
        thread.join()


def test_tls_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with tls_proxy(monkeypatch) as heard:
        with pytest.raises(Unreachable, match=r"^the certificate of model.test is not valid: self-signed certificate$"):
            send("GET", "https://model.test/", headers={"Authorization": "Bearer xyz"}, timeout_s=5)
    assert heard == []
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    with tls_proxy(monkeypatch) as heard:
        with send("GET", "https://model.test/p", headers={"Authorization": "Bearer xyz"}, timeout_s=5) as answer:
            assert (answer.status, answer.read(9)) == (200, b"hi")
    assert heard[0].splitlines()[:2] == [b"GET /p HTTP/1.1", b"Host: model.test"]
