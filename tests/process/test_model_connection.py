"""The connection to a model's server, over real sockets: what is kept, what is refused, ways through proxies."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.http import route as ways
from goondan.agentproc.http.connection import READ_AHEAD_BYTES, Client, Patience
from goondan.agentproc.http.route import Way, route_to
from goondan.agentproc.providers.base import PIECE_BYTES
from goondan.agentproc.providers.faults import Fault
from goondan.agentproc.providers.vendor import Body, FileText

ROOT = Path(__file__).parent.parent.parent
PEM = ROOT / "tests" / "servers" / "model.test.pem"
PATIENCE = Patience(connect_s=10, silence_s=10)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine"
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("SSL_CERT_"):
            monkeypatch.delenv(name)


@asynccontextmanager
async def serving(
    serve: Callable[[Reader, Writer], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server with `serve` for each connection; its port."""

    tasks: list[asyncio.Task[None] | None] = []

    async def connected(reader: Reader, writer: Writer) -> None:
        tasks.append(asyncio.current_task())
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            assert task is not None
            task.cancel()
            await asyncio.wait([task])


class Script:
    """A server that gives the next of its answers to each request; an empty one closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            self.bodies.append(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
            answer = self.answers.pop(0)
            writer.write(answer)
            if not answer or answer.startswith(b"HTTP/1.0"):
                return


async def body(client: Client, url: str, patience: Patience = PATIENCE, sent: Sequence[bytes] = (b"{", b"}")) -> str:
    """The body of the answer to a request."""
    response = await client.ask("POST", url, {"x-a": "b"}, sent, patience)
    parts = []
    try:
        while part := await response.read():
            parts.append(part)
    finally:
        response.close()
    return f"{response.status} {b''.join(parts).decode()}"


async def asked(*answers: bytes, times: int = 1) -> tuple[list[str], Script]:
    """What a client reads from a server with these answers."""
    script, client = Script(*answers), Client()
    async with serving(script) as port:
        try:
            return [await body(client, f"http://127.0.0.1:{port}/v1") for _ in range(times)], script
        finally:
            client.close()


# --- kept, or not -----------------------------------------------------------------------------------------------------


async def test_one_connection_serves_all_requests() -> None:
    assert (script := (await asked(OK, OK, OK, times=3))[1]).connections == 1
    assert script.heads[0] == script.heads[2]
    assert script.heads[0].startswith("POST /v1 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "\r\nx-a: b\r\n" in script.heads[0]


@pytest.mark.parametrize(
    "last",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 4\r\n\r\nfine",
        b"HTTP/1.0 200 OK\r\n\r\nfine",
        OK + b"and more, which nobody asked for",
    ],
)
async def test_a_connection_that_cannot_be_kept_is_not(last: bytes) -> None:
    texts, script = await asked(last, OK, times=2)
    assert (texts, script.connections) == (["200 fine", "200 fine"], 2)


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    """Closed with the second request under way, so that the client cannot have seen it before."""
    texts, script = await asked(OK, b"", OK, times=2)
    assert (texts, script.connections) == (["200 fine", "200 fine"], 2)


async def test_a_fresh_connection_that_is_closed_is_a_fault() -> None:
    with pytest.raises(Fault, match="lost before an answer") as caught:
        await asked(b"")
    assert caught.value.kind == "busy"


async def test_an_answer_that_is_not_read_to_its_end_costs_its_connection() -> None:
    script, client = Script(OK.replace(b"4", b"5"), OK), Client()
    async with serving(script) as port:
        (await client.ask("GET", f"http://127.0.0.1:{port}", {}, (), PATIENCE)).close()
        assert await body(client, f"http://127.0.0.1:{port}") == "200 fine"
        client.close()
    assert script.connections == 2


# --- answers of many forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, "200 fine"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nfi\r\n2\r\nne\r\n0\r\nt: 1\r\n\r\n", "200 fine"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "204 "),
        (b"HTTP/1.1 529 \r\ncontent-length: 0\r\n\r\n", "529 "),
    ],
)
async def test_an_answer_is_read_to_its_end(answer: bytes, text: str) -> None:
    assert (await asked(answer, OK, times=2))[0] == [text, "200 fine"]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "broken", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000, "broken", "head is larger"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "broken", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "broken", "no HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "broken", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "silent", "nothing for 0.2 s"),
    ],
)
async def test_an_answer_that_is_none_is_a_fault(answer: bytes, kind: str, words: str) -> None:
    script, client = Script(answer), Client()
    async with serving(script) as port:
        with pytest.raises(Fault, match=words) as caught:
            await body(client, f"http://127.0.0.1:{port}", Patience(silence_s=0.2))
        client.close()
    assert caught.value.kind == kind


def _many_headers() -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + b"".join(b"x%d: y\r\n" % number for number in range(300)) + b"\r\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_many_headers(), "more than 256 headers"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000, "head is larger"),
        (CHUNKED + b"1;" + b"e" * 200_000 + b"\r\nx\r\n", "chunk extensions or trailers"),
        (CHUNKED + b"1\r\nx\r\n0\r\n" + b"t: u\r\n" * 40_000, "chunk extensions or trailers"),
    ],
)
async def test_what_stands_around_a_body_is_bounded(answer: bytes, words: str) -> None:
    async def pour(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(answer), 8192):
            writer.write(answer[at : at + 8192])
            await writer.drain()
        await reader.read()  # leaves it open

    client = Client()
    async with serving(pour) as port:
        with pytest.raises(Fault, match=words):
            await body(client, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("start", "drip", "words"),
    [
        (b"", b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1000, "no end of the answer's head for 0.3 s"),
        (CHUNKED + b"1;", b"e", "nothing for 0.3 s"),
        (CHUNKED + b"1\r\nx\r\n0\r\nt: ", b"u", "nothing for 0.3 s"),
    ],
)
async def test_bytes_that_are_no_body_extend_no_wait(start: bytes, drip: bytes, words: str) -> None:
    """One byte at a time, each long before the silence is over."""

    async def trickle(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        for at in itertools.count():
            writer.write(drip[at % len(drip) :][:1])
            await writer.drain()
            await asyncio.sleep(0.02)

    client = Client()
    async with serving(trickle) as port, asyncio.timeout(20):
        with pytest.raises(Fault, match=words) as caught:
            await body(client, f"http://127.0.0.1:{port}", Patience(silence_s=0.3))
    assert caught.value.kind == "silent"


async def test_a_server_waits_for_a_reader_that_does_not_read() -> None:
    size, written = 64 << 20, 0

    async def pour(reader: Reader, writer: Writer) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * 65536)
            written += 65536
            await writer.drain()

    client = Client()
    async with serving(pour) as port:
        response = await client.ask("GET", f"http://127.0.0.1:{port}", {}, (), PATIENCE)
        before = -1
        while before != written:  # until nothing moves any more
            before = written
            await asyncio.sleep(0.05)
        assert written < size / 2
        total = len(first := await response.read())
        assert len(first) < 2 * READ_AHEAD_BYTES
        while part := await response.read():
            total += len(part)
        response.close()
        client.close()
    assert total == size


# --- addresses and proxies --------------------------------------------------------------------------------------------


async def test_an_address_that_does_not_answer_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    reach, closed = ways._reach, socket.socket()
    closed.bind(("127.0.0.1", 0))

    async def hang_or_reach(loop: asyncio.AbstractEventLoop, address: Any) -> socket.socket:
        return await (reach(loop, address) if address[0] != "silent" else loop.create_future())

    monkeypatch.setattr(ways, "_reach", hang_or_reach)
    async with serving(Script()) as port:
        open_one = ("127.0.0.1", port)
        (await ways._race(loop, [("silent", 1), closed.getsockname(), open_one])).close()
        with pytest.raises(ConnectionRefusedError):
            await ways._race(loop, [closed.getsockname(), closed.getsockname()])
    closed.close()


async def test_http_goes_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    script, client = Script(OK), Client()
    async with serving(script) as port:
        monkeypatch.setenv("http_proxy", f"http://me:s%20t@127.0.0.1:{port}")
        assert await body(client, "http://model.test/v1") == "200 fine"
        client.close()
    assert script.heads[0].startswith("POST http://model.test/v1 HTTP/1.1\r\nhost: model.test\r\n")
    assert "\r\nproxy-authorization: Basic bWU6cyB0\r\n" in script.heads[0]


class Proxy:
    """Leads every CONNECT to one port, or refuses it."""

    def __init__(self, port: int, answer: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n") -> None:
        self.port = port
        self.answer = answer
        self.asked: list[str] = []

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self.answer)
        if b" 200 " not in self.answer:
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.port)

        async def carry(source: Reader, target: Writer) -> None:
            while data := await source.read(65536):
                target.write(data)
            target.close()

        try:
            await asyncio.gather(carry(reader, back), carry(there, writer))
        finally:
            back.close()


def server_tls() -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(PEM)
    return tls


async def test_https_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    script, client = Script(OK, OK), Client()
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    async with serving(script, server_tls()) as port, serving(proxy := Proxy(port)) as proxy_port:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy_port}")
        long = [os.urandom(PIECE_BYTES) for _ in range(40)]
        assert [await body(client, "https://model.test/v1", sent=sent) for sent in (long, [b"short"])] == [
            "200 fine"
        ] * 2
        client.close()
    assert script.bodies == [b"".join(long), b"short"]
    assert proxy.asked == ["CONNECT model.test:443 HTTP/1.1\r\nhost: model.test:443\r\n\r\n"]
    assert script.connections == 1
    assert script.heads[0].startswith("POST /v1 HTTP/1.1\r\nhost: model.test\r\n")


@pytest.mark.parametrize("host", ["model.test", "other.test"])
async def test_a_certificate_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """One that nothing vouches for, and one of another name."""
    if host != "model.test":
        monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    async with serving(Script(OK), server_tls()) as port, serving(Proxy(port)) as proxy_port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy_port}")
        with pytest.raises(Fault, match=r"self-signed|Hostname mismatch") as caught:
            await body(Client(), f"https://{host}/v1")
    assert caught.value.kind == "final"


@pytest.mark.parametrize(("status", "kind"), [("407 Proxy Authentication Required", "final"), ("502 Bad", "busy")])
async def test_a_proxy_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch, status: str, kind: str) -> None:
    async with serving(Proxy(0, f"HTTP/1.1 {status}\r\n\r\n".encode())) as proxy_port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy_port}")
        with pytest.raises(Fault, match=f"the proxy says {status}") as caught:
            await body(Client(), "https://model.test/v1")
    assert caught.value.kind == kind


async def test_certificates_that_cannot_be_loaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    async with serving(Script()) as port:
        with pytest.raises(Fault, match="the certificates cannot be loaded: No such file") as caught:
            await body(Client(), f"https://127.0.0.1:{port}/v1")
    assert caught.value.kind == "final"


# --- routes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "way", "target", "line"),
    [
        ("http://a.test", Way("a.test", 80, False, "a.test"), "/", "host: a.test\r\n"),
        ("https://A.test:8/v 1/가?x=1 2", Way("a.test", 8, True, "a.test"), "/v%201/%EA%B0%80?x=1%202", ": a.test:8\r"),
        ("http://[::1]:80/v1", Way("::1", 80, False, "::1"), "/v1", "host: [::1]:80\r\n"),
        ("http://가.test/v1", Way("xn--o39a.test", 80, False, "xn--o39a.test"), "/v1", "host: xn--o39a.test\r\n"),
    ],
)  # fmt: skip
def test_a_url_becomes_a_route(url: str, way: Way, target: str, line: str) -> None:
    route = route_to(url)
    assert (route.way, route.target) == (way, target)
    assert line in route.lines
    assert route.lines.isascii()


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "ftp://a.test",
        "http://",
        "http://a.test:99999",
        "http://a b.test/",
        "http://[bad",
        "http://a\x7f.test",
        "http://me:p%40@a.test/",
    ],
)
def test_a_url_that_is_none_is_a_fault(url: str) -> None:
    with pytest.raises(Fault) as caught:
        route_to(url)
    assert caught.value.kind == "final"


@pytest.mark.parametrize(
    ("variable", "value", "proxied"),
    [
        ("http_proxy", "http://p.test:8", True),
        ("ALL_PROXY", "p.test:8", True),
        ("https_proxy", "http://p.test:8", False),
        ("no_proxy", "*", False),
    ],
)
def test_which_proxy(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, proxied: bool) -> None:
    monkeypatch.setenv(variable, value)
    assert (route_to("http://a.test").way.host == "p.test") is proxied
    assert route_to("http://127.0.0.1:1").way.host == "127.0.0.1"
    assert route_to("http://localhost:1").way.host == "localhost"


@pytest.mark.parametrize("proxy", ["socks5://p.test:1", "http://", "http://p.test:x", "http://[bad"])
def test_a_proxy_that_cannot_be_used_is_a_fault(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(Fault, match="proxy settings"):
        route_to("http://a.test")


# --- bodies with files


async def test_a_file_goes_out_as_base64_while_a_slow_server_reads_it(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "f").write_bytes(content)
    body: Body = [b'{"data":"', FileText(str(tmp_path / "f"), len(content)), b'"}']
    size = sum(map(len, body))
    got: list[bytes] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert f"content-length: {size}\r\n".encode() in head.lower()
            got.append(await reader.readexactly(size))
            writer.write(OK)

    async with serving(serve) as port:
        client = Client()
        for _ in range(2):  # the second one on the connection that was kept
            answered = await client.ask("POST", f"http://127.0.0.1:{port}/", {}, body, PATIENCE)
            assert await answered.read() == b"fine"
            assert await answered.read() == b""
            answered.close()
        client.close()
    assert got == [b'{"data":"' + b64encode(content) + b'"}'] * 2


async def test_a_server_that_answers_before_it_has_read_a_file_is_heard(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(16 << 20)
    body: Body = [FileText(str(tmp_path / "f"), 16 << 20)]
    asked, began = 0, time.monotonic()

    async def serve(reader: Reader, writer: Writer) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(60)

    async with serving(serve) as port:
        client = Client()
        for count in (1, 2):
            answered = await client.ask("POST", f"http://127.0.0.1:{port}/", {}, body, PATIENCE)
            assert answered.status == 413
            answered.close()
            assert asked == count  # the connection was not kept
        client.close()
    assert time.monotonic() - began < PATIENCE.silence_s, "it does not wait for the server to read on"


async def test_a_server_that_reads_nothing_of_a_file_is_silent(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(16 << 20)
    body: Body = [FileText(str(tmp_path / "f"), 16 << 20)]

    async def serve(reader: Reader, writer: Writer) -> None:
        await asyncio.sleep(60)

    async with serving(serve) as port:
        client = Client()
        with pytest.raises(Fault) as raised:
            await client.ask("POST", f"http://127.0.0.1:{port}/", {}, body, Patience(silence_s=0.2))
        assert raised.value.kind == "silent"
        client.close()


#: Asks once, in a process of its own: libuv's threads stay for as long as theirs.
ONCE = """
import asyncio, os, sys, uvloop
from goondan.agentproc.http.connection import Client, Patience
threads = lambda: len(os.listdir("/proc/self/task"))
async def go():
    before = threads()
    response = await Client().ask("POST", sys.argv[1], {}, [b"{}"], Patience())
    print(threads() - before, response.status, (await response.read()).decode())
