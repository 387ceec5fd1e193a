"""The gate and its HTTP in one process with small bounds: what a caller may cost, and how errors are answered."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from goondan.features.serve.api import Way, refused
from goondan.features.serve.api.http import Bounds
from goondan.features.serve.api.rules.callers import parse
from goondan.schemas.wire.errors import GoondanError, fail
from tests.features.serve.doors import LINES, LOOK, OPERATE, TALK, InProcess, in_process, status

BOUNDS = Bounds(
    connections=96, strangers=32, open=48, head_s=0.5, body_s=0.5, idle_s=1, write_s=0.5, head=8192, bodies=4 << 20
)
#: What ways have seen: names of callers, ends of their work.
SEEN: list[str] = []


async def echo(request: Request) -> Response:
    body = await request.body()
    return PlainTextResponse(f"{request.state.caller.name} {len(body)}")


async def endless(request: Request) -> Response:
    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: " + b"x" * 8192 + b"\n\n"
                await asyncio.sleep(0.001)
        finally:
            SEEN.append("stream ended")

    return StreamingResponse(events(), media_type="text/event-stream")


async def quiet(request: Request) -> Response:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        SEEN.append("cancelled")
        raise
    return Response()


async def short(request: Request) -> Response:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: x\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def deaf(request: Request) -> Response:
    return PlainTextResponse("no matter what")


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * int(request.query_params["bytes"]))


async def wrong(request: Request) -> Response:
    if "length" in request.query_params:
        return Response("four", headers={"content-length": request.query_params["length"]})
    return Response("four", headers={"x-said": request.query_params["said"]})


async def fails(request: Request) -> Response:
    match request.path_params["how"]:
        case "code":
            raise fail("E_AGENT_NOT_FOUND", "no agent is called \x1b[2J")
        case "kernel":
            raise fail("E_KERNEL_STOPPED", "the kernel was stopped")
        case "status":
            raise refused(415, "only JSON")
        case "late":
            return StreamingResponse(_breaks())
    raise ValueError(f"a bug with a secret: {OPERATE}")


async def _breaks() -> AsyncIterator[bytes]:
    yield b"a"
    raise ValueError("in the middle")


async def named(request: Request) -> Response:
    return PlainTextResponse(request.path_params["name"])


def of_others(error: GoondanError, status: int) -> Response:
    """Errors in another form, as the door of another API has them."""
    return Response(msgspec.json.encode({"error": {"code": error.info.code}}), status, media_type="application/json")


WAYS = [
    Way("/echo", echo, ("POST",), role="talk", max_body=1 << 20),
    Way("/look", echo, role="look"),
    Way("/stream", endless, role="look"),
    Way("/quiet", quiet, role="look"),
    Way("/short", short, role="look"),
    Way("/large", large, role="look"),
    Way("/deaf", deaf, ("POST",), role="look"),
    Way("/wrong", wrong, role="look"),
    Way("/fails/{how}", fails, role="look"),
    Way("/named/{name}", named, role="look"),
    Way("/named/{name}/end", deaf, role="look"),
    Way("/plain", echo, ("POST",)),
]
LOG: list[bytes] = []


@pytest.fixture(scope="module")
def door() -> Iterator[InProcess]:
    with in_process([*WAYS], BOUNDS, forms={"/others/": of_others}, log=LOG.append) as made:
        yield made


def posted(door: InProcess, body: bytes, path: str = "/echo", **more: str) -> bytes:
    return door.asks(door.head(path, "POST", Content_Length=str(len(body)), **more) + body)


def test_a_name_in_a_path_may_have_a_slash_and_no_other_way_is_found_by_it(door: InProcess) -> None:
    answer = door.asks(door.head("/named/a%2Fend%2fb%7E"))
    assert (status(answer), answer.rpartition(b"\r\n")[2]) == (200, b"a/end/b~")
    assert door.asks(door.head("/named/a%2Fb/end")).endswith(b"no matter what")
    assert status(door.asks(door.head("/named/a/b"))) == 404
    assert status(door.asks(door.head("/named/a%00b"))) == 400


class _Counted:
    """A transport that notes what is written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))
        self._transport.write(data)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_that_is_whole_is_written_at_once(door: InProcess, method: str) -> None:
    counted: list[_Counted] = []

    def count() -> None:
        for connection in door.connections:
            counted.append(_Counted(connection.transport))
            connection.transport = counted[-1]

    head = door.head("/large?bytes=5000", method)
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
        stream.sendall(head[:20])
        while not door.connections:
            time.sleep(0.001)
        door.call(count)
        while not counted:
            time.sleep(0.001)
        stream.sendall(head[20:])
        came = b""
        while chunk := stream.recv(1 << 16):
            came += chunk
    if method == "GET":
        assert status(came) == 200
        assert came.endswith(b"\r\n\r\n" + b"x" * 5000)
        assert [one.written for one in counted if one.written] == [[came]]
    else:
        assert status(came) == 405
        assert came.endswith(b"\r\n\r\n"), "an answer to HEAD has no body"


