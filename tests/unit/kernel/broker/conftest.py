"""What many tests of the broker begin with."""

from __future__ import annotations

import pytest

from tests.unit.kernel.broker.world import World, run


@pytest.fixture
def world() -> World:
    """`coder/k` works on `e1` of the first client."""
    made = World()
    made.clients[0].ask("e1")
    run(made)
    return made
