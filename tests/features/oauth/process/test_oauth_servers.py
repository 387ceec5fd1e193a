"""Tokens of MCP servers over HTTP: a real broker and the real holder of tokens; the test is tool host and browser."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from goondan.schemas.bundle.launch import KernelPlan, ServerSpec, ToolSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload, Frame
from goondan.schemas.worker.logins import MAX_DOCUMENT, ServerReply, ServerWish
from tests.features.oauth.process.test_oauth_broker import TokenServer, World
from tests.process.bare_broker import Raw, bare_broker, plan

ENDPOINT = "https://tracker.example/mcp"
STATE = "a-state-that-nobody-guesses"


class Host:
    """A tool host, as far as it asks for its MCP workers."""

    def __init__(self, world: World, raw: Raw) -> None:
        self.world = world
        self.raw = raw
        self.count = 0

    def send(self, op: Any, server: str = "tracker", **more: Any) -> str:
        self.count += 1
        self.raw.send(
            Frame("oauth.server", id=f"s{self.count}", payload=to_raw(ServerWish(op=op, server=server, **more)))
        )
        return f"s{self.count}"

    def answer(self, name: str) -> ServerReply:
        while (frame := self.raw.receive()).in_reply_to != name:
            pass
        if frame.type == "error":
            raise GoondanError(from_raw(frame.payload, ErrorPayload))
        return from_raw(frame.payload, ServerReply)

    def ask(self, op: Any, server: str = "tracker", **more: Any) -> ServerReply:
        return self.answer(self.send(op, server, **more))

    def refused(self, op: Any, server: str = "tracker", **more: Any) -> str:
        with pytest.raises(GoondanError) as refused:
            self.ask(op, server, **more)
        return refused.value.code

    def asks_a_person(self, **more: Any) -> tuple[str, str]:
        """The address that the browser comes back to, and what the person is told."""
        address = self.ask("redirect", **more).redirect_uri or ""
        told = self.ask("authorize", url=page(address), **more)
        assert told.expires_at is not None
        return address, told.message or ""


def page(address: str, state: str = STATE) -> str:
    return f"https://login.example/authorize?client_id=c&redirect_uri={quote(address, safe='')}&state={state}"


def browse(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    def server(transport: Any, endpoint: str | None) -> ServerSpec:
        return ServerSpec(extension="mcp-tracker", transport=transport, endpoint=endpoint, command=["x"])

    def make(state_dir: str) -> KernelPlan:
        made = plan(state_dir)
        tools = [
            ToolSpec(
                name="tracker",
                entry="",
                root="",
                exports=[],
                server=server("http", ENDPOINT),
                servers={"other": server("http", "https://elsewhere.example/mcp")},
            ),
            ToolSpec(name="local", entry="", root="", exports=[], server=server("stdio", None)),
        ]
        return msgspec.structs.replace(made, toolhost=msgspec.structs.replace(made.toolhost, tools=tools))

    tokens = TokenServer()
    with bare_broker(make) as broker:
        world = World(broker, tokens, tmp_path_factory.mktemp("keys"))
        world.start_holder()
        try:
            yield Host(world, broker.hello("toolhost"))
        finally:
            if world.holder is not None:
                world.kill_holder()
            tokens.shutdown()
            tokens.server_close()


def test_what_a_worker_saves_is_there_in_its_next_life_and_in_no_file_as_it_is(host: Host) -> None:
    host.ask("save", document='{"refresh": "rt-secret"}')
    host.world.kill_holder()
    host.world.start_holder()
    assert host.ask("load").document == '{"refresh": "rt-secret"}'
    files = [path for path in Path(host.world.state).rglob("*") if path.is_file()]
    assert any(path.suffix == ".grant" for path in files)
    assert not any(b"rt-secret" in path.read_bytes() for path in files)
    told = host.world.client
    told.send(Frame("admin", id="list", payload=to_raw({"op": "auth.list"})))
    (row,) = host.world.answer(told, "list")["grants"]
    assert (row["app"], row["subject"], row["status"]) == ("mcp:tracker", "local", "ready")
    assert "rt-secret" not in str(row)
    host.ask("save", document=None)
    assert host.ask("load").document is None


def test_what_was_saved_for_one_endpoint_is_not_given_for_another(host: Host) -> None:
    host.ask("save", document="for the first")
    assert host.ask("load", agent="other").document is None
    assert host.ask("load", agent="coder").document == "for the first"


def test_a_person_logs_in_and_the_worker_gets_what_the_browser_brought(host: Host) -> None:
    address, told = host.asks_a_person()
    assert "log in at https://login.example:443: `gdn auth login mcp:tracker` shows" in told
    assert STATE not in told, "it goes to an agent and its log"
    client = host.world.client
    client.send(Frame("admin", id="who", payload=to_raw({"op": "auth.list"})))
    (waiting,) = host.world.answer(client, "who")["waiting"]
    assert (waiting["app"], waiting["authorizationUrl"]) == ("mcp:tracker", page(address))
    client.send(Frame("admin", id="in", payload=to_raw({"op": "auth.login", "app": "mcp:tracker"})))
    assert host.world.answer(client, "in")["authorizationUrl"] == page(address)
    client.send(Frame("admin", id="until", payload=to_raw({"op": "auth.wait", "app": "mcp:tracker"})))
    client.send(Frame("admin", id="then", payload=to_raw({"op": "auth.list"})))
    host.world.answer(client, "then")  # by now that question is known: the browser cannot come before it
    waits = host.send("wait")

    assert browse(f"{address}?code=c-1&state=another-state-than-the-one")[0] == 400
    status, text = browse(f"{address}?code=c-1&state={STATE}&iss=https%3A%2F%2Flogin.example")
    assert (status, "Thank you" in text, "c-1" in text) == (200, True, False)
    reply = host.answer(waits)
    assert (reply.code, reply.state, reply.issuer) == ("c-1", STATE, "https://login.example")
    assert host.world.answer(client, "until")["status"] == "granted"
    assert browse(f"{address}?code=c-2&state={STATE}")[0] == 400, "a state counts once"
    assert host.refused("wait") == "E_OAUTH_UNAVAILABLE", "and so does a code"


def test_a_redirect_counts_once_also_before_the_worker_has_taken_it(host: Host) -> None:
    address, _ = host.asks_a_person()
    assert browse(f"{address}?code=c-1&state={STATE}")[0] == 200
    assert browse(f"{address}?code=c-2&state={STATE}")[0] == 400
    assert host.ask("wait").code == "c-1"


def test_a_person_says_no(host: Host) -> None:
    address, _ = host.asks_a_person()
    waits = host.send("wait")
    assert browse(f"{address}?error=access_denied&error_description=%3Cb%3E&state={STATE}")[0] == 400
    with pytest.raises(GoondanError) as refused:
        host.answer(waits)
    assert refused.value.code == "E_OAUTH_REFUSED"
    assert "access_denied" in refused.value.info.message


def test_the_address_that_a_client_was_registered_with_is_taken_again(host: Host) -> None:
    first = host.ask("redirect", agent="other").redirect_uri
    assert host.ask("redirect", agent="other", url=first).redirect_uri == first
    elsewhere = "http://192.0.2.1:80/callback"
    assert host.ask("redirect", agent="other", url=elsewhere).redirect_uri != elsewhere


@pytest.mark.parametrize(
    "bad",
    [
        "javascript:alert(1)//?state=@STATE@&redirect_uri=@ADDRESS@",
        "file:///etc/passwd?state=@STATE@&redirect_uri=@ADDRESS@",
        "http://login.example/?state=@STATE@&redirect_uri=@ADDRESS@",
        "https://login.example/?redirect_uri=@ADDRESS@",
        "https://login.example/?state=short&redirect_uri=@ADDRESS@",
        "https://login.example/?state=@STATE@&state=@STATE@&redirect_uri=@ADDRESS@",
        "https://login.example/?state=@STATE@&redirect_uri=https%3A%2F%2Fevil.example%2Fcallback",
        "https://login.example/?state=@STATE@",
        "https://login.example/?state=@STATE@&redirect_uri=@ADDRESS@&x=" + "x" * 5000,
        "https://login.example/\x1b[2J?state=@STATE@&redirect_uri=@ADDRESS@",
    ],
)
def test_a_page_that_no_person_may_be_sent_to(host: Host, bad: str) -> None:
    address = host.ask("redirect").redirect_uri or ""
    url = bad.replace("@STATE@", STATE).replace("@ADDRESS@", quote(address, safe=""))
    assert host.refused("authorize", url=url) == "E_OAUTH_SERVER"


def test_only_servers_of_the_bundle_that_are_reached_over_http(host: Host) -> None:
    assert host.refused("load", server="nobody") == "E_OAUTH_APP"
    assert host.refused("load", server="local") == "E_OAUTH_APP"
    assert host.refused("save", document="x" * (MAX_DOCUMENT + 1)) == "E_OAUTH_SERVER"
    assert host.refused("save", document="x" * (3 * MAX_DOCUMENT)) == "E_FRAME_TOO_LARGE"
    agent = host.world.broker.hello("agent", agent="coder", instance_key="k")
    agent.send(Frame("oauth.server", id="a1", payload=to_raw(ServerWish(op="load", server="tracker"))))
    while (frame := agent.receive()).in_reply_to != "a1":
        pass
    assert frame.type == "error"


def test_what_was_revoked_is_gone(host: Host) -> None:
    host.ask("save", document="tokens")
    client = host.world.client
    client.send(Frame("admin", id="revoke", payload=to_raw({"op": "auth.revoke", "app": "mcp:tracker"})))
    assert host.world.answer(client, "revoke")["revoked"] is True
    assert host.ask("load").document is None
