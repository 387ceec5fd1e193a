"""No grant, no workdir and no tool's folder shows a jail what is hidden, whatever it is named or where else it stands.

Made as whoever runs the tests and as an ordinary user, in both tiers; with mounts of the same folders as root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import SandboxSpec
from goondan.toolhost.lookup.hiding import with_hidden
from goondan.toolhost.lookup.this_host import landlock_abi
from goondan.toolhost.policy.plan import MINIMUM_LANDLOCK
from tests.containment import uncovering
from tests.containment.ordinary_user import ROOT, told_as_user
from tests.containment.uncovering import LOOK, Scene, reading
from tests.toolhost_fixture import bench, make_tool

AS_USER = """
import json, sys
from pathlib import Path
from tests.containment.uncovering import main
print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], False)))
"""


def judge(found: dict[str, list[Any]]) -> None:
    assert {name: detail for name, (how, detail) in found.items() if how not in ("refused", "covered")} == {}
    assert {name: how for name, (how, _) in found.items() if name.startswith("fine")} == {
        name: "covered" for name in found if name.startswith("fine")
    }
    # What is no hidden folder and lies in none is the only thing that may have a jail.
    around = ("around", "home directory", "everything", "fine", "what the mounts lie in")
    assert [name for name, (how, _) in found.items() if how == "covered" and not any(w in name for w in around)] == []
    assert [name for name, (how, _) in found.items() if how == "covered" and name.startswith("write")] == [], (
        "a folder that holds them is never writable by a grant"
    )
    assert len(found) > 80


def program(folder: Path, *arguments: str) -> dict[str, list[Any]]:
    command = [sys.executable, "-m", uncovering.__name__, str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=55)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nothing_that_is_hidden_is_uncovered(short_tmp: Path) -> None:
    judge(program(short_tmp, "full"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount folders elsewhere")
def test_nothing_that_is_hidden_is_uncovered_by_a_mount_of_it(short_tmp: Path) -> None:
    found = program(short_tmp, "full", "mounts")
    judge(found)
    assert found["read a mount of a part of it"][0] == found["workdir a mount of the sockets"][0] == "refused"
    assert found["read a mount of the home directory"][0] == found["workdir what the mounts lie in"][0] == "covered"


@pytest.mark.parametrize("tier", ["full", "reduced"])
def test_nothing_that_is_hidden_is_uncovered_for_an_ordinary_user(short_tmp: Path, tier: str) -> None:
    if tier == "reduced" and landlock_abi() < MINIMUM_LANDLOCK:
        pytest.skip("this kernel has no reduced tier")
    found = told_as_user(AS_USER, short_tmp, tier)
    judge(found)
    if tier == "reduced":  # nothing can be covered there
        assert found["read what lies around them"][0] == found["read a link to the home directory"][0] == "refused"


@pytest.mark.parametrize("how", ["made", "replaced"])
async def test_a_jail_ends_when_what_is_hidden_comes_to_show_in_it(short_tmp: Path, how: str) -> None:
    """What is made, or put in its place, while a jail lives is not covered there."""
    scene = Scene(short_tmp)
    sandbox = reading(scene.home)
    later = scene.home / "later"
    hidden = [str(scene.state), str(later)]
    async with bench(
        make_tool(short_tmp, LOOK, "look", "wait", sandbox=sandbox), facts=lambda facts: with_hidden(facts, hidden)
    ) as made:
        look = {"tops": [str(scene.home)]}
        assert (await made.call("t__look", look))["output"] == []
        _, running = made.start("t__wait", look)
        if how == "made":
            later.mkdir()
            (later / "policy.yaml").write_text("host secret")
        else:
            scene.state.rename(scene.place / "away")
            scene.state.mkdir()
            (scene.state / "policy.yaml").write_text("host secret")
        made.host.sessions.tick()
        ended = await running
        assert (ended["status"], ended["error"]["code"]) == ("error", "E_SANDBOX_DENIED")
        assert str(later if how == "made" else scene.state) in ended["error"]["message"]
        assert (await made.call("t__look", look))["output"] == [], "the next jail covers it"


@pytest.mark.parametrize("how", ["made", "replaced"])
async def test_a_call_that_comes_then_gets_a_jail_that_covers_it(short_tmp: Path, how: str) -> None:
    scene = Scene(short_tmp)
    hidden = [str(scene.state), str(scene.home / "later")]
    tool = make_tool(short_tmp, LOOK, "look", sandbox=reading(scene.home))
    async with bench(tool, facts=lambda facts: with_hidden(facts, hidden)) as made:
        look = {"tops": [str(scene.home)]}
        assert (await made.call("t__look", look))["output"] == []
        if how == "replaced":
            scene.state.rename(scene.place / "away")
        new = scene.state if how == "replaced" else scene.home / "later"
        new.mkdir()
        (new / "policy.yaml").write_text("host secret")
        assert (await made.call("t__look", look))["output"] == []


async def test_a_call_costs_no_look_where_nothing_hidden_could_show(short_tmp: Path) -> None:
    scene = Scene(short_tmp)
    tool = make_tool(short_tmp, LOOK, "look", sandbox=SandboxSpec())
    async with bench(tool, state_dir=scene.state / "workspaces" / "d", facts=scene.hide) as made:
        assert (await made.call("t__look", {"tops": [str(scene.place)]}, workdir=scene.own))["output"] == []
        (slot,) = made.host.sessions.pool.sessions()
        assert made.live_of(slot).jail.plan.hiding == []
