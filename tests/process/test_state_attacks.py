"""A second user of the machine against somebody's state, as that was left by an open umask: the victim is root, and an
ordinary user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containment.ordinary_user import ORDINARY_USER, ROOT, run_as_user
from tests.kernel_fixture import BUNDLE

ATTACKER = 40_001
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes the parts of two users")

#: What the victim has: a state as an earlier version left it under umask 000, and a file that matters.
PREPARE = """
import os, sys
os.umask(0)
top = sys.argv[1]
os.makedirs(f"{top}/state/workspaces/0/logs")
open(f"{top}/state/workspaces/0/logs/toolhost.log", "wb").write(b"line\\n" * (9 << 18))
os.umask(0o077)
open(f"{top}/precious", "w").write("precious")
os.chmod(top, 0o755)
"""
#: What the victim does: a command, and what a running kernel does every five seconds.
ACT = """
import os, sys
top = sys.argv[1]
os.environ["GOONDAN_STATE_ROOT"] = f"{top}/state"
bundle = f"{top}/bundle/goondan.yaml"
os.makedirs(f"{top}/bundle", exist_ok=True)
open(bundle, "w").write(BUNDLE)
from goondan.kernel.traces.logs import bound_logs
bound_logs(f"{top}/state/workspaces/0/logs")
from goondan.kernel.cli import execute
sys.exit(execute(["validate", bundle, "--json"]))
""".replace("BUNDLE", repr(BUNDLE))
CONFIRM = ACT.replace('"validate", bundle', '"trust", "--state-root"')


def as_victim(victim: int, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if victim == ORDINARY_USER:
        return run_as_user(program, folder)
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": "/root"}
    argv = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, cwd="/", timeout=60)


def as_attacker(*argv: str) -> int:
    return subprocess.run(argv, user=ATTACKER, group=ATTACKER, extra_groups=[], capture_output=True).returncode


@pytest.fixture(params=[0, ORDINARY_USER], ids=["root", "ordinary user"])
def victim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_planted_link_is_not_written_through_and_the_state_is_refused(victim: int, short_tmp: Path) -> None:
    short_tmp.chmod(0o755)
    assert as_victim(victim, PREPARE, short_tmp).returncode == 0
    planted = short_tmp / "state/workspaces/0/logs/toolhost.log.1"
    assert as_attacker("ln", "-s", str(short_tmp / "precious"), str(planted)) == 0, "the state is open, as it was left"
    done = as_victim(victim, ACT, short_tmp)
    assert (short_tmp / "precious").read_text() == "precious"
    if planted.is_symlink():  # not replaced by a rotation that came first
        (error,) = json.loads(done.stdout)["errors"]
        assert (error["code"], str(planted) in error["message"]) == ("E_STATE", True)
    assert as_attacker("touch", str(short_tmp / "state/other")) != 0, "it is closed now"


def test_a_planted_policy_is_not_read_and_the_state_is_closed(victim: int, short_tmp: Path) -> None:
    short_tmp.chmod(0o755)
    assert as_victim(victim, PREPARE, short_tmp).returncode == 0
    policy = short_tmp / "state/policy.yaml"
    assert as_attacker("sh", "-c", f"echo 'widen: []' > {policy}") == 0
    refused = as_victim(victim, ACT, short_tmp)
    (error,) = json.loads(refused.stdout)["errors"]
    assert (error["code"], f"{policy} belongs to uid {ATTACKER}" in error["message"]) == ("E_STATE", True)
    policy.unlink()
    policy.write_text("widen: []\n")  # one of the victim's, which the attacker could have changed
    os.chown(policy, victim, victim)
    for _ in range(2):
        (error,) = json.loads(as_victim(victim, ACT, short_tmp).stdout)["errors"]
        assert "gdn trust --state-root" in error["message"]
    assert json.loads(as_victim(victim, CONFIRM, short_tmp).stdout) == {
        "stateRoot": str(short_tmp / "state"),
        "believed": True,
    }
    assert json.loads(as_victim(victim, ACT, short_tmp).stdout)["valid"]


def test_a_state_root_of_the_attacker_is_not_used(victim: int, short_tmp: Path) -> None:
    short_tmp.chmod(0o755)
    root = short_tmp / "state"
    root.mkdir()
    root.chmod(0o777)
    os.chown(root, ATTACKER, ATTACKER)
    done = as_victim(victim, ACT, short_tmp)
    (error,) = json.loads(done.stdout)["errors"]
    assert f"{root} belongs to uid {ATTACKER}" in error["message"]
    assert "export GOONDAN_STATE_ROOT=" in error["suggestion"]
    assert list(root.iterdir()) == []
