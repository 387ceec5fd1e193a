"""One run of one side of a benchmark, by the tree whose interpreter runs this: see bench/pairs.py.

    TREE/.venv/bin/python -I bench/one_run.py NAME SIDE SECONDS

SIDE is empty where all sides are measured together. One line of JSON: side -> metric -> figure; nothing, if that tree's
benchmark has no such side.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def benchmark(name: str) -> Any:
    """That tree's own, or ours where it has none of this name."""
    if importlib.util.find_spec(f"bench.{name}") is not None:
        return importlib.import_module(f"bench.{name}").BENCHMARK
    spec = importlib.util.spec_from_file_location(f"bench.{name}", Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise SystemExit(f"there is no benchmark {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.BENCHMARK


def main(name: str, side: str, seconds: str) -> None:
    """Measure and print."""
    sides = benchmark(name).sides
    if not side:
        figures = sides.measure(float(seconds) * len(sides.names))
    else:
        figures = {side: sides[side](float(seconds))} if side in sides else {}
    print(json.dumps({name: dict(found) for name, found in figures.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
