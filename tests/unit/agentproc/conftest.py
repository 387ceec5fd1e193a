"""Fixtures for tests of turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.agentproc.turns import Make, Runners


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes runners over one state directory."""
    runners = Runners(tmp_path)
    yield runners.build
    await runners.close()
