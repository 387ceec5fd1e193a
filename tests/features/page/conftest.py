"""A browser for all tests of the page, and a swarm for those of the page as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.features.page.browser import MUST, Chromium, Site
from tests.features.page.lived import lived

#: Of the files about one view, what a run of all tests takes (`make test`); `make test-page`, and a run of some tests,
#: take all of them. The ten tasks go through all views.
SAMPLE: Final = {
    "test_cost.py": "test_currencies_stand_beside_each_other_and_are_never_added",
    "test_inbox.py": "test_yes_once_by_a_key_after_a_code_and_a_key_too_many_hits_nothing_else",
    "test_now.py": "test_who_waits_for_whom_what_waits_and_how_long_it_will_take_and_a_turn_is_stopped",
    "test_runs.py": "test_a_run_is_a_waterfall_over_agents",
    "test_talk.py": "test_a_person_talks_and_sees_the_agent_think",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a whole run, leave out what is not in the sample. A file whose test has gone is taken whole."""
    if MUST or "GOONDAN_WHOLE_RUN" not in os.environ:
        return
    ours = [item for item in items if "tests/features/page/process/" in item.nodeid and item.path.name in SAMPLE]
    there = {item.path.name for item in ours if item.name == SAMPLE[item.path.name]}
    left = {item for item in ours if item.path.name in there and item.name != SAMPLE[item.path.name]}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


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
