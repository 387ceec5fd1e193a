"""Packages of npm for tests: installed once, into the user's cache, by what a package-lock.json says.

Without node and npm, or without a registry when the packages are not there yet, the tests are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.machine import FOUND

#: How long an installation may take (seconds); it takes six with an empty cache of npm.
INSTALL_S = 40.0
#: After a failed installation the next tests do not try again for so long (seconds).
AGAIN_S = 600.0


def installed(sources: Path) -> Path:
    """The folder with the packages of `sources` (package.json, package-lock.json). Skips the test where they cannot be
    had.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock = (sources / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = cache / "goondan-tests" / f"{sources.name}-{hashlib.sha256(lock).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / "lock").open("w")
    except OSError as error:
        pytest.skip(f"there is no place for the packages of {sources.name}: {error}")
    failed = folder / "failed"
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if failed.exists() and time.time() - failed.stat().st_mtime < AGAIN_S:
            pytest.skip(f"npm could not install what {sources.name} needs a moment ago: {failed.read_text()}")
        if not (folder / "done").exists():
            for name in ("package.json", "package-lock.json"):
                shutil.copyfile(sources / name, folder / name)
            options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
            command = ["npm", "ci", *options]
            try:
                how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": INSTALL_S, "env": FOUND}
                done = subprocess.run(command, cwd=folder, **how)
                why = done.stderr[-300:] if done.returncode else ""
            except subprocess.TimeoutExpired:
                why = "it took too long"
            if why:
                failed.write_text(why)
                pytest.skip(f"npm could not install what {sources.name} needs: {why}")
            (folder / "done").touch()
    return folder


def beside(folder: Path, program: Path) -> Path:
    """A copy of a program in the folder of its packages: node looks for packages beside the module."""
    digest = hashlib.sha256(program.read_bytes()).hexdigest()[:16]
    copy = folder / f"{program.stem}-{digest}{program.suffix}"
    if not copy.exists():
        shutil.copyfile(program, folder / f"{copy.name}.{os.getpid()}")
        os.rename(folder / f"{copy.name}.{os.getpid()}", copy)
    return copy
