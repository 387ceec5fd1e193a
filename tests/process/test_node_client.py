"""The Node client beside a running kernel: what it promises, and that it loses nothing when the broker dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, has_feature, sandbox
from tests.node_fixture import node, node_client

BUNDLE = documents(
    "Model console {provider: embedded}",
    "Tool echo {entry: ./echo.py, exports: [{name: back, description: Give it back., parameters: {type: object, "
    "properties: {value: {type: object}}}}, {name: fail, description: Fail., parameters: {type: object}}]}",
    "Agent main {modelConfig: {modelRef: Model/console}, tools: [Tool/bash, Tool/echo]}",
    "Agent careful {modelConfig: {modelRef: Model/console}, tools: [Tool/bash], "
    'extensions: [{ref: Extension/approval, config: {rules: [{tools: ["bash__*"], action: ask}]}}]}',
    "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}, {ref: Agent/careful}]}",
)
#: What asks a person about the calls of `careful`.
ASKED = ', extensions: [{ref: Extension/approval, config: {rules: [{tools: ["bash__*"], action: ask}]}}]'
TOOL = """\
def back(ctx, input):
    return input["value"]


def fail(ctx, input):
    raise ValueError("it fails on purpose")


handlers = {"back": back, "fail": fail}
"""


@pytest.fixture(scope="module")
def client() -> Path:
    return node_client()


@pytest.fixture(scope="module")
def kernel(client: Path) -> Iterator[Sandbox]:
    with sandbox(BUNDLE if has_feature("approvals") else BUNDLE.replace(ASKED, "")) as made:
        (made.home / "echo.py").write_text(TOOL)
        made.detach()
        yield made


@pytest.mark.feature("approvals")
def test_what_it_promises(client: Path, kernel: Sandbox) -> None:
    (run_dir,) = kernel.run_dirs
    env = {"GOONDAN_RUN_DIR": str(run_dir), "BLOBS": str(kernel.state_dirs[0] / "blobs")}
    done = node("--test", "--test-reporter=spec", client / "test" / "running.mjs", env=env)
    assert done.returncode == 0, done.stdout[-6000:]


@contextmanager
def certified(client: Path, kernel: Sandbox) -> Iterator[subprocess.Popen[str]]:
    """The adapter for certificates: JSON lines in, JSON lines out."""
    env = {**os.environ, "GOONDAN_RUN_DIR": str(kernel.run_dirs[0])}
    command = ["node", str(client / "certified.mjs")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert hear(program) == {"ready": True}
            yield program
        finally:
            program.kill()


def say(program: subprocess.Popen[str], **line: Any) -> None:
    assert program.stdin is not None
    program.stdin.write(json.dumps(line) + "\n")
    program.stdin.flush()


def hear(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None
    line: dict[str, Any] = json.loads(program.stdout.readline())
    return line


def kill_broker(kernel: Sandbox) -> None:
    """The broker that runs. Of the one before it answers may still be read while there is none."""
    while not (found := [row["pid"] for row in kernel.ps() if row["role"] == "broker" and row["pid"] is not None]):
        time.sleep(0.05)
    os.kill(found[0], signal.SIGKILL)


def test_every_question_is_answered_once_over_deaths_of_the_broker_and_a_kernel_started_anew(
    client: Path, kernel: Sandbox
) -> None:
    with certified(client, kernel) as program:
        for number in range(24):
            text = f'/bash__exec {{"command": "echo {number}"}}'
            say(program, do="ask", ref=str(number), to="main", text=text, instance=f"k{number % 4}", deadlineMs=60000)
        answers: list[dict[str, Any]] = []
        while len(answers) < 24:
            answers.append(hear(program))
            if len(answers) in (2, 9, 16):
                kill_broker(kernel)
        assert {one["ref"]: one["answer"]["response"] for one in answers} == {str(n): str(n) for n in range(24)}
        assert set(Counter(one["ref"] for one in answers).values()) == {1}
        assert kernel.gdn("stop").status == 0
        say(program, do="ask", ref="late", to="main", text="hi", instance="k0", deadlineMs=60000)
        kernel.detach()
        assert hear(program)["answer"]["status"] == "completed"
        say(program, do="close")
        assert program.wait(30) == 0


def test_the_line_protocol_of_certificates(client: Path, kernel: Sandbox) -> None:
    with certified(client, kernel) as program:
        say(program, do="stream", ref="1", to="main", text="hi", instance="z", deadlineMs=60000)
        while "event" in (line := hear(program)):
            assert line["ref"] == "1"
        assert line["answer"]["status"] == "completed"
        say(program, do="call", ref="2", tool="echo__back", args={"value": {"n": 7}}, deadlineMs=60000)
        assert hear(program)["result"]["output"] == {"n": 7}
        say(program, do="send", ref="3", to="main", text="hi", instance="z", deadlineMs=60000)
        assert hear(program) == {"ref": "3", "accepted": True}
        say(program, do="ask", ref="4", to="main", text='/bash__exec {"command": "sleep 30"}', instance="z")
        say(program, do="cancel", ref="4")
        assert hear(program)["error"]["code"] == "E_CANCELLED"
        say(program, do="ask", ref="5", to="nobody", text="hi")
        assert hear(program)["error"]["code"] == "E_AGENT_NOT_FOUND"
