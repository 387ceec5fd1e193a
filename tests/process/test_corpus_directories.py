"""The corpus of what another user puts in the way: at every name of a runtime directory and of a state, and at speed.

The victims are root and an ordinary user, each one process for all attempts; the attacker is a second user. Whatever
stands there, it is refused or gone around, and what a planted link leads to stays as it was. Who finds a new attempt
adds it to `PLANTED` or `PLACES`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containment.ordinary_user import ORDINARY_USER, ROOT, run_as_user
from tests.kernel_fixture import Result

ATTACKER = 40_001
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes the parts of two users")

#: Does with each place what a start does, and says how that ended.
VICTIM = """
import json, os, sys, time
from goondan.kernel import lock, rundir
from goondan.kernel.state_root import open_state_root
from goondan.schemas.wire.errors import GoondanError

def state(top, path):
    root = f"{top}/state"
    open_state_root(root, workspace=f"{root}/workspaces/w", make=True)
    lock.lock(f"{root}/workspaces/w").close()

def runtime(top, path):
    directory, reasons = rundir.take(
        [f"{top}/run/goondan/name"], name="name", state_dir=f"{top}/state", base=f"{top}/fresh"
    )
    with directory:
        if not reasons or directory.path.startswith(f"{top}/run"):
            return directory.path
    raise GoondanError(rundir.fail("E_RUN_DIR", reasons[0]).info)

said = {}
for name, kind, top in json.loads(sys.argv[2]):
    try:
        said[name] = {"used": str({"state": state, "runtime": runtime}[kind](top, name))}
    except GoondanError as error:
        said[name] = {"code": error.info.code, "message": error.info.message}
    except BaseException as error:
        said[name] = {"raised": repr(error)}
until = time.monotonic() + float(sys.argv[3])
raced = 0
while time.monotonic() < until:
    try:
        with rundir.take([f"{sys.argv[1]}/race/goondan/name"], name="n", state_dir=f"{sys.argv[1]}/s",
                         base=f"{sys.argv[1]}/fresh")[0] as directory:
            raced += 1
            rundir.write_private(directory.fd, "client.token", b"secret")
            rundir.remove(directory)
    except GoondanError:
        pass
said["race"] = {"used": raced}
print(json.dumps(said))
"""
#: Makes names as fast as it can: a link to a folder of the victim's, a folder of its own, nothing.
RACER = """
import os, sys
user, path, target = int(sys.argv[1]), *sys.argv[2:]
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
while True:
    for make in (lambda: os.symlink(target, path), lambda: os.mkdir(path, 0o777)):
        try:
            make()
        except OSError:
            pass
        for remove in (os.unlink, os.rmdir):
            try:
                remove(path)
            except OSError:
                pass
"""
#: How long that goes on (seconds).
RACE_S = 1.0


def linked(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)
    os.lchown(path, ATTACKER, ATTACKER)


def owned(path: Path, elsewhere: Path) -> None:
    path.mkdir(mode=0o755)
    os.chown(path, ATTACKER, ATTACKER)


def owned_and_open(path: Path, elsewhere: Path) -> None:
    owned(path, elsewhere)
    path.chmod(0o1777)


def piped(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)
    os.chown(path, ATTACKER, ATTACKER)


def listening(path: Path, elsewhere: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the whole path is too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
    os.chown(path, ATTACKER, ATTACKER)


def written(path: Path, elsewhere: Path) -> None:
    path.write_text("planted")
    os.chown(path, ATTACKER, ATTACKER)


def second_name(path: Path, elsewhere: Path) -> None:
    """A hard link to a file of the attacker's."""
    original = path.parent / f"{path.name}.original"
    written(original, elsewhere)
    os.link(original, path)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "a link": linked, "a folder": owned, "an open folder": owned_and_open, "a pipe": piped, "a socket": listening,
    "a file": written, "a second name": second_name,
}  # fmt: skip
#: The kind of victim, and the path below the folder of one attempt.
PLACES: dict[str, tuple[str, str]] = {
    "the parent of runtime directories": ("runtime", "run/goondan"),
    "a runtime directory": ("runtime", "run/goondan/name"),
    "the state root": ("state", "state"),
    "the workspaces": ("state", "state/workspaces"),
    "a workspace": ("state", "state/workspaces/w"),
    "the records of trust": ("state", "state/trust"),
    "the folder of the lock": ("state", "state/workspaces/w/kernel"),
    "the logs": ("state", "state/workspaces/w/logs"),
    "the instances": ("state", "state/workspaces/w/instances"),
    "the policy": ("state", "state/policy.yaml"),
    "the accepted files": ("state", "state/accepted-files.json"),
}
ATTEMPTS = [(place, planted) for place in PLACES for planted in PLANTED]


