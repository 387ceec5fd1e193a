"""Requests to OAuth servers that mean no good: slow, endless, elsewhere. Real sockets on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from goondan.features.oauth.process.authority import Authority
from goondan.features.oauth.process.http import MAX_BODY, Http, Redirects
from goondan.features.oauth.process.rules import Grant
from goondan.features.oauth.process.vault import Vault
from goondan.features.oauth.wire import OAuthAppSpec, TokenOrder
from goondan.schemas.wire.errors import GoondanError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """A server that answers each connection like this; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/token"
    finally:
        listener.close()


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    made = Http(limit_s=20.0)
    yield made
    await made.close()


async def refused(http: Http, url: str) -> str:
    with pytest.raises(GoondanError) as told:
        await http.post(url, {"refresh_token": "s3cret-s3cret"}, {})
    assert told.value.code == "E_OAUTH_SERVER"
    assert "s3cret" not in str(told.value)
    return told.value.info.message


async def test_no_redirect_is_followed(http: Http) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 307 Elsewhere\r\nLocation: /token\r\nContent-Length: 0\r\n\r\n")

    async with server(answer) as url:
        assert "redirect" in await refused(http, url)
    assert asked == 1


async def test_an_answer_without_an_end_is_cut_off(http: Http) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        for _ in range(2 * MAX_BODY // 65536):
            writer.write(b"x" * 65536)
            await writer.drain()

    async with server(endless) as url:
        assert "more than" in await refused(http, url)


async def test_one_byte_after_the_other_does_not_prolong_the_limit() -> None:
    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    http = Http(limit_s=0.5)
    async with server(drips) as url:
        assert "no answer within 0.5 s" in await refused(http, url)
    await http.close()


async def test_a_packed_answer_is_not_unpacked(http: Http) -> None:
    import gzip

    bomb = gzip.compress(b"0" * 50_000_000)

    async def packed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)

    async with server(packed) as url:
        answer = await http.get(url)
    assert len(answer.body) == len(bomb)


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.1/token", "http://localhost.evil.example/token", "ftp://127.0.0.1/token", "https://a@b/token",
        "http://127.1/token", "//127.0.0.1/token", "http://0.0.0.0/token",
    ],
)  # fmt: skip
async def test_secrets_go_nowhere_in_the_open(http: Http, url: str) -> None:
    assert "https" in await refused(http, url)


async def test_what_goes_to_this_machine_passes_by_the_proxy(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def fine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with server(fine) as url:
        assert await http.get(url) == (200, b"{}")


async def test_the_listener_bears_with_anybody() -> None:
    seen: list[dict[str, str]] = []

    async def arrived(parameters: dict[str, str]) -> tuple[bool, str]:
        seen.append(parameters)
        return True, "fine"

    redirects = Redirects(arrived)
    uri = await redirects.open(None)
    assert uri == await redirects.open(None)
    port = int(uri.rpartition(":")[2].partition("/")[0])

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        told = await reader.read()
        writer.close()
        return told

    assert (await send(b"\x16\x03\x01\0")).startswith(b"HTTP/1.1 400")
    assert (await send(b"GET /callback?" + b"x" * 20_000)).startswith(b"HTTP/1.1 400")
    assert (await send(b"GET /callback?state=s HTTP/1.1\r\nHost: evil.example\r\n\r\n")).startswith(b"HTTP/1.1 404")
    assert seen == []
    good = await send(f"GET /callback?state=<b> HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    assert good.startswith(b"HTTP/1.1 200")
    assert b"<b>" not in good
    assert b"default-src 'none'" in good
    assert seen == [{"state": "<b>"}]
    with pytest.raises(GoondanError) as taken:
        await redirects.open(f"http://127.0.0.1:{port}/other")
    assert taken.value.code == "E_OAUTH_APP"
    redirects.close_all()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_server_that_is_away_takes_no_token_that_is_still_good(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    now = 1_000_000.0
    held = Vault(f"{tmp_path}/state/oauth", f"{tmp_path}/state", b"k" * 32)
    url = "http://127.0.0.1:9/token"
    held.save(
        Grant(app="cal", subject="ann", server=url, client_id="c", access_token="at", refresh_token="rt",
              obtained_at=now, lifetime_s=600.0)
    )  # fmt: skip
    authority = Authority(lambda: held, lambda news: None, clock=lambda: now)
    authority.serve({"cal": OAuthAppSpec(name="cal", client_id="c", token_url=url, authorization_url=url)})
    order = TokenOrder("cal", "ann", "main", "k")
    now += 570
    assert (await authority.carry_out(order)).access_token == "at"
    grant = held.load("cal", "ann")
    assert grant is not None
    assert grant.refresh_token == "rt"
    now += 27
    with pytest.raises(GoondanError) as refused:
        await authority.carry_out(order)
    assert refused.value.code == "E_OAUTH_SERVER"
    await authority.close()
