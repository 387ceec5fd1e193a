"""A whole run says which files took longest, and when the budget is spent."""

from __future__ import annotations

from tests.time_spent import BUDGET_S, SHOWN, said

FILES = {f"tests/test_{number}.py": float(number) for number in range(30)}


def test_the_slowest_files_come_first_and_the_others_are_only_counted() -> None:
    lines = said(FILES, BUDGET_S, 0.5)
    assert len(lines) == SHOWN + 1
    assert lines[0].split() == ["29.0", "s", "tests/test_29.py"]
    assert f"one after the other {sum(FILES.values()):.0f} s" in lines[-1]


def test_a_spent_budget_is_said_with_the_load() -> None:
    assert "WARNING" not in "".join(said(FILES, BUDGET_S, 9.5))
    last = said(FILES, BUDGET_S + 1, 9.5)[-1]
    assert last.startswith("WARNING")
    assert "load average 9.5" in last
