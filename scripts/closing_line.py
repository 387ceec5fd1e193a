"""The closing line of several runs of pytest: what they counted, added up.

`python -m scripts.closing_line SECONDS FILE…` reads what the runs have printed and writes one line as pytest does.
A run that printed no closing line counts as an error: it did not come to its end.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: The order in which pytest names what it has counted.
KINDS: Final = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors")
_COUNTED: Final = re.compile(r"(\d+) (failed|passed|skipped|deselected|xfailed|xpassed|warnings?|errors?)\b")
_CLOSING: Final = re.compile(r"(?:=+ )?\d+ [a-z]+(?:, \d+ [a-z]+)* in [\d.]+s\b")


def counted(text: str) -> Counter[str]:
    """What the last closing line of one run says; one error when there is none."""
    closing = [line for line in text.splitlines() if _CLOSING.match(line)]
    if not closing:
        return Counter(errors=1)
    counts: Counter[str] = Counter()
    for number, kind in _COUNTED.findall(closing[-1]):
        counts[{"warning": "warnings", "error": "errors"}.get(kind, kind)] += int(number)
    return counts


def closing_line(texts: Iterable[str], seconds: float) -> str:
    """One closing line for the runs that printed `texts` and took `seconds` together."""
    counts = sum((counted(text) for text in texts), Counter())
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    return f"==== {parts or 'no tests ran'} in {seconds:.2f}s ===="


if __name__ == "__main__":
    said = [Path(path).read_text(errors="replace") for path in sys.argv[2:]]
    print(closing_line(said, float(sys.argv[1])))
