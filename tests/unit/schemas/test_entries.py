"""The kind of an entry, by its suffix."""

from __future__ import annotations

import pytest

from goondan.schemas.bundle.launch import EntryKind, entry_kind


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("./a.py", "python"),
        ("./a.js", "javascript"),
        ("./a.mjs", "javascript"),
        ("./a.ts", "javascript"),
        ("./a.mts", "javascript"),
        ("./a.d.ts", "javascript"),
        ("./a.cjs", None),
        ("./a.cts", None),
        ("./a.jsx", None),
        ("./a.tsx", None),
        ("./count.sh", "executable"),
        ("./count", "executable"),
        ("./a.py/count", "executable"),
        ("./.ts", "executable"),
        ("./a.TS", "executable"),
    ],
)
def test_the_suffix_tells_what_runs_an_entry(entry: str, kind: EntryKind | None) -> None:
    assert entry_kind(entry) == kind
