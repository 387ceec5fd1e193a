"""`gdn acp` with clients of npm that nobody here wrote: acpx, and an editor on the protocol's own SDK.

The packages are installed once. They need Node 22, which the environment of the tests has.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import npm_fixture
from tests.javascript_runtimes import runtime
from tests.kernel_fixture import BUNDLE, PATIENCE_S, Sandbox, sandbox

SOURCES = Path(__file__).parents[3] / "servers" / "acp"
#: How an editor starts an agent.
AGENT = [sys.executable, "-I", "-m", "goondan.kernel.cli", "acp"]
CALL = f"/bash__exec {json.dumps({'command': 'echo from-npm > here; cat here'})}"


@pytest.fixture(scope="module")
def packages() -> Path:
    return npm_fixture.installed(SOURCES)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with sandbox(BUNDLE) as made:
        (made.home / "work").mkdir()
        made.detach()
        yield made


def run(kernel: Sandbox, *words: str | Path, said: str = "") -> str:
    command = [runtime("node"), *map(str, words)]
    env = {**kernel.env, "HOME": str(kernel.home)}
    done = subprocess.run(
        command, input=said, env=env, cwd=kernel.home, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_editor_on_the_sdk_of_npm(packages: Path, kernel: Sandbox) -> None:
    work = str(kernel.home / "work")
    asked = json.dumps({"cwd": work, "prompts": ["hello", CALL]})
    told = json.loads(run(kernel, npm_fixture.beside(packages, SOURCES / "client.mjs"), json.dumps(AGENT), said=asked))
    assert (told["version"], told["status"], told["listed"]) == (1, 0, True)
    assert told["reasons"] == ["end_turn", "end_turn"]
    assert told["permissions"] == [f"Let tools work in {work}?"]
    assert told["live"][0]["content"]["text"].startswith("This is the embedded console")
    shown: list[dict[str, Any]] = [update for update in told["live"] if "toolCallId" in update]
    assert [update["status"] for update in shown] == ["pending", "in_progress", "completed"]
    kinds = [update["sessionUpdate"] for update in told["updates"]]
    assert kinds.count("user_message_chunk") == 2
    assert kinds[-1] == "agent_message_chunk"


def test_acpx(packages: Path, kernel: Sandbox) -> None:
    acpx = packages / "node_modules" / "acpx" / "dist" / "cli.js"
    page = (Path(__file__).resolve().parents[4] / "docs" / "serve.md").read_text(encoding="utf-8")
    (told,) = [line.partition("`npx acpx ")[2].strip("`") for line in page.splitlines() if "`npx acpx " in line]
    told = told.replace("gdn acp", " ".join(AGENT)).replace("./swarm", str(kernel.home))
    *words, _prompt = shlex.split(told)
    ours = ["--cwd", str(kernel.home / "work"), "--format", "json"]
    lines = [json.loads(line) for line in run(kernel, acpx, *ours, *words, CALL).splitlines()]
    results = [line["result"] for line in lines if "result" in line]
    assert results[-1]["stopReason"] == "end_turn"
    updates = [line["params"]["update"] for line in lines if line.get("method") == "session/update"]
    assert updates[-1]["content"]["text"].strip() == "from-npm"
