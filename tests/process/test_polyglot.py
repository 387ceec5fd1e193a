"""The example of many languages, as its README says: four tools, and two programs that ask for them, without a key."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel_fixture import PATIENCE_S, ROOT, Sandbox, sandbox
from tests.node_fixture import node, node_client
from tests.polyglot_clients import BUILD_S, rust

EXAMPLE = ROOT / "examples" / "polyglot"
#: What each tool is asked, and its answer.
CALLS = {
    "numbers__summary": ({"values": [3, 1, 5]}, {"mean": 3.0, "median": 3, "deviation": 2.0}),
    "calendar__between": (
        {"from": "2026-11-24", "to": "2027-01-01"},
        {"days": 38, "from": "Tuesday", "to": "Friday"},
    ),
    "folder__size": ({}, {"files": 0, "kib": 4}),
    "primes__count": ({"below": 1000000}, 78498),
}


@pytest.fixture(scope="module")
def swarm() -> Iterator[Sandbox]:
    """The example in a folder of its own, built, with its kernel."""
    if not (shutil.which("make") and shutil.which("cc")):
        pytest.skip("make and a compiler for C are not there")
    with sandbox() as kernel:
        leave = shutil.ignore_patterns("target", "node_modules", "primes.o", "rust")
        shutil.copytree(EXAMPLE, kernel.home, ignore=leave, dirs_exist_ok=True)
        (kernel.home / "tools/primes/primes").unlink(missing_ok=True)
        subprocess.run(["make", "--silent"], cwd=kernel.home, env=kernel.env, check=True, timeout=PATIENCE_S)
        started = kernel.gdn("run", "--detach")
        assert (started.status, started.err) == (0, "")
        yield kernel


@pytest.mark.parametrize("tool", CALLS)
def test_each_tool_answers(swarm: Sandbox, tool: str) -> None:
    args, expected = CALLS[tool]
    if tool == "calendar__between" and "W_CONFIG_UNCHECKED" in swarm.gdn("validate").out:
        pytest.skip("neither Node.js 22 nor Bun is there")
    result = swarm.gdn("call", tool, json.dumps(args), "--json", "--instance", tool)
    assert result.json["status"] == "ok", result.out
    assert result.json["output"] == expected


def test_the_program_in_node_shows_the_stream_and_the_answer(swarm: Sandbox) -> None:
    client = node_client()
    packages = swarm.home / "node_modules"
    packages.mkdir()
    (packages / "goondan-client").symlink_to(client)
    done = node(swarm.home / "ask.mjs", "/folder__size {}\n/primes__count below=100", env=swarm.env)
    assert done.returncode == 0, done.stderr
    assert {"  folder__size begins", "  primes__count is done"} <= set(done.stderr.splitlines())
    assert done.stdout.splitlines()[-1] == "25"
    refused = node(swarm.home / "ask.mjs", "/primes__count below=-1", env=swarm.env)
    assert "primes__count failed: E_TOOL_INVALID_ARGS" in refused.stderr


@pytest.mark.timeout(BUILD_S + 60)
def test_the_program_in_rust_shows_the_stream_and_the_answer(swarm: Sandbox) -> None:
    program = rust()

    def ask(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [program, *arguments]
        return subprocess.run(command, env=swarm.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    done = ask("--stream", swarm.home, "clerk", "/primes__count below=100")
    assert (done.returncode, done.stdout) == (0, "25\n")
    assert done.stderr.splitlines()[:2] == ["  primes__count begins", "  primes__count is done"]
    refused = ask(swarm.home, "nobody", "hi")
    assert refused.returncode == 1
    assert refused.stderr.startswith("E_AGENT_NOT_FOUND: ")
