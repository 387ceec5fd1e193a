"""OAuth tokens through a running kernel: an extension asks, a person agrees, and the token is nowhere else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel_fixture import BUNDLE, PATIENCE_S, Sandbox, sandbox, shown, wait_until
from tests.oidc_fixture import Provider, browse, oidc_provider

APPS = """\
apiVersion: agents.example.io/v1alpha1
kind: OAuthApp
metadata: {name: calendar}
spec: {issuer: "@ISSUER@", clientId: native, scopes: [calendar.read]}
---
apiVersion: agents.example.io/v1alpha1
kind: OAuthApp
metadata: {name: machine}
spec:
  issuer: "@ISSUER@"
  flow: clientCredentials
  clientId: machine
  clientSecret: {valueFrom: {env: MACHINE_SECRET}}
  scopes: [calendar.read]
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: cal}
spec: {entry: ext/cal.py}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: look}
spec:
  entry: tools/look.py
  exports: [{name: around, description: Look., parameters: {type: object}}]
  sandbox: {filesystem: {read: ["@CONFIG@"]}}
---
"""
SECRET = "a secret+with signs"
EXTENSION = '''\
"""Asks for tokens, and tells what came of it, but for the token, which goes into a file that only the test knows."""

import os

FOLDER = os.path.join(os.environ["GOONDAN_STATE_ROOT"], "extensions", "cal")


def register(api):
    heard = []
    api.events.on("auth.granted", heard.append)

    async def ask(ctx, input):
        try:
            answer = await api.oauth.get_access_token(input)
        except Exception as error:
            return {"code": error.code, "message": str(error)}
        token = answer.pop("accessToken", None)
        if token is not None:
            with open(os.path.join(FOLDER, "token"), "w") as out:
                out.write(token)
            api.logger.info("the token is", token)
        return {**answer, "heard": list(heard)}

    async def leak(ctx, input):
        answer = await api.oauth.get_access_token(input)
        raise ValueError("what shall I do with " + answer["accessToken"])

    parameters = {"type": "object"}
    api.tools.register({"name": "cal.ask", "description": "Ask.", "parameters": parameters}, ask)
    api.tools.register({"name": "cal.leak", "description": "Fail.", "parameters": parameters}, leak)
'''


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with oidc_provider() as running:
        yield running


LOOK = '''\
"""Shows what it sees below a folder that it may read."""

import os


def around(ctx, input):
    return sorted(os.path.join(top, name) for top, _, names in os.walk(input["folder"]) for name in names)


handlers = {"around": around}
'''


@pytest.fixture(scope="module")
def kernel(provider: Provider) -> Iterator[Sandbox]:
    text = (APPS + BUNDLE).replace("@ISSUER@", provider.issuer)
    text = text.replace("  tools: [Tool/bash]", "  tools: [Tool/bash, Tool/look]\n  extensions: [Extension/cal]")
    with sandbox(text, {"MACHINE_SECRET": SECRET}) as made:
        config = made.home.parent / "config"
        config.mkdir()
        (config / "other").write_text("anybody's")
        made.env["XDG_CONFIG_HOME"] = str(config)
        made.bundle.write_text(text.replace("@CONFIG@", str(config)))
        for folder, name, code in (("ext", "cal.py", EXTENSION), ("tools", "look.py", LOOK)):
            (made.home / folder).mkdir()
            (made.home / folder / name).write_text(code)
        made.detach()
        yield made


def ask(kernel: Sandbox, **request: Any) -> dict[str, Any]:
    """What the extension's tool says of a request, in a turn of the person who runs the kernel."""
    told = kernel.gdn("send", f"/cal__ask {json.dumps({'oauthAppRef': 'OAuthApp/calendar', **request})}", "--json")
    assert told.status == 0, told.err
    found: dict[str, Any] = json.loads(told.json["response"])
    return found


def token_of(kernel: Sandbox) -> str:
    (file,) = (kernel.home / "state").resolve().glob("**/extensions/cal/token")
    token = file.read_text()
    file.unlink()
    return token


