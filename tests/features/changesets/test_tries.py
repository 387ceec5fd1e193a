"""How often a task of changesets is tried while its workers are killed."""

from __future__ import annotations

import pytest

from goondan.features.changesets.process.supervised import MAX_TRIES, START_S, Tries
from goondan.schemas.wire.errors import GoondanError


def test_workers_that_are_killed_before_they_begin_have_not_tried() -> None:
    tries = Tries(100.0)
    for number in range(3 * MAX_TRIES):
        tries.ended(100.0 + number * START_S / (3 * MAX_TRIES), begun=False)
    with pytest.raises(GoondanError) as caught:
        tries.ended(100.0 + START_S, begun=False)
    assert caught.value.code == "E_CHANGESET_IO"


def test_a_task_that_ends_its_workers_is_given_up() -> None:
    tries = Tries(100.0)
    for _ in range(MAX_TRIES - 1):
        tries.ended(101.0, begun=True)
    with pytest.raises(GoondanError) as caught:
        tries.ended(101.0, begun=True)
    assert caught.value.code == "E_CHANGESET_IO"


def test_each_try_has_the_time_of_a_start() -> None:
    tries = Tries(0.0)
    tries.ended(START_S - 1, begun=True)
    tries.ended(2 * START_S - 2, begun=False)
