"""`gdn ui` and `gdn run --ui`: the door that runs, or one of its own; codes; a browser, if there is a screen."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.features.serve.process.test_gdn_serve import door
from tests.kernel_fixture import Sandbox, sandbox, wait_until


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    program = tmp_path_factory.mktemp("b") / "browser"
    program.write_text('#!/bin/sh\necho "$1" >>"$0.opened"\n')
    program.chmod(0o755)
    with sandbox(extra_env={"BROWSER": str(program)}) as made:
        yield made


def opened(kernel: Sandbox) -> list[str]:
    """What the browser was told to open."""
    path = Path(kernel.env["BROWSER"] + ".opened")
    return path.read_text().splitlines() if path.exists() else []


def asks(address: str, path: str, token: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=30)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    connection.request("POST", path, json.dumps(body) if body is not None else "", headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def session(url: str) -> tuple[int, Any]:
    """Come in by an address, as the page does."""
    address, _, code = url.removeprefix("http://").partition("/page/#code=")
    return asks(address, "/page/api/session", code)


@contextmanager
def ui(kernel: Sandbox, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    process = kernel.popen("ui", "--port", "0", "--json", *more)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_it_serves_opens_the_browser_and_others_use_its_door(kernel: Sandbox) -> None:
    before = len(opened(kernel))
    with ui(kernel) as (url, process):
        assert url.startswith("http://127.0.0.1:") and "/page/#code=" in url
        wait_until(lambda: opened(kernel)[before:] == [url], what="the browser opens")
        status, told = session(url)
        assert (status, told["role"]) == (200, "look")
        assert session(url)[0] == 401, "a code is for one browser"

        second = kernel.gdn("ui", "--no-browser", "--json")
        assert second.status == 0 and second.json["url"].partition("#")[0] == url.partition("#")[0]
        assert session(second.json["url"])[1]["role"] == "look"
        acts = kernel.gdn("ui", "--act")
        code = acts.out.strip()
        address = url.removeprefix("http://").partition("/")[0]
        assert acts.status == 0 and asks(address, "/page/api/session", code)[1]["role"] == "operate"
        assert opened(kernel)[before:] == [url], "neither has opened one"
        assert asks(address, "/page/api/codes", told["token"], {"kind": "act"})[0] == 403
        (file,) = kernel.home.glob("state/workspaces/*/local-*.token")
        said = [second.out, acts.out, Path(f"/proc/{process.pid}/cmdline").read_text()]
        assert not any(file.read_text().strip() in text for text in said)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert asks_nobody(kernel)


def asks_nobody(kernel: Sandbox) -> bool:
    """Whether there is no door: then nobody can act, and what a killed one has left is no door."""
    (state,) = kernel.home.glob("state/workspaces/*")
    left = state / "local-1.token"
    left.write_text("0" * 64)
    left.chmod(0o600)
    done = kernel.gdn("ui", "--act", "--port", "1")
    left.unlink()
    return done.status == 2 and "no door of this swarm runs" in done.err


def test_without_a_screen_it_prints_the_address_alone(kernel: Sandbox) -> None:
    before = len(opened(kernel))
    browser = kernel.env.pop("BROWSER")
    try:
        with ui(kernel) as (url, _):
            assert session(url)[0] == 200
    finally:
        kernel.env["BROWSER"] = browser
    assert len(opened(kernel)) == before


def test_a_door_with_tokens_of_its_own_takes_one_of_them(kernel: Sandbox) -> None:
    tokens = kernel.home / "tokens"
    tokens.write_text("me operate 0123456789abcdef0123 *\n")
    tokens.chmod(0o600)
    with door(kernel, "--token-file", str(tokens)) as told:
        for more in ((), ("--act",)):
            done = kernel.gdn("ui", "--port", str(told["port"]), *more)
            assert done.status == 2 and f"open http://127.0.0.1:{told['port']}/page/ and paste" in done.err, done


def test_beside_a_kernel_it_lives_and_ends_with_it(kernel: Sandbox) -> None:
    before = len(opened(kernel))
    started = kernel.gdn("run", "--detach", "--ui=0", "--json")
    assert started.status == 0, started.err
    url = started.json["beside"]["ui"]["url"]
    wait_until(lambda: opened(kernel)[before:] == [url], what="the browser opens")
    assert session(url)[0] == 200
    shown = kernel.gdn("ps", "--json")
    assert url.partition("#")[0] in shown.out and "code=" not in shown.out
    again = kernel.gdn("ui", "--no-browser", "--json").json["url"]
    assert again.partition("#")[0] == url.partition("#")[0]
    kernel.gdn("stop")
    wait_until(lambda: not [*kernel.home.glob("state/workspaces/*/local-*.token")], what="the door ends")


def test_beside_a_door_it_is_no_second_one(kernel: Sandbox) -> None:
    started = kernel.gdn("run", "--detach", "--ui=0", "--serve=0", "--json")
    assert started.status == 0, started.err
    said = started.json["beside"]
    assert said["ui"]["url"].startswith(said["serve"]["url"] + "/page/")
    kernel.gdn("stop")
