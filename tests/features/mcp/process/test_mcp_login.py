"""Logging in to an MCP server: the SDK's OAuth client against a small server that is both resource and authority.

The test stands where the process that holds tokens stands, and is the browser. That process itself is in
test_oauth_servers.py.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest

from goondan.features.mcp.jail.login import Login
from goondan.features.mcp.jail.protocol.results import Failure
from goondan.features.mcp.wire import ServerLogin
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.logins import ServerOp, ServerReply
from goondan.schemas.worker.worker_frames import LoadFailed
from tests.features.mcp.process.mcp_worker_host import hosted, pass_time, tunnels

BROWSER = "http://127.0.0.1:9/callback"


class Server(ThreadingHTTPServer):
    """A resource that wants a token, and the authority that gives tokens for it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.clients: list[dict[str, Any]] = []
        self.good: set[str] = set()
        self.refreshes: set[str] = set()
        self.given = 0
        self.lifetime = 3600
        self.issuer: str | None = None
        self.iss: str | None = None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def grants(self) -> list[str]:
        return [form["grant_type"] for path, form in self.requests if path == "/as/token"]

    def give(self) -> dict[str, Any]:
        self.given += 1
        self.good = {f"at-{self.given}"}
        self.refreshes = {f"rt-{self.given}"}
        return {
            "access_token": f"at-{self.given}",
            "refresh_token": f"rt-{self.given}",
            "token_type": "Bearer",
            "expires_in": self.lifetime,
        }


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, parts = self.server, urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        server.requests.append((parts.path, asked))
        if parts.path.startswith("/.well-known/oauth-protected-resource"):
            self._say(200, {"resource": f"{server.url}/mcp", "authorization_servers": [server.url]})
        elif parts.path == "/.well-known/oauth-authorization-server":
            self._say(
                200,
                {
                    "issuer": server.issuer or server.url,
                    "authorization_endpoint": f"{server.url}/authorize",
                    "token_endpoint": f"{server.url}/as/token",
                    "registration_endpoint": f"{server.url}/register",
                    "response_types_supported": ["code"],
                    "code_challenge_methods_supported": ["S256"],
                    "authorization_response_iss_parameter_supported": server.iss is not None,
                },
            )
        elif parts.path == "/authorize":
            told = {"code": "code-1", "state": asked["state"]} | ({"iss": server.iss} if server.iss else {})
            self.send_response(302)
            self.send_header("Location", f"{asked['redirect_uri']}?{urlencode(told)}")
            self.end_headers()
        else:
            self._say(404, {})

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/mcp":
            server.requests.append((self.path, {}))
            good = self.headers.get("Authorization", "").removeprefix("Bearer ") in server.good
            message = json.loads(body)
            if good and "method" in message and "id" not in message:
                self._say(202, {})
            elif good and "method" in message:
                self._say(200, {"jsonrpc": "2.0", "id": message["id"], **_answer(message)})
            else:
                self._say(200 if good else 401, {"ok": good})
        elif self.path == "/register":
            server.requests.append((self.path, {}))
            server.clients.append(json.loads(body))
            self._say(201, {**json.loads(body), "client_id": f"c-{len(server.clients)}"})
        else:
            form = {name: values[0] for name, values in parse_qs(body).items()}
            server.requests.append((self.path, form))
            known = form.get("refresh_token") in server.refreshes or form["grant_type"] != "refresh_token"
            self._say(200 if known else 400, server.give() if known else {"error": "invalid_grant"})

    def _say(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    """What the resource says as an MCP server."""
    info = {"name": "guarded", "version": "1"}
    match message["method"]:
        case "initialize":
            return {"result": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}}
        case "tools/list":
            return {"result": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}}
        case "tools/call":
            return {"result": {"content": [{"type": "text", "text": "well"}]}}
    return {"error": {"code": -32601, "message": "Method not found"}}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


