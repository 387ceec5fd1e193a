"""Runs a program of ours as an ordinary user, whoever runs the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ORDINARY_USER = 65534
ROOT = Path(__file__).parents[2]


def run_as_user(
    program: str, folder: Path, *arguments: str, timeout_s: float = 50, environment: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -c program folder arguments…` with `folder` as the user's own. Skips where no interpreter can be run.

    `environment`: where a virtual environment may be made, if the program starts isolated ones that need packages.
    """
    python = _python()
    if os.geteuid() == 0:
        os.chown(folder, ORDINARY_USER, ORDINARY_USER)
    if environment is not None:
        python = _in_environment(python, environment)  # the same one, with its packages
    return subprocess.run([python, "-c", program, str(folder), *arguments], **_how(), timeout=timeout_s)


def told_as_user(program: str, folder: Path, *arguments: str, **options: Any) -> Any:
    """The same for a program that must end well: the JSON in its last line."""
    done = run_as_user(program, folder, *arguments, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _how() -> dict[str, Any]:
    places = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/", "PATH": "/usr/bin:/bin"}
    how: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "cwd": "/"}
    return how | ({"user": ORDINARY_USER, "group": ORDINARY_USER, "extra_groups": []} if os.geteuid() == 0 else {})


@cache
def _python() -> str:
    """An interpreter that the user may run; looked for once."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        with suppress(OSError):
            if subprocess.run([python, "-c", "import msgspec, pytest"], **_how(), timeout=50).returncode == 0:
                return python
    pytest.skip("no interpreter that an ordinary user may run")


def _in_environment(python: str, folder: Path) -> str:
    """That interpreter in a virtual environment with our packages, for programs that are started isolated (-I)."""
    if python == sys.executable:
        return python
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    lib = folder / "lib" / os.path.basename(os.path.dirname(packages))
    lib.mkdir(parents=True)
    (lib / "site-packages").symlink_to(packages)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n")
    return str(folder / "bin" / "python")
