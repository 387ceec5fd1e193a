"""The closing line of a whole run, which is two runs of pytest."""

from __future__ import annotations

import pytest

from scripts.closing_line import closing_line, counted

WORKERS = "....\n5 passed in the corner\n==== 1 failed, 2300 passed, 1 skipped in 300.10s (0:05:00) ====\n"
QUIET = "......\n7000 passed, 2 warnings in 200.00s (0:03:20)\n"


def test_runs_are_added_up() -> None:
    assert closing_line([WORKERS, QUIET], 310.5) == "==== 1 failed, 9300 passed, 1 skipped, 2 warnings in 310.50s ===="


@pytest.mark.parametrize("text", ["", "Killed\n", "INTERNALERROR> no\n", "5 passed in the corner\n"])
def test_a_run_without_an_end_is_an_error(text: str) -> None:
    assert counted(text) == {"errors": 1}
    assert closing_line([QUIET, text], 1) == "==== 7000 passed, 2 warnings, 1 errors in 1.00s ===="


def test_an_error_of_collection_counts() -> None:
    assert counted("==== 1 error in 0.20s ====\n") == {"errors": 1}
