"""A browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.features.page.browser import Chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """Skips a test where no browser can be had."""
    made = Chromium()
    yield made
    made.close()
