"""A browser for all tests of the page, and a swarm for those of the page as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.features.page.browser import Chromium, Site
from tests.features.page.lived import lived


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """Skips a test where no browser can be had."""
    made = Chromium()
    yield made
    made.close()


@pytest.fixture(scope="session")
def swarm(chromium: Chromium) -> Iterator[Site]:
    """A swarm that has done something (lived.py). Who acts on it leaves what the others look for."""
    with lived(chromium) as made:
        yield made
