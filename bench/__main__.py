"""`python -m bench`: run the benchmarks and print a table.

`--record` also keeps what was measured in bench/results.json, in place of what stood there, and writes the page and the
READMEs from it (bench/page.py); other benchmarks' figures stay. `--against TREE` runs them alternately
here and in another tree of this repository, and prints the quotients.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import sys
from pathlib import Path

from bench import MODULES, page, pairs, records
from bench.compare import NATIVE, Benchmark, machine, run, table
from goondan.schemas.transport import chosen

#: Those that make a hundred thousand of something first: minutes.
LONG = ("queued", "journal_start", "trace", "scale", "dormant", "curves")
#: Beside other systems; they must be installed first (bench/others.py).
PEERS = ("others",)


def main(arguments: list[str]) -> int:
    """Run the benchmarks that were asked for. Returns 0 even when a goal is missed: a slow machine is no broken
    program.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks beside their baselines.")
    parser.add_argument("names", nargs="*", choices=[[], *MODULES, *PEERS], metavar="NAME", help="default: all")
    parser.add_argument("--short", action="store_true", help=f"all but {', '.join(LONG)}")
    parser.add_argument("--rounds", type=int, default=5, help="how often every side runs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement (default: %(default)s)")
    parser.add_argument("--against", type=Path, metavar="TREE", help="compare with this tree, pair by pair (pairs.py)")
    parser.add_argument("--sides", help="with --against: only these sides, with commas between them")
    parser.add_argument("--record", action="store_true", help="keep the figures in bench/results.json")
    options = parser.parse_args(arguments)
    names = options.names or [name for name in MODULES if not (options.short and name in LONG)]
    found: list[Benchmark] = [importlib.import_module(f"bench.{name}").BENCHMARK for name in names]
    if options.record:
        atexit.register(page.main, [])
    if options.against is not None:
        sides = options.sides.split(",") if options.sides else None
        there = options.against.resolve()
        pairs.main(found, there, options.rounds, options.seconds, sides=sides, record=options.record)
        return 0
    facts = machine()
    for benchmark in found:
        rounds = min(options.rounds, benchmark.rounds)
        told = records.facts(facts, chosen(), rounds, options.seconds)
        rows = run(benchmark, rounds, options.seconds, lambda line: print(line, file=sys.stderr, flush=True))
        print(table(benchmark, rows), flush=True)
        report = records.read()
        entry = records.put(report, benchmark, rows, told)
        for row in rows:
            others = [side for side in list(row.runs)[1:] if side != NATIVE and row.runs[side]]
            slow = [side for side in others if records.slow_hour(entry, row, side)]
            if slow:
                print(f"  {row.metric.name}: {', '.join(slow)} shows a slow hour", flush=True)
        if options.record:
            records.write(report)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), f"load {os.getloadavg()[0]:.1f}", sep=", ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