uvloop.run(go())
"""


async def test_a_connection_adds_no_thread() -> None:
    async with serving(Script(OK)) as port:
        words = (sys.executable, "-c", ONCE, f"http://127.0.0.1:{port}/v1")
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        told, _ = await process.communicate()
    assert told == b"0 200 fine\n"


async def test_a_content_coding_that_was_not_asked_for_is_a_fault_in_words() -> None:
    coded = b"HTTP/1.1 %s\r\ncontent-encoding: GZip\r\ncontent-length: 4\r\n\r\nzzzz"
    async with serving(Script(coded % b"200 OK", coded % b"429 Slow", OK)) as port:
        with pytest.raises(Fault, match="in the content coding gzip, for which nobody has asked") as caught:
            await body(Client(), f"http://127.0.0.1:{port}/v1")
        assert caught.value.kind == "final"
        assert (await body(Client(), f"http://127.0.0.1:{port}/v1")).startswith("429"), "a refusal stays one"


async def test_an_address_that_refuses_is_told_in_the_systems_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Fault, match="no connection: Connection refused"):
        await body(Client(), f"http://127.0.0.1:{port}/v1")


@pytest.mark.parametrize("listed", ["10.0.0.0/8", "*.example.com", "2001:db8::1"])
def test_no_proxy_takes_networks_domains_and_bare_addresses(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.test:3128")
    monkeypatch.setenv("NO_PROXY", listed)
    ways = {host: route_to(f"https://{host}/v1").way.host for host in ("10.1.2.3", "a.example.com", "[2001:db8::1]")}
    direct = {host for host, first in ways.items() if first != "proxy.test"}
    assert direct == {{"10.0.0.0/8": "10.1.2.3", "*.example.com": "a.example.com"}.get(listed, "[2001:db8::1]")}
