"""Fixtures for tests that start real programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from tests.kernel_fixture import Sandbox, sandbox


@pytest.fixture
def kernel() -> Iterator[Sandbox]:
    """A bundle of its own, no kernel running; afterwards nothing may be left."""
    with sandbox() as made:
        yield made


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The connection to a model is an agent's, and so on uvloop, but it must not depend on that."""
    if item.path.name == "test_model_connection.py":
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
