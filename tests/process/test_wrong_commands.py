"""What is said to a person of a wrong command: the place, the cause, and a next step that works when it is taken."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kernel_fixture import BUNDLE, Result, Sandbox, sandbox

SWARM = (
    BUNDLE.replace("[Tool/bash]", "[Tool/bash, Tool/text-transform, Tool/pipped]")
    + """\
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: pipped}
spec: {entry: ./pipped.py, sandbox: {python: {venv: ./venv}}, exports: [{name: run}]}
"""
)
CASES: list[dict[str, str]] = yaml.safe_load((Path(__file__).parent / "wrong_commands.yaml").read_text())


@pytest.fixture(scope="module")
def swarm() -> Iterator[Sandbox]:
    with sandbox(SWARM) as made:
        (made.home / "pipped.py").write_text("handlers = {'run': lambda ctx, input: 'ran'}\n")
        (made.home / "made").mkdir()
        # A venv that is missing: the first of what is said, and what lets all the rest begin.
        refused = made.gdn("validate")
        assert "Tool/pipped: './venv' is no virtual environment (spec.sandbox.python.venv)" in refused.out
        assert "1 error" in refused.out, "it is said once"
        (step,) = [line.strip() for line in refused.out.splitlines() if "Make it: " in line]
        command = step.removeprefix("Make it: ").partition(",")[0]
        assert command == f"{sys.executable} -m venv {made.home}/venv"
        subprocess.run([*shlex.split(command), "--without-pip"], check=True)
        made.detach()
        yield made


def run(swarm: Sandbox, command: str) -> Result:
    return swarm.gdn(*shlex.split(command.replace("TOP", str(swarm.home)).replace(" ~", f" {os.path.expanduser('~')}")))


def test_there_are_twenty_and_the_venv() -> None:
    assert len(CASES) == 20


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case["command"]) for case in CASES),
        pytest.param(
            {
                "command": "usage --since yesterday",
                "says": "'yesterday' is no day",
                "step": "Write for example 2026-11-23, 7d or today.",
                "taken": "usage --since today",
            },
            marks=pytest.mark.feature("usage"),
        ),
    ],
)
def test_the_place_the_cause_and_a_next_step_that_works(swarm: Sandbox, case: dict[str, str]) -> None:
    refused = run(swarm, case["command"])
    assert refused.status in (1, 2)
    told = refused.out + refused.err
    if refused.out.startswith("{"):
        error = json.loads(refused.out)["error"]
        told = f"{error['message']}\n{error['suggestion']}"
    assert case["says"].replace("TOP", str(swarm.home)) in told
    assert case["step"] in told
    assert "Traceback" not in told and "bubblewrap" not in told
    then = run(swarm, case["taken"])
    assert then.status == 0, then.err


def test_the_tool_of_the_venv_runs(swarm: Sandbox) -> None:
    assert run(swarm, "call pipped__run").json["output"] == "ran"


def test_words_are_read_as_the_console_reads_them(swarm: Sandbox) -> None:
    """Text where the schema says string, else JSON if it can be read as JSON."""
    called = run(swarm, "call text-transform__replace text=55 search=5 replacement={} all=true")
    assert called.json["output"]["result"] == "{}{}"
