"""OAuth tokens between a real broker and the real process that holds them, which is killed; the test is everybody else.

The OAuth server is a few lines here: it takes each refresh token once, and can wait with its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest

from goondan.features.oauth.broker import apps_of
from goondan.features.oauth.process.rules import Grant
from goondan.features.oauth.process.vault import Vault, read_or_make
from goondan.features.oauth.wire import OAuthAppSpec, TokenRequest
from goondan.kernel.spawn import memory_file
from goondan.schemas.bundle.launch import ExtensionSpec, KernelPlan
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.control import Revise
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload, Frame
from tests.process.bare_broker import Broker, Raw, bare_broker, plan

READY_S = 10.0


class TokenServer(ThreadingHTTPServer):
    """Gives another refresh token for each, and forgets the old one before it answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.good = {"rt-0"}
        self.asked = 0
        #: What comes next is taken, and answered when this is set.
        self.go = threading.Event()
        self.go.set()
        self.came = threading.Event()
        #: Whether what comes next is read and nothing done about it.
        self.deaf = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/token"


class _Handler(BaseHTTPRequestHandler):
    server: TokenServer

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        server = self.server
        server.asked += 1
        token = form["refresh_token"][0]
        good = token in server.good
        if good and not server.deaf:
            server.good = {f"rt-{server.asked}"}
        server.came.set()
        server.go.wait(READY_S)
        told: dict[str, Any] = {"error": "invalid_grant"}
        if good:
            told = {"access_token": f"at-{server.asked}", "token_type": "Bearer", "expires_in": 3600}
            told["refresh_token"] = f"rt-{server.asked}"
        data = json.dumps(told).encode()
        try:
            self.send_response(200 if good else 400)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # who asked is dead

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


class World:
    """A broker, an OAuth server, and processes that hold tokens."""

    def __init__(self, broker: Broker, server: TokenServer, folder: Path) -> None:
        self.broker = broker
        self.server = server
        self.folder = folder
        self.launch = 0
        self.holder: subprocess.Popen[bytes] | None = None
        self.state = f"{broker.run_dir}/state"
        self.key_file = f"{folder}/keys/oauth.key"
        self.events = 0
        self.client = broker.hello("client", operator=True)
        self.supervisor = broker.hello("control")

    def vault(self) -> Vault:
        return Vault(f"{self.state}/oauth", self.state, read_or_make(self.key_file, self.state))

    def start_holder(self) -> None:
        """As the supervisor does."""
        self.launch += 1
        token = memory_file("token", self.broker.token("control", agent="oauth", launch=self.launch).encode())
        ready_r, ready_w = os.pipe()
        self.holder = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "goondan.features.oauth.process",
                    "--endpoint",
                    self.broker.endpoint("control"),
                ),
                *("--token-fd", str(token), "--ready-fd", str(ready_w)),
                *("--state-dir", self.state, "--key-file", self.key_file),
            ],
            pass_fds=[token, ready_w],
            stderr=subprocess.PIPE,
        )
        os.close(token)
        os.close(ready_w)
        assert os.read(ready_r, 1) == b"\n"
        os.close(ready_r)

    def kill_holder(self) -> str:
        """kill -9; what it had written."""
        assert self.holder is not None
        self.holder.kill()
        _, told = self.holder.communicate()
        self.holder = None
        return told.decode()

    def turn(self, agent: Raw, auth: Any = None) -> Frame:
        """Have the agent `coder` hold an event; the frame."""
        self.events += 1
        event = AgentEvent(id=f"e{self.events}", type="user.message", created_at="2026-01-01T00:00:00Z", input="x")
        frame = Frame(
            "event", id=f"f{self.events}", to="coder", instance_key="k", event_id=event.id, payload=to_raw(event)
        )
        if auth is not None:
            frame.auth = to_raw(auth)
        self.client.send(frame)
        while (held := agent.receive()).type != "event":
            pass
        return held

    def end(self, agent: Raw, event: Frame) -> None:
        answer = AgentEvent(id=f"{event.event_id}.answer", type="agent.response", created_at="2026-01-01T00:00:00Z")
        agent.send(
            Frame("ack", id=f"a{self.events}", stage="done", event_id=event.event_id, epoch=event.epoch,
                  payload=to_raw(answer))
        )  # fmt: skip
        while agent.receive().in_reply_to != f"a{self.events}":
            pass

    def ask(self, agent: Raw, name: str, app: str = "cal", **more: Any) -> None:
        agent.send(Frame("oauth.token", id=name, payload=to_raw(TokenRequest(app, **more))))

    def answer(self, agent: Raw, name: str) -> dict[str, Any]:
        while (frame := agent.receive()).in_reply_to != name:
            pass
        if frame.type == "error":
            raise GoondanError(from_raw(frame.payload, ErrorPayload))
        return from_raw(frame.payload, dict)

    def refused(self, agent: Raw, app: str = "cal", **more: Any) -> str:
        self.ask(agent, "refused", app, **more)
        with pytest.raises(GoondanError) as refused:
            self.answer(agent, "refused")
        return refused.value.code


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    server = TokenServer()
    app = OAuthAppSpec(
        name="cal", client_id="c", scopes=["a"], token_url=server.url, authorization_url="https://login.example/a"
    )
    machine = OAuthAppSpec(
        name="machine", flow="clientCredentials", client_id="c", client_secret="s", token_url="https://x"
    )

    def make(state_dir: str) -> KernelPlan:
        made = plan(state_dir)
        extension = ExtensionSpec(name="e", entry="/e.py", resource={})
        coder = msgspec.structs.replace(made.agents["coder"], extensions=[extension])
        agents = {**made.agents, "coder": coder}
        return msgspec.structs.replace(made, agents=agents, parts={"oauth": to_raw({"cal": app, "machine": machine})})

    folder = tmp_path_factory.mktemp("keys")
    with bare_broker(make) as broker:
        world = World(broker, server, folder)
        try:
            yield world
        finally:
            if world.holder is not None:
                world.kill_holder()
            server.go.set()
            server.shutdown()
            server.server_close()


