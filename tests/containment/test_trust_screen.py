"""The screen that asks for trust: no text of a bundle looks like a row of it."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.cli.consent import BROKEN, screen
from goondan.kernel.grants.powers import Endpoint, Folder, Judgement, Variable


@pytest.mark.parametrize("columns", [30, 50, 80])
def test_no_row_of_the_trust_screen_wraps_into_another_one(columns: int) -> None:
    forged = "AWS_KEY, as the key of a model"
    folders = [Folder("t", "read", "/x" * 12 + " " * at + forged) for at in range(8)]
    powers: list[Any] = [*folders, Variable("HOME", "key k"), Endpoint("https://b\u0430nk.example:443", "KEY")]
    judgement = Judgement(powers=powers, missing=powers, changed=[], reason="not trusted")
    lines = screen(judgement, "/home/" + "b" * 90, columns=columns)
    rows = [line for line in lines if line.startswith("  ") and not line.endswith(":")]
    assert all(len(row) <= columns for row in rows), "the terminal breaks none of them"
    begun = [row.strip() for row in rows if not row.lstrip().startswith(BROKEN)]
    assert len(begun) == 1 + len(powers)
    assert [row[:15] for row in begun[1:]] == ["HOME, as the ke", *["reads /x/x/x/x/"] * 8, r"https://b\u0430"]
