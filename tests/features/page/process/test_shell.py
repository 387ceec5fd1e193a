"""The shell of the page: who comes in, what is kept where, the keys, one stream for all tabs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.features.page.browser import Chromium, Site, site


@pytest.fixture(scope="module")
def page(chromium: Chromium) -> Iterator[Site]:
    with site(chromium) as made:
        yield made


def test_a_code_leaves_the_address_and_the_history(page: Site) -> None:
    told = page.see(
        """
        const history = await (await page.createCDPSession()).send("Page.getNavigationHistory");
        return { url: page.url(), history: history.entries.map(({ url }) => url) };
        """
    )
    assert told["url"] == f"{page.address}/page/"
    assert not [url for url in told["history"] if "code" in url]
