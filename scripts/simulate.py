"""`make simulate`: lives through many seeded histories of a whole bus, and says how long that took.

    python -m scripts.simulate [--histories 10000] [--first 0] [--workers N]

The histories are those of tests/unit/kernel/broker/histories.py, and as many of each feature that has some
(tests/features/NAME/histories.py). Exit status 1 if something did not hold in one of them; `--first N --histories 1`
lives through that one again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.unit.kernel.broker.histories import history

#: Histories that a worker takes at once.
CHUNK: Final = 50
#: Failures that are printed whole.
SHOWN: Final = 5
#: Those of features: `history(number)` in each.
OF_FEATURES: Final = tuple(
    import_module(f"tests.features.{path.parent.name}.histories")
    for path in sorted(Path(__file__).resolve().parents[1].glob("tests/features/*/histories.py"))
)


def main(arguments: list[str] | None = None) -> int:
    """Run the histories; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=10_000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default: %(default)s)")
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=processors, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    last = options.first + options.histories
    chunks = [range(at, min(at + CHUNK, last)) for at in range(options.first, last, CHUNK)]
    failures: list[tuple[int, str]] = []
    seen: Counter[str] = Counter()
    with multiprocessing.Pool(max(1, options.workers)) as pool:
        for done, (counted, failed) in enumerate(pool.imap_unordered(_live, chunks), 1):
            seen.update(counted)
            failures += failed
            if done % 20 == 0:
                print(f"{done * CHUNK} of {options.histories}", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    for number, text in sorted(failures)[:SHOWN]:
        print(f"history {number}:\n{text}")
    print(
        f"histories {options.first} to {last - 1}: {len(failures)} failed; {took:.1f} s, "
        f"{1000 * took / max(1, options.histories):.1f} ms each; "
        + ", ".join(f"{value} {name}" for name, value in sorted(seen.items()))
    )
    if failures:
        print(f"failed: {sorted(number for number, _ in failures)[:100]}")
    return 1 if failures else 0


def _live(numbers: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """What was lived through, and what failed: number and traceback."""
    seen: Counter[str] = Counter()
    failed = []
    for number in numbers:
        try:
            for feature in OF_FEATURES:
                feature.history(number)
            world = history(number)
        except Exception:
            failed.append((number, traceback.format_exc()))
            continue
        seen["histories of features"] += len(OF_FEATURES)
        seen["events"] += sum(len(client.asked) for client in world.clients)
        seen["tool calls"] += len(world.ran)
        seen["deaths of the broker"] += world.brokers_killed
    return seen, failed


if __name__ == "__main__":
    sys.exit(main())
