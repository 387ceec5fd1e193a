"""Fixtures for tests of turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.agentproc.fakes import FakeLink
from tests.unit.agentproc.turns import Make, Runners


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes runners over one state directory."""
    runners = Runners(tmp_path)
    yield runners.build
    await runners.close()


@pytest.fixture
def link() -> FakeLink:
    """A broker and a tool host that answer each call with what they got."""
    return FakeLink()


@pytest.fixture(autouse=True)
def _own_state_root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An agent shows its extensions their state by an environment variable: it is taken back after the test."""
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path_factory.getbasetemp()))
