"""Fixtures for tests that start real programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel_fixture import Sandbox, sandbox


@pytest.fixture
def kernel() -> Iterator[Sandbox]:
    """A bundle of its own, no kernel running; afterwards nothing may be left."""
    with sandbox() as made:
        yield made
