"""Node.js programs for tests. Where there is no Node.js or no npm, the tests say so and are skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.node_client import Unavailable, install
from tests.machine import FOUND

#: How long a program of a test may run (seconds).
PATIENCE_S = 50.0


def node_client() -> Path:
    """The folder of the Node client, with its packages installed. Skips the test where they cannot be had."""
    try:
        return install(FOUND)
    except Unavailable as error:
        pytest.skip(str(error))


def node(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = ["node", *(str(argument) for argument in arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