def test_answers_that_nobody_reads_wait_with_their_requests(door: InProcess) -> None:
    LOG.clear()
    each = door.head("/large?bytes=4000000").replace(b"Connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
        stream.sendall(each * 30)
        until = time.monotonic() + 20
        while not LOG or door.connections:  # it is cut off in the end
            assert time.monotonic() < until
            time.sleep(0.01)
    assert 0 < len(LOG) < 10, "else 120 MB would wait"


@pytest.mark.parametrize("query", ["said=a%0d%0aset-cookie:%20b", "said=a%0dset-cookie:%20b", "length=3", "length=5"])
def test_an_answer_that_is_wrong_is_none(door: InProcess, query: str) -> None:
    """A header of two lines, and a length that is not the body's: another request's answer would begin there."""
    both = door.head(f"/wrong?{query}").replace(b"Connection: close\r\n", b"") + door.head("/look")
    answer = door.asks(both)
    assert b"set-cookie" not in answer
    assert b"watcher" not in answer
    assert b"owner" not in answer, "what comes behind it is not answered"


def problem_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head.lower()
    document: dict[str, Any] = json.loads(body)
    assert document["status"] == status(answer)
    assert {"type", "title", "detail", "code"} <= document.keys()
    return document


def test_who_has_the_role_comes_in_and_nobody_else(door: InProcess) -> None:
    assert posted(door, b"abc", token=TALK).endswith(b"phone 3")
    assert status(posted(door, b"abc", token=LOOK)) == 403
    assert status(door.asks(door.head("/look", token=LOOK))) == 200
    assert b"\r\nallow: POST\r\n" in door.asks(door.head("/echo")).lower().replace(b"post", b"POST")
    assert b"\r\nwww-authenticate: Bearer" in door.asks(door.head("/look", token=""))
    assert status(posted(door, b"abc", "/plain", token=TALK)) == 403, "what says no role needs the last"
    assert posted(door, b"abc", "/plain").endswith(b"owner 3")


def test_errors_are_problem_documents_or_in_the_form_of_their_prefix(
    door: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    for path, code, wanted in (
        ("/fails/code", "E_AGENT_NOT_FOUND", 404),
        ("/fails/kernel", "E_KERNEL_STOPPED", 503),
        ("/fails/status", "E_DOOR_REQUEST", 415),
        ("/fails/bug", "E_INTERNAL", 500),
        ("/nothing", "E_DOOR_REQUEST", 404),
        ("/echo", "E_DOOR_REQUEST", 405),
    ):
        answer = door.asks(door.head(path))
        told = problem_of(answer)
        assert (status(answer), told["code"]) == (wanted, code), path
        assert OPERATE.encode() not in answer and b"\x1b" not in answer and b"Traceback" not in answer
    said = caplog.text
    assert "ValueError at test_gate.py:" in said
    assert OPERATE not in said and "Traceback" not in said
    other = door.asks(door.head("/others/x"))
    assert other.endswith(b'{"error":{"code":"E_DOOR_REQUEST"}}')
    assert door.asks(door.head("/others/x", token="")).endswith(b'{"error":{"code":"E_DOOR_REFUSED"}}')
    broken = door.asks(door.head("/fails/late"))
    assert not broken.endswith(b"0\r\n\r\n"), "an answer that is not whole does not look whole"


def test_every_answer_says_that_it_is_nobody_elses(door: InProcess) -> None:
    for path in ("/look", "/nothing"):
        answer = door.asks(door.head(path)).lower()
        assert b"cache-control: no-store" in answer and b"x-content-type-options: nosniff" in answer
        assert b"access-control" not in answer and b"server:" not in answer


def test_a_body_that_is_too_large_is_refused_before_it_is_read(door: InProcess) -> None:
    assert status(posted(door, b"x" * (1 << 20))) == 200
    began = time.monotonic()
    large = door.asks(door.head("/echo", "POST", Content_Length=str(100 << 20), Expect="100-continue"))
    assert status(large) == 413 and b"100 Continue" not in large
    assert problem_of(large)["code"] == "E_DOOR_REQUEST"
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    chunked = door.asks(door.head("/echo", "POST", Transfer_Encoding="chunked") + chunk * 1600)
    assert status(chunked) in (0, 413), "it may be closed while we still write"
    assert status(door.asks(door.head("/look", Content_Length="1"))) == 413, "nothing is read of what has no body"
    assert time.monotonic() - began < 10


def test_a_body_nobody_reads_ends_its_connection(door: InProcess) -> None:
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
        stream.sendall(door.head("/deaf", "POST", Transfer_Encoding="chunked", Connection="keep-alive"))
        assert status(stream.recv(65536)) == 200
        chunks, began = b"1\r\nx\r\n" * (1 << 20), time.monotonic()
        with pytest.raises(OSError):
            stream.sendall(chunks * 8)
        assert time.monotonic() - began < 5, "nor does it take the door's time"


def test_a_stranger_takes_the_door_no_time(door: InProcess) -> None:
    """A quarter of a MiB of chunks of one byte takes h11 0.2 s. Of a stranger's only the first part is read."""
    bomb = door.head("/echo", "POST", token="", Transfer_Encoding="chunked") + b"1\r\nx\r\n" * 42_000
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert status(door.asks(bomb)) in (0, 401)
        took.append(time.monotonic() - began)
    assert min(took) < 0.1
    chunked = door.head("/echo", "POST", Transfer_Encoding="chunked") + b"1\r\nx\r\n" * 8_000 + b"0\r\n\r\n"
    assert door.asks(chunked).endswith(b"owner 8000"), "a caller's is read whole"


def test_half_a_request_holds_a_connection_for_a_moment_only(door: InProcess) -> None:
    heads = (b"", b"P", b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1", door.head("/look", Connection="keep-alive") + b"GET")
    with ExitStack() as stack:
        began = time.monotonic()
        halves = [stack.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=10)) for _ in heads]
        for stream, data in zip(halves, heads, strict=True):
            stream.sendall(data)
        for stream in halves:
            while stream.recv(1 << 16):
                pass
        assert time.monotonic() - began < 8
    with socket.create_connection(("127.0.0.1", door.port), timeout=10) as stream:
        stream.sendall(door.head("/look", Connection="keep-alive"))
        assert status(stream.recv(65536)) == 200
        stream.sendall(b"GET /look HTTP/1.1\r\n")
        assert stream.recv(1) == b"", "nor does half of a second request"
    slow = door.head("/echo", "POST", Content_Length="10") + b"12345"
    assert status(door.asks(slow, patience_s=10)) == 408
    idle = door.asks(door.head("/look", Connection="keep-alive"), patience_s=10)
    assert status(idle) == 200, "and an idle one is closed later"


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(door: InProcess) -> None:
    with socket.create_connection(("127.0.0.1", door.port), timeout=0.02) as stream:
        for byte in door.head("/look") * 10:
            try:
                stream.send(bytes([byte]))
                assert stream.recv(1) == b"", "nothing is answered"
                break
            except TimeoutError:  # it waits for more
                continue
            except OSError:
                break
        else:
            raise AssertionError("it was waited for")


def test_a_stream_that_nobody_reads_is_cut(door: InProcess) -> None:
    SEEN.clear()
    with socket.socket() as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.connect(("127.0.0.1", door.port))
        stream.sendall(door.head("/stream", token=LOOK))
        _until("stream ended")


def test_work_ends_when_its_client_goes(door: InProcess) -> None:
    SEEN.clear()
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
        stream.sendall(door.head("/quiet"))
        time.sleep(0.1)  # it may come in
    _until("cancelled")


def test_work_behind_a_stream_ends_when_its_client_goes(door: InProcess) -> None:
    SEEN.clear()
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
        stream.sendall(door.head("/short", Connection="keep-alive") + door.head("/quiet", Connection="keep-alive"))
        time.sleep(0.2)  # the second may come in
    _until("cancelled")


def test_the_end_of_an_answer_is_cut_too(door: InProcess) -> None:
    """An answer that has gone to the system but for its end, however long that is."""
    with ExitStack() as stack:
        for size in range(90_000, 500_000, 10_000):
            stream = stack.enter_context(socket.socket())
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stream.connect(("127.0.0.1", door.port))
            stream.sendall(door.head(f"/large?bytes={size}"))
        until = time.monotonic() + 10
        while open_ := len(door.connections):
            assert time.monotonic() < until, f"{open_} are open"
            time.sleep(0.05)


def test_head_is_refused_in_words(door: InProcess) -> None:
    assert status(door.asks(door.head("/look", "HEAD"))) == 405


def _until(word: str) -> None:
    until = time.monotonic() + 10
    while word not in SEEN:
        assert time.monotonic() < until, f"not within 10 s: {word}"
        time.sleep(0.01)


def test_thousands_of_connections_leave_memory_and_callers_alone(door: InProcess) -> None:
    """A scaled sample: as many as ten times what a door has room for. This process has descriptors for some of them:
    those that were pushed out long ago are closed here, too.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as stack:
        open_: deque[socket.socket] = deque()
        for number in range(960):
            if len(open_) == 3 * BOUNDS.connections:
                open_.popleft().close()
            stream = stack.enter_context(socket.socket())
            open_.append(stream)
            stream.setblocking(False)
            stream.connect_ex(("127.0.0.1", door.port))
            if number % 97 == 0:
                assert status(door.asks(door.head("/look"))) == 200, "strangers push out strangers only"
        assert status(door.asks(door.head("/look"))) == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


def test_requests_of_one_token_are_bounded(door: InProcess) -> None:
    with ExitStack() as stack:
        for _ in range(BOUNDS.open):
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=20))
            stream.sendall(door.head("/quiet", token=LOOK))
        refused_: bytes = b""
        until = time.monotonic() + 10
        while status(refused_) != 429 and time.monotonic() < until:
            refused_ = door.asks(door.head("/look", token=LOOK))
        assert problem_of(refused_)["code"] == "E_OVERLOADED"
        assert status(door.asks(door.head("/look", token=TALK))) == 200, "others have their own"
    assert status(door.asks(door.head("/look", token=TALK))) == 200


def test_bodies_in_memory_are_bounded(door: InProcess) -> None:
    with ExitStack() as stack:
        answers = []
        for _ in range(6):
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=20))
            stream.sendall(door.head("/echo", "POST", Content_Length=str(1 << 20)) + b"x" * ((1 << 20) - 1))
            answers.append(stream)
        said = {status(stream.recv(65536)) for stream in answers}
    assert said <= {503, 408} and 503 in said


def test_tokens_that_go_take_their_requests_along() -> None:
    with in_process([*WAYS], BOUNDS) as door:
        SEEN.clear()
        with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
            stream.sendall(door.head("/quiet", token=LOOK))
            with socket.create_connection(("127.0.0.1", door.port), timeout=20) as other:
                other.sendall(door.head("/quiet", token=TALK))
                time.sleep(0.1)
                changed = parse(LINES.replace(f"watcher look {LOOK} main\n", ""))
                door.call(lambda: door.gate.replace(changed))
                assert stream.recv(1) == b"", "its connection is closed"
                assert status(door.asks(door.head("/look", token=LOOK))) == 401
                assert status(door.asks(door.head("/look", token=TALK))) == 200
                other.setblocking(False)
                with pytest.raises(BlockingIOError):
                    other.recv(1)


def test_who_asks_on_an_open_connection_while_the_door_ends_is_told() -> None:
    with in_process([*WAYS], BOUNDS) as door:
        with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
            stream.sendall(door.head("/look", Connection="keep-alive"))
            assert status(stream.recv(65536)) == 200
            door.call(door.gate.end)
            stream.sendall(door.head("/look"))
            answer = stream.recv(65536)
        assert (status(answer), problem_of(answer)["code"]) == (503, "E_LINK_CLOSED")


def test_the_end_is_said_to_streams_and_to_nobody_new() -> None:
    with in_process([*WAYS], BOUNDS) as door:
        with socket.create_connection(("127.0.0.1", door.port), timeout=20) as stream:
            stream.sendall(door.head("/stream"))
            stream.recv(1000)
            door.call(door.service.stop)
            door.call(door.gate.end)
            came = b""
            while chunk := stream.recv(1 << 20):
                came = (came + chunk)[-100:]
        assert came.endswith(b"retry: 1000\n\n\r\n"), "it is said, and the answer does not look whole"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", door.port), timeout=5).close()


def test_the_log_has_a_line_for_each_request_and_nothing_that_a_caller_said(door: InProcess) -> None:
    LOG.clear()
    door.asks(door.head("/look?after=private"))
    door.asks(door.head("/private?token=" + OPERATE))
    posted(door, b"private")
    door.asks(door.head("/fails/private", token="private-private-private"))
    lines = [json.loads(line) for line in LOG]
    assert [line["status"] for line in lines] == [200, 400, 200, 401]
    assert [line["way"] for line in lines] == ["/look", None, "/echo", None]
    assert [line["token"] for line in lines] == ["owner", None, "owner", None]
    assert lines[2]["bytesIn"] == 7
    said = b"".join(LOG)
    assert b"private" not in said and OPERATE.encode() not in said


def test_many_requests_in_one_packet_are_answered_one_after_another(door: InProcess) -> None:
    one = door.head("/look", Connection="keep-alive")
    answers = door.asks(one * 50 + door.head("/look"))
    assert answers.count(b"HTTP/1.1 200") == 51
    smuggled = door.asks(
        door.head("/echo", "POST", Content_Length="3", Connection="keep-alive") + b"abc" + door.head("/look", token="")
    )
    assert smuggled.count(b"HTTP/1.1 200") == 1 and smuggled.count(b"HTTP/1.1 401") == 1


@pytest.mark.parametrize(
    "odd",
    [
        b"\r\n" * 60_000,
        b"GET /look HTTP/1.1\r\nX: " + b"a" * 100_000,
        b"1\r\nx\r\n0\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
        b"1\r\nx\r\n0\r\nA: " + b"b" * 100_000,
        b"1;" + b"a" * 100_000,
        (b"1;" + b"a" * 100 + b"\r\nx\r\n") * 2000,
    ],
    ids=["blank lines", "a head", "trailers", "a trailer", "an extension", "extensions"],
)
def test_what_is_no_body_is_bounded(door: InProcess, odd: bytes) -> None:
    before = b"" if odd[:1] in b"\rG" else door.head("/echo", "POST", Transfer_Encoding="chunked")
    assert status(door.asks(before + odd)) == 400


def test_what_comes_behind_a_good_request_does_not_answer_it(door: InProcess) -> None:
    one = door.head("/look", Connection="keep-alive")
    for odd in (b"\0garbage\r\n\r\n", door.head("/echo", "POST", Transfer_Encoding="chunked") + b"zz\r\n"):
        assert status(door.asks(one + odd)) == 200
    assert door.asks(one * 300).count(b"HTTP/1.1 200") < 80
    trailer = b"1\r\nx\r\n0\r\nHost: evil\r\nAuthorization: Bearer x\r\n\r\n"
    assert status(door.asks(door.head("/echo", "POST", Transfer_Encoding="chunked") + trailer)) == 200
