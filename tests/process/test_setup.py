"""`make run` and `make setup` on machines of every kind: fresh, moved, half-made, broken.

The real scripts, in a copy of the repository's frame whose project needs no packages, so that nothing is fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        for name in ("Makefile", "scripts/setup", "scripts/run", "scripts/make_venv.py"):
            shutil.copy(ROOT / name, path / name)
        self.write("pyproject.toml", PROJECT)
        self.write("constraints.txt", "")
        self.write("pinned.txt", "")
        self.write("kernel/cli.py", CLI)

    @property
    def python(self) -> Path:
        return self.path / ".venv/bin/python"

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(exist_ok=True)
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


def test_run_is_the_only_command_needed_and_passes_stdin_and_arguments_through(clone: Clone, tmp_path: Path) -> None:
    result = clone.make("run", "ARGS=--bundle 'my bundle'", stdin="hello", HOME=str(tmp_path))
    assert result.stdout == "gdn ['run', '--bundle', 'my bundle'] hello home\n"
    assert result.returncode == 2  # make's own status for a command that ended with 3
    assert "making .venv" in result.stderr


def test_second_start_does_nothing_and_says_nothing(clone: Clone) -> None:
    clone.make("setup")
    before = clone.made()
    result = clone.make("setup")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert clone.made() == before


def test_home_may_be_missing_or_read_only(clone: Clone, tmp_path: Path) -> None:
    assert clone.make("setup", HOME=str(tmp_path / "nowhere")).returncode == 0
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    clone.write("constraints.txt", "# changed\n")
    assert clone.make("setup", HOME=str(home)).returncode == 0
    assert list(home.iterdir()) == []


def test_run_without_a_home_to_write_to_keeps_its_state_here(clone: Clone, tmp_path: Path) -> None:
    result = clone.make("run", HOME=str(tmp_path / "nowhere"))
    assert result.stdout == f"gdn ['run']  {clone.path}/.goondan\n"
    assert "is not writable" in result.stderr
    assert not (tmp_path / "nowhere").exists()
    chosen = clone.make("run", HOME=str(tmp_path / "nowhere"), GOONDAN_STATE_ROOT="/chosen")
    assert chosen.stdout == "gdn ['run']  /chosen\n"
    assert chosen.stderr.startswith("make:")


def test_what_serves_the_tests_serves_a_run(clone: Clone) -> None:
    clone.make("setup")
    assert clone.make("run", GOONDAN_STATE_ROOT="/state").stderr.startswith("make:"), (
        "only make's word about gdn's exit status"
    )


def test_changed_packages_are_installed_without_a_new_environment(clone: Clone) -> None:
    clone.make("setup")
    before = clone.made()
    stamp = (clone.path / ".venv/.ready-dev").read_text()
    clone.write("constraints.txt", "msgspec==0.1\n")
    assert clone.make("setup").returncode == 0
    assert (clone.path / ".venv/.ready-dev").read_text() != stamp
    assert clone.made() == before


def test_version_that_is_installed_is_the_one_of_the_sources(clone: Clone) -> None:
    ask = "import importlib.metadata as m; print([d.version for d in m.distributions(name='goondan-kernel')])"
    for version in ("0.9.0", "1.0.0"):
        clone.write("pyproject.toml", PROJECT.replace("0.9.0", version))
        clone.make("setup")
        answer = subprocess.run([clone.python, "-c", ask], capture_output=True, text=True, check=True)
        assert answer.stdout == f"['{version}']\n"


def test_environment_is_made_anew_when_its_interpreter_is_gone(clone: Clone) -> None:
    clone.make("setup")
    real = clone.python.resolve().name
    (clone.path / ".venv/bin" / real).unlink(missing_ok=True)
    clone.python.unlink()
    clone.python.symlink_to("/nowhere/python3")
    assert clone.make("setup").returncode == 0
    assert subprocess.run([clone.python, "-c", ""], check=False).returncode == 0


def test_environment_is_made_anew_in_another_place(clone: Clone, tmp_path: Path) -> None:
    clone.make("setup")
    moved = Clone.__new__(Clone)
    moved.path = tmp_path / "moved"
    clone.path.rename(moved.path)
    assert moved.make("run").stdout.startswith("gdn ['run']")
    assert str(clone.path) not in (moved.path / ".venv/bin/gdn").read_text()


def test_environment_that_is_activated_can_be_changed_and_made_anew(clone: Clone) -> None:
    clone.make("setup")
    activated = {"PYTHON": str(clone.python)}
    clone.write("constraints.txt", "# changed\n")
    assert clone.make("setup", **activated).stderr == ""
    clone.write("constraints.txt", "# changed again\n")
    (clone.path / ".venv/.installing").touch()
    assert "making .venv" in clone.make("setup", **activated).stderr
    assert clone.python.resolve() == Path(sys.executable).resolve()


def test_environment_that_was_interrupted_is_made_anew(clone: Clone) -> None:
    clone.make("setup")
    (clone.path / ".venv/.ready-dev").unlink()
    (clone.path / ".venv/.installing").touch()
    (clone.path / ".venv/half").touch()
    assert clone.make("setup").returncode == 0
    assert not (clone.path / ".venv/half").exists()


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
    assert not (clone.path / ".venv").exists()