def expired(**changes: Any) -> Grant:
    return Grant(
        app="cal", subject="ann", client_id="c", scopes=["a"], access_token="at-0", lifetime_s=60.0, obtained_at=1.0,
        refresh_token="rt-0", **changes,
    )  # fmt: skip


@pytest.mark.requirement("OAUTH-01", "OAUTH-02")
def test_a_holder_that_is_killed_in_a_refresh_ends_in_an_answer(world: World) -> None:
    agent = world.broker.hello("agent", agent="coder", instance_key="k")
    event = world.turn(agent, auth={"actor": {"id": "ann"}})
    server = world.server
    # Before it is started: the first order has the supervisor start it.
    world.ask(agent, "first")
    told = world.supervisor.receive()
    while b"program_wanted" not in bytes(told.payload):
        told = world.supervisor.receive()
    os.makedirs(world.folder / "keys", 0o700, exist_ok=True)
    world.vault().save(expired(server=server.url))
    # The server takes the old token and gives another; the holder dies before it hears of that.
    server.go.clear()
    world.start_holder()
    assert server.came.wait(READY_S)
    grant = world.vault().load("cal", "ann")
    assert grant is not None
    assert grant.refreshing_since is not None  # on disk before it was sent
    log = world.kill_holder()
    server.go.set()
    world.start_holder()  # it is given the order again
    answer = world.answer(agent, "first")
    assert answer["status"] == "authorization_required"
    assert "interrupted" in answer["message"]
    assert answer["subject"] == "ann"
    assert server.asked == 2
    grant = world.vault().load("cal", "ann")
    assert grant is not None
    assert (grant.access_token, grant.refresh_token) == ("", None)
    # One whose request came to nothing at the server goes on as if nothing had been.
    server.good, server.deaf = {"rt-0"}, True
    server.came.clear()
    server.go.clear()
    world.vault().save(expired(server=server.url))
    world.ask(agent, "second")
    assert server.came.wait(READY_S)
    log += world.kill_holder()
    server.deaf = False
    server.go.set()
    world.start_holder()
    answer = world.answer(agent, "second")
    assert (answer["status"], answer["accessToken"]) == ("ready", "at-4")
    grant = world.vault().load("cal", "ann")
    assert grant is not None
    assert (grant.refresh_token, grant.refreshing_since) == ("rt-4", None)
    world.end(agent, event)
    log += world.kill_holder()
    for secret in ("rt-0", "at-0", "rt-4", "at-4"):
        assert secret not in log
    agent.close()


def test_another_revision_reaches_the_holder_while_it_runs(world: World) -> None:
    agent = world.broker.hello("agent", agent="coder", instance_key="k")
    world.start_holder()
    event = world.turn(agent)
    assert world.refused(agent, scopes=["b"]) == "E_OAUTH_SCOPE"
    apps = {"cal": msgspec.structs.replace(apps_of(world.broker.plan)["cal"], scopes=["a", "b"])}
    revised = msgspec.structs.replace(world.broker.plan, parts={"oauth": to_raw(apps)}, revision="r2")
    message = Revise(0, 1, msgspec.msgpack.encode(revised))
    world.supervisor.send(Frame("runtime.event", id="v", payload=to_raw(message)))
    while b"revised" not in bytes(world.supervisor.receive().payload):
        pass
    world.ask(agent, "wider", scopes=["b"])
    # The holder is told to say hello again before it is sent anything else.
    assert world.answer(agent, "wider")["scopes"][0] == "b"
    assert world.refused(agent, app="machine") == "E_OAUTH_APP"
    world.end(agent, event)
    world.kill_holder()
    agent.close()
