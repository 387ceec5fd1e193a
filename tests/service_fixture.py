"""The recorded services of `tests/servers/mock_api.py`, as a program on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOCK = Path(__file__).parent / "servers" / "mock_api.py"


class MockApi:
    """The recorded services."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host = url.removeprefix("http://")

    def reset(self) -> None:
        """Forget what was asked."""
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/__reset", method="POST"), timeout=10).close()

    def requests(self) -> list[dict[str, Any]]:
        """What was asked since then."""
        with urllib.request.urlopen(f"{self.url}/__requests", timeout=10) as answer:
            asked: list[dict[str, Any]] = json.load(answer)
        return asked


@contextmanager
def mock_api() -> Iterator[MockApi]:
    """The program, until the end of the block."""
    with subprocess.Popen([sys.executable, str(MOCK)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield MockApi(process.stdout.readline().strip())
        finally:
            process.terminate()
