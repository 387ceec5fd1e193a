"""What the tests of extensions share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_state_root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An agent shows its extensions their state by an environment variable: it is taken back after the test."""
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path_factory.getbasetemp()))