def login(kernel: Sandbox, *more: str) -> tuple[subprocess.Popen[bytes], str]:
    """`gdn auth login` that waits, and the page it shows."""
    process = kernel.popen("auth", "login", "calendar", "--json", *more)
    assert process.stderr is not None
    lines = [process.stderr.readline().decode() for _ in range(3)]
    return process, lines[2].strip()


@pytest.mark.requirement("OAUTH-01", "OAUTH-02", "EVENTS-09")
def test_a_token_from_the_first_question_to_the_end(kernel: Sandbox, provider: Provider) -> None:
    assert [row["role"] for row in kernel.ps() if row["role"] == "oauth"] == []  # nobody has asked yet
    first = ask(kernel)
    assert (first["status"], first["subject"], first["scopes"]) == (
        "authorization_required",
        "local",
        ["calendar.read"],
    )
    process, page = login(kernel)
    assert page == first["authorizationUrl"]
    status, _ = browse(page)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (status, process.returncode) == (200, 0)
    assert json.loads(out) == {"status": "granted", "app": "calendar", "subject": "local", "scopes": ["calendar.read"]}
    second = ask(kernel)
    assert (second["status"], second["tokenType"], second["scopes"]) == ("ready", "Bearer", ["calendar.read"])
    assert second["heard"] == [
        {"type": "auth.granted", "oauthAppRef": "OAuthApp/calendar", "subject": "local", "scopes": ["calendar.read"]}
    ]
    token = token_of(kernel)
    assert provider.introspect(token)
    (row,) = kernel.gdn("auth", "list", "--json").json["grants"]
    assert (row["app"], row["subject"], row["status"], row["refreshable"]) == ("calendar", "local", "ready", True)
    failed = kernel.gdn("send", '/cal__leak {"oauthAppRef": "OAuthApp/calendar"}', "--json")
    assert "what shall I do with ***" in kernel.log("agent") + failed.out
    assert "the token is ***" in kernel.log("agent")
    agents = [row["pid"] for row in kernel.ps() if row["role"] == "agent"]
    for place in (kernel.home / "state").resolve().rglob("*"):
        if place.is_file():
            assert token.encode() not in place.read_bytes(), place
    for pid in kernel.processes():
        assert token.encode() not in shown(pid)
    assert agents
    revoked = kernel.gdn("auth", "revoke", "calendar", "--json")
    assert (revoked.status, revoked.json["server"]) == (0, "revoked")
    assert not provider.introspect(token)
    assert ask(kernel)["status"] == "authorization_required"


def test_the_secret_of_an_app_is_in_no_agent_and_its_token_is_there_after_a_kill(
    kernel: Sandbox, provider: Provider
) -> None:
    told = ask(kernel, oauthAppRef="OAuthApp/machine")
    assert (told["status"], told["subject"]) == ("ready", "app")
    token = token_of(kernel)
    before = kernel.times_ready("oauth")
    os.kill(kernel.pid("oauth"), signal.SIGKILL)
    again = ask(kernel, oauthAppRef="OAuthApp/machine")  # the request waits for the next process
    assert (again["status"], token_of(kernel)) == ("ready", token)
    wait_until(lambda: kernel.times_ready("oauth") > before)
    words = [SECRET, SECRET.replace(" ", "+")]
    for row in kernel.ps():
        if row["role"] in ("agent", "toolhost", "forkserver"):
            assert not any(word.encode() in shown(row["pid"]) for word in words)
    assert not any(word in kernel.log(name) for word in words for name in ("oauth", "agent", "broker", "supervisor"))


def test_no_jail_sees_the_key_also_where_it_may_read_what_is_around_it(kernel: Sandbox) -> None:
    config = kernel.home.parent / "config"

    def seen() -> list[str]:
        called = kernel.gdn("call", "look__around", json.dumps({"folder": str(config)}), "--json").json
        found: list[str] = called["output"]
        return found

    ask(kernel)
    key = config / "goondan" / "keys" / "oauth.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert seen() == [str(config / "other")]


def test_who_waits_for_a_person_can_leave(kernel: Sandbox) -> None:
    process, page = login(kernel)
    assert page.startswith("http")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    waiting = kernel.gdn("auth", "list")
    assert "waits until" in waiting.out
    assert page in waiting.out
