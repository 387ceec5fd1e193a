"""What a whole run of the tests took: the files that took longest, and a warning when the budget is spent.

`tests/conftest.py` registers it. Under pytest-xdist the controller hears of every test of every worker.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import pytest

#: What a whole run may take on two processors that have nothing else to do (seconds).
BUDGET_S: Final = 390.0
#: Files that are named.
SHOWN: Final = 10


def said(files: Mapping[str, float], seconds: float, load: float) -> list[str]:
    """What is shown at the end of a whole run. `files`: seconds of each; `load`: the load average of a minute."""
    slowest = sorted(files.items(), key=lambda item: -item[1])[:SHOWN]
    lines = [f"{taken:6.1f} s  {file}" for file, taken in slowest]
    lines.append(
        f"{seconds:6.1f} s  the whole run, of {BUDGET_S:g} s; its files one after the other {sum(files.values()):.0f} s"
    )
    if seconds > BUDGET_S:
        lines.append(
            f"WARNING: the tests have spent their budget of {BUDGET_S:g} s (load average {load:.1f}, "
            f"{os.cpu_count()} processors). CONTRIBUTING.md, Tests, says what keeps them cheap."
        )
    return lines


class TimeSpent:
    """Adds the time of all tests up, file by file. `shown`: and says so at the end, as of a whole run."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._began = time.monotonic()
        self._files: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._files[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """At the end of a whole run; of others everybody sees what they took."""
        if not self._shown or not self._files:
            return
        terminalreporter.section("time of files")
        for line in said(self._files, time.monotonic() - self._began, os.getloadavg()[0]):
            terminalreporter.write_line(line, yellow=line.startswith("WARNING"))