def prepare(top: Path, victim: int, place: str, planted: str) -> tuple[str, str, str]:
    """The folder of one attempt, as the attacker has left it: name, kind, path."""
    kind, path = PLACES[place]
    top.mkdir()
    for name in ("elsewhere", "fresh", "run"):
        (top / name).mkdir(mode=0o700)
    (top / "elsewhere" / "precious").write_text("precious")
    (top / path).parent.mkdir(parents=True, exist_ok=True)
    for folder, _, names in os.walk(top):
        os.chmod(folder, 0o700)
        for name in (folder, *(f"{folder}/{name}" for name in names)):
            os.chown(name, victim, victim)
    PLANTED[planted](top / path, top / "elsewhere")
    return f"{place}, {planted}", kind, str(top)


@pytest.fixture(scope="module", params=[0, ORDINARY_USER], ids=["root", "ordinary user"])
def outcomes(request: pytest.FixtureRequest) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What became of all attempts against one victim."""
    victim = int(request.param)
    with tempfile.TemporaryDirectory(prefix="gd", dir="/tmp") as folder:
        top = Path(folder)
        top.chmod(0o755)
        os.chown(top, victim, victim)
        attempts = [
            prepare(top / str(number), victim, place, planted) for number, (place, planted) in enumerate(ATTEMPTS)
        ]
        for name, mode in (("race", 0o1777), ("fresh", 0o700), ("s", 0o700), ("elsewhere", 0o700)):
            (top / name).mkdir()
            os.chown(top / name, 0 if name == "race" else victim, 0 if name == "race" else victim)
            (top / name).chmod(mode)
        argv = [sys.executable, "-c", RACER, str(ATTACKER), str(top / "race" / "goondan"), str(top / "elsewhere")]
        racer = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        try:
            done = as_victim(victim, top, json.dumps(attempts), str(RACE_S))
        finally:
            racer.kill()
            racer.wait()
        assert done.status == 0, done.err
        yield top, json.loads(done.out)


def as_victim(victim: int, folder: Path, *arguments: str) -> Result:
    if victim == ORDINARY_USER:
        done = run_as_user(VICTIM, folder, *arguments)
    else:
        env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": "/root"}
        argv = [sys.executable, "-c", VICTIM, str(folder), *arguments]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd="/", timeout=60)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(("place", "planted"), ATTEMPTS)
def test_nothing_that_another_user_has_planted_is_used(
    outcomes: tuple[Path, dict[str, Any]], place: str, planted: str
) -> None:
    top, said = outcomes
    outcome = said[f"{place}, {planted}"]
    expected = "E_RUN_DIR" if PLACES[place][0] == "runtime" else "E_STATE"
    assert outcome.get("code") == expected, outcome
    assert PLACES[place][1].rpartition("/")[2] in outcome["message"]
    elsewhere = top / str(ATTEMPTS.index((place, planted))) / "elsewhere"
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]
    assert (elsewhere / "precious").read_text() == "precious"


def test_names_that_change_all_the_time_lead_nowhere(outcomes: tuple[Path, dict[str, Any]]) -> None:
    top, said = outcomes
    assert said["race"]["used"] > 0
    assert list((top / "elsewhere").iterdir()) == []
