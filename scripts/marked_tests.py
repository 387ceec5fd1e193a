"""A plugin of pytest: tests that are marked with a feature must fail where that feature is not there.

`pytest -p scripts.marked_tests` with the features in GOONDAN_WITHOUT runs no other tests. One that passes is an error:
it does not need the feature, so its mark takes a proof away from the core (scripts/without.py).

Source: docs/design/features.md "Without a feature".
"""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the marked tests, and expect them to fail."""
    gone = set(os.environ["GOONDAN_WITHOUT"].split())
    kept, others = [], []
    for item in items:
        needed = {name for mark in item.iter_markers("feature") for name in mark.args}
        if needed & gone:
            kept.append(item)
            item.add_marker(pytest.mark.xfail(strict=True, reason=f"needs {' '.join(sorted(needed & gone))}"))
        else:
            others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept
