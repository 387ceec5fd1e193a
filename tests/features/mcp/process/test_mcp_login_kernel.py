"""A login to an MCP server through a running kernel: an agent attaches, a person agrees, and no token is anywhere."""

from __future__ import annotations

import os
import secrets
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.features.mcp.process.test_mcp_login import Server
from tests.kernel_fixture import Sandbox, sandbox, shown, wait_until
from tests.process.scripted_model import ScriptedModel, scripted_model

pytestmark = pytest.mark.feature("oauth")

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: scripted}
spec: {provider: openai, model: m, endpoint: "@BASE@", apiKey: {value: k}}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mcp-guarded}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport: {type: http, endpoint: "@SERVER@/mcp"}
    expose: {tools: true}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/scripted}
  extensions: [Extension/mcp-guarded]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main}
"""
APP = "mcp:guarded"


class Secretive(Server):
    """The small server, with tokens that can be looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: list[str] = []

    def give(self) -> dict[str, Any]:
        given = {**super().give(), "access_token": secrets.token_hex(20), "refresh_token": secrets.token_hex(20)}
        self.good, self.refreshes = {given["access_token"]}, {given["refresh_token"]}
        self.secrets += [given["access_token"], given["refresh_token"]]
        return given


@pytest.fixture(scope="module")
def server() -> Iterator[Secretive]:
    server = Secretive()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with scripted_model() as made:
        yield made


@pytest.fixture(scope="module")
def kernel(server: Secretive, model: ScriptedModel) -> Iterator[Sandbox]:
    with sandbox(BUNDLE.replace("@BASE@", model.base).replace("@SERVER@", server.url)) as made:
        made.env["XDG_CONFIG_HOME"] = str(made.home.parent / "config")
        made.detach()
        yield made


def say(kernel: Sandbox, model: ScriptedModel, said: str, *answers: Any) -> ScriptedModel:
    """One turn, with what the model says in it."""
    model.scripts[said] = [*answers, "done"]
    sent = kernel.gdn("send", said, "--json", timeout=60)
    assert sent.json["status"] == "completed", sent.json
    return model


def page_of(kernel: Sandbox) -> str:
    """The page of the one login that a person is asked for."""
    (waiting,) = kernel.gdn("auth", "list", "--json").json["waiting"]
    assert waiting["app"] == APP
    return str(waiting["authorizationUrl"])


def open_as_a_person(page: str) -> str:
    """What the browser shows in the end."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(page, timeout=20) as answer:
        return str(answer.read().decode())


def test_a_login_from_the_first_refusal_to_the_next_life_of_the_kernel(
    kernel: Sandbox, server: Secretive, model: ScriptedModel
) -> None:
    assert "tools" not in say(kernel, model, "before").requests["before"][0]
    assert "E_OAUTH_LOGIN" in kernel.log("agent")
    first = page_of(kernel)
    assert first.startswith(f"{server.url}/authorize?")
    assert first not in kernel.log("agent"), "the page has the state in it"
    assert "gdn auth login" in kernel.log("agent")

    # Who holds tokens dies while the person is asked: the next step asks anew, and the client is not registered twice.
    os.kill(kernel.pid("oauth"), signal.SIGKILL)
    second = ""

    def asked_anew() -> bool:
        nonlocal second
        say(kernel, model, f"after {len(model.requests)}")
        waiting = kernel.gdn("auth", "list", "--json").json["waiting"]
        second = waiting[0]["authorizationUrl"] if waiting else ""
        return second not in ("", first)

    wait_until(asked_anew)
    assert server.paths().count("/register") == 1

    assert "Thank you" in open_as_a_person(second)
    say(kernel, model, "with", [("t1", "guarded__echo", {})])
    assert "guarded__echo" in model.offered("with")
    assert "well" in str(model.results("with")["t1"])
    assert server.grants() == ["authorization_code"]
    (row,) = kernel.gdn("auth", "list", "--json").json["grants"]
    assert (row["app"], row["subject"], row["status"]) == (APP, "local", "ready")

    # It dies again, and nobody notices: the worker has its token.
    os.kill(kernel.pid("oauth"), signal.SIGKILL)
    say(kernel, model, "still", [("t2", "guarded__echo", {})])
    assert "well" in str(model.results("still")["t2"])
    assert_in_no_file_and_no_process(kernel, server)

    assert kernel.gdn("stop").status == 0
    kernel.detach()
    say(kernel, model, "again", [("t3", "guarded__echo", {})])
    assert "guarded__echo" in model.offered("again")
    assert "well" in str(model.results("again")["t3"])
    assert server.grants() == ["authorization_code"]
    assert kernel.gdn("auth", "list", "--json").json["waiting"] == []
    assert_in_no_file_and_no_process(kernel, server)


def assert_in_no_file_and_no_process(kernel: Sandbox, server: Secretive) -> None:
    """The server's tokens, and codes that were exchanged for them, are in no file and no command line."""
    tokens = [token.encode() for token in server.secrets]
    assert len(tokens) == 2
    looked_at = []
    for place in kernel.home.parent.rglob("*"):
        if place.is_file() and not place.is_symlink():
            looked_at.append(place.name)
            assert not any(token in place.read_bytes() for token in tokens), place
    assert any(name.endswith(".grant") for name in looked_at)
    assert any(name.startswith("agent") and name.endswith(".log") for name in looked_at)
    for pid in kernel.processes():
        assert not any(token in shown(pid) for token in tokens), pid
