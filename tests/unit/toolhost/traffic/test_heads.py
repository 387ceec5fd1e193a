"""Requests to the proxy: what is passed on, and what two servers could read differently and is not."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.traffic.protocols import MAX_HEAD, BadRequest, Body, Head, find_end, parse_head, response


def head(*lines: str) -> Head:
    return parse_head("\r\n".join([*lines, "", ""]).encode("latin-1"))


def test_a_request_is_passed_on_in_its_own_form() -> None:
    found = head(
        "GET http://Example.ORG:8080/a?b#c HTTP/1.1",
        "Host: example.org:8080",
        "Connection: keep-alive, X-Private",
        "X-Private: 1",
        "Proxy-Authorization: Basic x",
        "Accept: */*",
    )
    assert (found.method, found.host, found.port, found.length) == ("GET", "example.org", 8080, 0)
    assert found.forward == (b"GET /a?b HTTP/1.1\r\nHost: example.org:8080\r\nAccept: */*\r\nConnection: close\r\n\r\n")


def test_the_usual_port_is_left_out() -> None:
    found = head("POST http://a.example HTTP/1.1", "Content-Length: 3")
    assert found.forward == b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    assert found.length == 3
    assert head("GET http://a.example:80/ HTTP/1.1", "Host: a.example").host == "a.example"
    assert head("GET http://a.example./ HTTP/1.1", "Host: A.example").host == "a.example"
    assert head("GET http://[::1]/ HTTP/1.1", "Host: [::1]").host == "::1"


def test_connect() -> None:
    found = head("CONNECT a.example:443 HTTP/1.1", "Host: a.example:443")
    assert found == Head("CONNECT", "a.example", 443, b"", 0)
    assert head("CONNECT [2001:db8::1]:443 HTTP/1.1").host == "2001:db8::1"
    assert head("CONNECT a.example:443 HTTP/1.1", "Host: a.example").port == 443


@pytest.mark.parametrize(
    "lines",
    [
        ["GET / HTTP/1.1", "Host: a.example"],
        ["GET https://a.example/ HTTP/1.1"],
        ["GET ftp://a.example/ HTTP/1.1"],
        ["GET http:///x HTTP/1.1"],
        ["GET http://u:p@a.example/ HTTP/1.1"],
        ["GET http://a.example@b.example/ HTTP/1.1"],
        ["GET http://a.example\\@b.example/ HTTP/1.1"],
        ["GET http://0x7f.1/ HTTP/1.1"],
        ["GET http://2130706433/ HTTP/1.1"],
        ["GET http://a.example:0/ HTTP/1.1"],
        ["GET http://a.example:99999/ HTTP/1.1"],
        ["GET http://a.example/ HTTP/2"],
        ["GET http://a.example/ x HTTP/1.1"],
        ["GET  http://a.example/ HTTP/1.1"],
        ["GET\thttp://a.example/ HTTP/1.1"],
        ["CONNECT a.example HTTP/1.1"],
        ["CONNECT https://a.example:443 HTTP/1.1"],
        ["CONNECT a.example:443 HTTP/1.1", "Host: b.example:443"],
        ["GET http://a.example/ HTTP/1.1", "Host: b.example"],
        ["GET http://a.example/ HTTP/1.1", "Host: a.example:81"],
        ["GET http://a.example/ HTTP/1.1", "Host: a.example", "Host: a.example"],
        ["GET http://a.example/ HTTP/1.1", "Host: a.example, b.example"],
        ["GET http://a.example/ HTTP/1.1", "Host"],
        ["GET http://a.example/ HTTP/1.1", "Host : a.example"],
        ["GET http://a.example/ HTTP/1.1", "X: 1", " folded"],
        ["GET http://a.example/ HTTP/1.1", "X: a\nHost: b.example"],
        ["GET http://a.example/ HTTP/1.1", "X: a\rHost: b.example"],
        ["GET http://a.example/ HTTP/1.1", "X: \0"],
        ["POST http://a.example/ HTTP/1.1", "Content-Length: 1", "Content-Length: 2"],
        ["POST http://a.example/ HTTP/1.1", "Content-Length: 1", "Transfer-Encoding: chunked"],
        ["POST http://a.example/ HTTP/1.1", "Transfer-Encoding: gzip, chunked"],
        ["POST http://a.example/ HTTP/1.1", "Transfer-Encoding: chunked", "transfer-encoding: identity"],
        ["POST http://a.example/ HTTP/1.1", "Content-Length: +1"],
        ["POST http://a.example/ HTTP/1.1", "Content-Length: 1e3"],
        ["POST http://a.example/ HTTP/1.1", "Content-Length:"],
    ],
)  # fmt: skip
def test_what_is_not_passed_on(lines: list[str]) -> None:
    with pytest.raises(BadRequest):
        head(*lines)


def test_a_head_has_a_longest_length() -> None:
    assert find_end(b"GET / HTTP/1.1\r\n") == -1
    assert find_end(b"a\r\n\r\nrest") == 5
    with pytest.raises(BadRequest):
        find_end(b"a" * (MAX_HEAD + 1))


def test_a_body_of_known_length_ends_there() -> None:
    body = Body(5)
    assert body.feed(b"abc") == b"abc"
    assert not body.done
    assert body.feed(b"deGET http://b.example/") == b"de"
    assert body.done
    assert Body(0).done


def test_a_chunked_body_ends_after_its_trailers() -> None:
    data = b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: 1\r\n\r\n"
    for step in range(1, len(data) + 1):
        body = Body(None)
        out = b"".join(body.feed((data + b"GET /")[at : at + step]) for at in range(0, len(data) + 5, step))
        assert out == data
        assert body.done


@pytest.mark.parametrize(
    "data", [b"x\r\n", b"\r\n", b"3\nabc\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"1" * 2000, b"0x3\r\n"]
)
def test_a_chunked_body_that_could_end_elsewhere_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        Body(None).feed(data)


@given(st.binary(max_size=200), st.lists(st.integers(1, 9), max_size=40))
def test_any_bytes_pass_through_in_order_or_are_refused(data: bytes, sizes: list[int]) -> None:
    body, passed, at = Body(None), b"", 0
    with suppress(BadRequest):
        for size in [*sizes, len(data)]:
            passed += body.feed(data[at : at + size])
            at += size
    assert data.startswith(passed)


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: f"GET http://{text}/ HTTP/1.1".encode()))
def test_any_head_is_judged(data: bytes) -> None:
    with suppress(BadRequest):
        found = parse_head(data + b"\r\n\r\n")
        assert b"\r\n\r\n" in found.forward or found.method == "CONNECT"
        assert found.forward.count(b"\r\n\r\n") <= 1


def test_only_a_refusal_is_marked_as_one() -> None:
    assert b"X-Goondan-Error: E_SANDBOX_DENIED" in response(403, "Forbidden", "x")
    assert b"X-Goondan-Error" not in response(502, "Bad Gateway", "x")
    assert b"\r\nProxy-Status: goondan; error=http_request_denied\r\n" in response(403, "Forbidden", "x")
    assert b"\r\nProxy-Status: goondan; error=destination_unavailable\r\n" in response(502, "Bad Gateway", "x")