class Keeper:
    """Keeps the document, and opens every page at once as a person would who agrees."""

    def __init__(self) -> None:
        self.document: str | None = None
        self.ops: list[str] = []
        self.brought: dict[str, str] = {}
        #: Whether the address of the browser is open: it is closed when a redirect has come.
        self.listens = False

    async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply:
        self.ops.append(op)
        if op == "save":
            self.document = document
        elif op == "redirect":
            self.listens = True
            return ServerReply(redirect_uri=url or BROWSER)
        elif op == "authorize":
            assert url is not None
            assert self.listens
            self.listens = False
            self.brought = await asyncio.to_thread(_browse, url)
            return ServerReply(message=f"open {url}", expires_at="2026-01-01T00:00:00Z")
        elif op == "wait":
            return ServerReply(code=self.brought["code"], state=self.brought["state"], issuer=self.brought.get("iss"))
        return ServerReply(document=self.document if op == "load" else None)


class Clock:
    """Counts how often the time to connect stood still."""

    def __init__(self) -> None:
        self.held = self.went_on = 0

    def hold(self, message: str) -> None:
        self.held += 1

    def go_on(self) -> None:
        self.went_on += 1


def _browse(url: str) -> dict[str, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        opener.open(url, timeout=10)
    except urllib.error.HTTPError as answer:
        with answer:
            return {name: values[0] for name, values in parse_qs(urlsplit(answer.headers["Location"]).query).items()}
    raise AssertionError("the page did not lead back")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


async def _call(server: Server, keeper: Keeper, times: int = 1, **config: Any) -> list[int]:
    clock = Clock()
    login = Login(f"{server.url}/mcp", ServerLogin(**config), keeper, clock)
    async with httpx2.AsyncClient(auth=login, trust_env=False) as client:
        statuses = [(await client.post(f"{server.url}/mcp", json={"n": n})).status_code for n in range(times)]
    assert clock.held == clock.went_on
    return statuses


def call(server: Server, keeper: Keeper, times: int = 1, **config: Any) -> list[int]:
    return asyncio.run(_call(server, keeper, times, **config))


def test_who_is_not_refused_asks_nobody(server: Server) -> None:
    server.good.add("")
    keeper = Keeper()
    assert call(server, keeper) == [200]
    assert keeper.ops == []


def test_a_refused_request_leads_to_a_login_and_is_sent_again(server: Server) -> None:
    keeper = Keeper()
    assert call(server, keeper, times=3) == [200, 200, 200]
    assert (keeper.ops.count("authorize"), server.grants()) == (1, ["authorization_code"])
    assert server.clients[0]["redirect_uris"] == [BROWSER]
    assert "rt-1" in (keeper.document or "")


def test_the_next_worker_begins_with_what_was_kept(server: Server) -> None:
    keeper = Keeper()
    call(server, keeper)
    keeper.ops.clear()
    assert call(server, keeper, times=2) == [200, 200]
    assert "authorize" not in keeper.ops
    assert (len(server.clients), server.grants()) == (1, ["authorization_code"])


def test_a_token_that_has_expired_is_replaced_without_a_person(server: Server) -> None:
    server.lifetime = 10  # less than what is spared, so it counts as over
    keeper = Keeper()
    call(server, keeper)
    server.good.clear()
    keeper.ops.clear()
    before = len(server.requests)
    assert call(server, keeper) == [200]
    assert "authorize" not in keeper.ops
    assert server.grants() == ["authorization_code", "refresh_token"]
    assert "/.well-known/oauth-authorization-server" not in server.paths()[before:], "it is known where to ask"
    assert "rt-2" in (keeper.document or "")


def test_a_refresh_token_that_is_not_taken_leads_to_a_person(server: Server) -> None:
    server.lifetime = 10
    keeper = Keeper()
    call(server, keeper)
    server.good.clear()
    server.refreshes.clear()
    assert call(server, keeper) == [200]
    assert server.grants() == ["authorization_code", "refresh_token", "authorization_code"]


def test_a_worker_logs_in_for_a_second_time(server: Server) -> None:
    keeper = Keeper()

    async def twice() -> list[int]:
        login = Login(f"{server.url}/mcp", ServerLogin(), keeper, Clock())
        async with httpx2.AsyncClient(auth=login, trust_env=False) as client:
            first = await client.post(f"{server.url}/mcp", json={})
            server.good.clear()
            server.refreshes.clear()
            return [first.status_code, (await client.post(f"{server.url}/mcp", json={})).status_code]

    assert asyncio.run(twice()) == [200, 200]
    assert keeper.ops.count("authorize") == 2
    assert len(server.clients) == 1, "at the same address"


def test_a_client_that_was_registered_before(server: Server) -> None:
    keeper = Keeper()
    assert call(server, keeper, client_id="mine", client_secret="a secret", issuer=server.url) == [200]
    assert server.clients == []
    assert "a secret" not in (keeper.document or "")


def test_tokens_of_the_client_itself(server: Server) -> None:
    keeper = Keeper()
    assert call(
        server, keeper, flow="clientCredentials", client_id="mine", client_secret="a secret", issuer=server.url
    ) == [200]
    assert (server.grants(), "authorize" in keeper.ops) == (["client_credentials"], False)


def test_another_address_needs_another_registration(server: Server) -> None:
    keeper = Keeper()
    call(server, keeper)
    keeper.document = (keeper.document or "").replace(BROWSER, "http://127.0.0.1:10/callback")
    server.good.clear()

    class Taken(Keeper):
        async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply:
            return await super().ask(op, document=document, url=None if op == "redirect" else url)

    taken = Taken()
    taken.document = keeper.document
    assert call(server, taken) == [200]
    assert [client["redirect_uris"] for client in server.clients] == [[BROWSER], [BROWSER]]


@pytest.mark.parametrize(
    "document", ["", "[]", "{", '{"tokens": {"access_token": 3}}', '{"client": {"x": []}}', "null"]
)
def test_a_document_that_cannot_be_read_is_as_good_as_none(server: Server, document: str) -> None:
    keeper = Keeper()
    keeper.document = document
    assert call(server, keeper) == [200]


def test_an_answer_of_another_issuer_is_refused(server: Server) -> None:
    server.iss = "https://evil.example"
    with pytest.raises(Failure) as failure:
        call(server, Keeper())
    assert failure.value.code == "E_OAUTH_SERVER"
    assert server.grants() == [], "the code went nowhere"


def test_metadata_that_names_another_issuer_is_refused(server: Server) -> None:
    server.issuer = "https://evil.example"
    keeper = Keeper()
    with pytest.raises(Failure) as failure:
        call(server, keeper)
    assert failure.value.code == "E_OAUTH_SERVER"
    assert "authorize" not in keeper.ops


# --- the whole worker


async def _over_the_worker(server: Server, keeper: Any, **init: Any) -> Any:
    async with tunnels() as (connector, asked):
        async with hosted(connector=connector, keeper=keeper, endpoint=f"{server.url}/mcp", **init) as host:
            begun = await asyncio.wait_for(asyncio.shield(host.begun), 20)
            if isinstance(begun, LoadFailed):
                return begun.message
            value = await host.call("echo")
    assert set(asked) == {server.url.removeprefix("http://")}, "nothing goes past the connector"
    return value


def test_a_worker_logs_in_while_it_connects_and_the_next_one_need_not(server: Server) -> None:
    keeper = Keeper()
    assert "well" in str(asyncio.run(_over_the_worker(server, keeper)))
    assert keeper.ops.count("authorize") == 1
    assert "well" in str(asyncio.run(_over_the_worker(server, keeper)))
    assert keeper.ops.count("authorize") == 1


def test_connecting_waits_for_a_person_longer_than_for_a_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goondan.schemas.worker.servers.CONNECT_S", 8)

    class Slow(Keeper):
        async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply:
            if op == "wait":
                pass_time(monkeypatch, 10)
                await asyncio.sleep(0.01)  # what is due is done
            return await super().ask(op, document=document, url=url)

    assert "well" in str(asyncio.run(_over_the_worker(server, Slow())))


def test_a_login_that_comes_to_nothing_says_why(server: Server) -> None:
    class Refused(Keeper):
        async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply:
            if op == "wait":
                raise fail("E_OAUTH_REFUSED", "the server refuses mcp:tracker: access_denied")
            return await super().ask(op, document=document, url=url)

    assert "access_denied" in asyncio.run(_over_the_worker(server, Refused()))


def test_no_login_is_tried_with_a_token_of_the_config_or_when_it_is_turned_off(server: Server) -> None:
    for init in ({"headers": {"authorization": "Bearer stale"}}, {"login": {"enabled": False}}):
        keeper = Keeper()
        assert "401" in asyncio.run(_over_the_worker(server, keeper, **init))
        assert keeper.ops == []
