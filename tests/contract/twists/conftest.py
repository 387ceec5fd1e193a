"""Fixtures of the twists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.twists.notes import HAPPENS, NOTES
from tests.contract.twists.stage import Stage


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Bundles and agents of one test."""
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path / "state"))
    NOTES.clear()
    HAPPENS.clear()
    made = Stage(tmp_path)
    yield made
    await made.close()
