"""`python -m bench`: run the benchmarks and print a table; a run of all of them also writes bench/results.json.

`--against TREE` runs them alternately here and in another tree of this repository, and prints the differences.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from pathlib import Path

from bench import pairs
from bench.compare import Benchmark, machine, run, table

RESULTS = Path(__file__).parent / "results.json"
#: The benchmarks run in this order. Each module has one BENCHMARK.
MODULES = (
    "round_trip",
    "durable",
    "durable_power",
    "asking",
    "python_client",
    "node_client",
    "queued",
    "journal_start",
    "tool_call",
    "arguments",
    "extensions",
    "mcp_sdk",
    "mcp_jailed",
    "cold_jail",
    "forked_call",
    "javascript",
    "walls",
    "agent",
    "turn",
    "attachments",
    "code_mode",
    "trace",
    "recovery",
    "history",
    "scale",
    "dormant",
    "start",
)


def main(arguments: list[str]) -> int:
    """Run the benchmarks that were asked for. Returns 0 even when a goal is missed: a slow machine is no broken
    program.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks beside their baselines.")
    parser.add_argument("names", nargs="*", choices=[[], *MODULES], metavar="NAME", help="which ones (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="how often every side runs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement (default: %(default)s)")
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="compare with this tree, pair by pair (see pairs.py)"
    )
    options = parser.parse_args(arguments)
    if options.against is not None:
        found = [importlib.import_module(f"bench.{name}").BENCHMARK for name in options.names or MODULES]
        pairs.main(found, options.against.resolve(), options.rounds, options.seconds)
        return 0

    facts = machine()
    results = {}
    for name in options.names or MODULES:
        benchmark: Benchmark = importlib.import_module(f"bench.{name}").BENCHMARK
        rows = run(benchmark, options.rounds, options.seconds, lambda line: print(line, file=sys.stderr, flush=True))
        print(table(benchmark, rows), flush=True)
        results[name] = {
            row.metric.name: {
                "unit": row.metric.unit,
                "medians": row.medians,
                "runs": row.runs,
                "target": row.target,
                "met": row.met,
            }
            for row in rows
        }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    report = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "benchmarks": results,
    }
    if not options.names:
        RESULTS.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
