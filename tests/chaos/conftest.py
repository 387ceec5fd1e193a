"""Fixtures for tests that start real programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from goondan.schemas.transport import TRANSPORTS, VARIABLE
from tests.kernel_fixture import Sandbox, sandbox


@pytest.fixture
def kernel() -> Iterator[Sandbox]:
    """A bundle of its own, no kernel running; afterwards nothing may be left."""
    with sandbox() as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def kernel_of_a_transport(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """The same, once on each transport."""
    with sandbox(extra_env={VARIABLE: request.param}) as made:
        yield made
