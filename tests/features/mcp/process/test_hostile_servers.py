"""Hostile MCP servers, as root and as an ordinary user: contained, named, and no harm to others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containment.ordinary_user import ROOT, run_as_user

PROGRAM = "import runpy, sys; runpy.run_module('tests.features.mcp.process.hostile_servers', run_name='__main__')"


def check(found: dict[str, Any], folder: Path) -> None:
    assert found["reads"] == {
        str(folder / "secret"): "ENOENT",
        "/etc/shadow": "ENOENT",
        "/proc/1/environ": "EACCES",
        str(folder / "server-dies" / "server.py"): "ENOENT",
    }
    assert found["connects"] == ["EPERM", "EPERM", "EPERM"]
    # Answers to questions that nobody asked it change nothing for those who ask others.
    assert found["spoofs"] == ["mine", "slept"]
    assert found["floods"] == ["flooded", True]
    assert found["after the flood"] == {"a": 1}
    assert found["endless"] in ("E_MCP_PROTOCOL", "E_MCP_GONE")
    assert found["memory of its worker"]
    assert found["closes"][0] == "E_MCP_GONE"
    assert found["dies"][:2] == ["E_MCP_GONE", "the MCP server dies ended by SIGKILL; it said last: last words"]
    assert found["eats"][0] in ("E_TOOL_LIMIT", "E_MCP_GONE")  # by its group's limit, or each process's own
    for name in ("closes", "dies", "eats"):
        assert found[name][2], f"something of {name} lives"
    assert found["daemon"] == "forked"
    assert found["daemon is inside"]
    assert found["daemon is gone"]
    assert found["bystander"] == [True, {"b": 2}]
    assert found["noise is logged"] == [True, True]
    assert "last words" in found["named"]
    assert found["all gone"]


def test_hostile_servers_are_contained(short_tmp: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(short_tmp)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr[-4000:]
    check(json.loads(done.stdout.splitlines()[-1]), short_tmp)


@pytest.mark.skipif(os.geteuid() != 0, reason="the test above runs as an ordinary user already")
def test_hostile_servers_of_an_ordinary_user_are_contained(short_tmp: Path) -> None:
    folder = short_tmp / "work"
    folder.mkdir()
    short_tmp.chmod(0o755)
    done = run_as_user(PROGRAM, folder, environment=short_tmp / "venv")
    assert done.returncode == 0, done.stderr[-4000:]
    check(json.loads(done.stdout.splitlines()[-1]), folder)
