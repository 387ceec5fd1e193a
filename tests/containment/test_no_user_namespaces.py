"""Root on a host without user namespaces: full jails, made with root's powers and without a trace of them inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.containment.test_attempts import judge
from tests.containment.tried import every_attempt

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has the reduced tier there")

ATTEMPTS = """
import asyncio, json, os, sys
from pathlib import Path
from msgspec.structs import replace
from tests.containment.tried import every_attempt
from toolhost.survey import survey
os.environ["HOST_SECRET"] = "x"
async def main():
    found = await survey()
    assert found.facts is not None and not found.facts.user_namespaces, found
    tried = await every_attempt(Path(sys.argv[1]), only="instance", ours=True, facts=lambda facts: found.facts)
    print(json.dumps({"walls": found.walls, "notes": found.notes, "tried": tried}))
asyncio.run(main())
"""


def without(program: str, *arguments: str | Path, error: str = "EPERM") -> Any:
    """What the program says at the end, on a host whose user namespaces are refused with that error."""
    refusing = str(Path(__file__).parent / "no_user_namespaces.py")
    done = subprocess.run(
        [sys.executable, refusing, error, sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_attempt_gets_out(short_tmp: Path) -> None:
    """Of the jail that such a host gives, in a workdir that belongs to the jail's user."""
    found = without(ATTEMPTS, short_tmp)
    assert found["walls"] == ["namespaces", "seccomp", "landlock", "uid", "limits"]
    assert "bubblewrap runs as root" in found["notes"][0] and "Owners of files cannot be shown" in found["notes"][1]
    judge(found["tried"], "instance")


async def test_no_attempt_gets_out_where_only_bubblewrap_is_refused_them(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AppArmor, which lets root have them: then the owners of files are shown as the jail's user."""
    monkeypatch.setenv("HOST_SECRET", "x")
    judge(
        await every_attempt(short_tmp, only="call", facts=lambda facts: replace(facts, user_namespaces=False)), "call"
    )
