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


def run_as_user(program: str, folder: Path, *arguments: str, timeout_s: float = 50) -> subprocess.CompletedProcess[str]:
    """`python -c program folder arguments…` with `folder` as the user's own. Skips where no interpreter can be run."""
    places = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/", "PATH": "/usr/bin:/bin"}
    how: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "cwd": "/", "timeout": timeout_s}
    if os.geteuid() == 0:
        how |= {"user": ORDINARY_USER, "group": ORDINARY_USER, "extra_groups": []}
        os.chown(folder, ORDINARY_USER, ORDINARY_USER)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            able = subprocess.run([python, "-c", "import msgspec, pytest"], **how)
        except OSError:
            continue
        if able.returncode == 0:
            return subprocess.run([python, "-c", program, str(folder), *arguments], **how)
    pytest.skip("no interpreter that an ordinary user may run")
