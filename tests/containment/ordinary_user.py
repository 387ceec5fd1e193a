"""Runs a program of ours as an ordinary user, whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
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
    places = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/", "PATH": "/usr/bin:/bin"}
    how: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "cwd": "/", "timeout": timeout_s}
    if os.geteuid() == 0:
        how |= {"user": ORDINARY_USER, "group": ORDINARY_USER, "extra_groups": []}
        os.chown(folder, ORDINARY_USER, ORDINARY_USER)
    for python in _pythons():
        try:
            able = subprocess.run([python, "-c", "import msgspec, pytest"], **how)
        except OSError:
            continue
        if able.returncode == 0:
            if environment is not None:
                python = _in_environment(python, environment)  # the same one, with its packages
            return subprocess.run([python, "-c", program, str(folder), *arguments], **how)
    pytest.skip("no interpreter that an ordinary user may run")


def _pythons() -> list[str]:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return [sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"]


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
