"""`python -m bench.bombs [--watched] [--seconds N] [--jails N]`: every kind of bomb at once, and a neighbour's calls.

Twenty jails, each of an agent of its own, misbehave for a bounded time in the ways of tests/containment/bombs.py, again
and again, while another agent calls a tool that does nothing. Printed: how each kind of bomb ended, what was left on
disk at most, and how long the neighbour's calls took. `--watched` does without control
groups. Not part of `make bench`: nothing else should run on the machine meanwhile.

Source: issue 4, "Must hold"; sandbox.md section 4.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from schemas.launch import Limits, SandboxSpec
from tests.toolhost_fixture import Bench, bench, make_tool

BOMBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("forks", {"stubborn": True}),
    ("memory", {}),
    ("memory_of_many", {"mb": 40}),
    ("shared_memory", {}),
    ("socket_buffers", {}),
    ("one_file", {}),
    ("many_files", {"writers": 8}),
    ("allocated", {}),
    ("relay", {}),
    ("spin", {}),
    ("output", {}),
    ("printing", {}),
    ("descriptors", {}),
    ("deaf", {}),
)
LIMITS = Limits(
    memory_mb=128,
    processes=32,
    open_files=128,
    file_mb=64,
    disk_mb=256,
    files=2000,
    cpu_seconds=2,
    wall_seconds=10,
    output_mb=1,
)
#: What a bomb that meets no limit may take (milliseconds).
DEADLINE_MS = 4000


async def _bomber(made: Bench, number: int, folder: Path, until: float, told: Counter[str], left: list[int]) -> None:
    name, args = BOMBS[number % len(BOMBS)]
    while time.monotonic() < until:
        folder.mkdir(exist_ok=True)
        result = await made.call(
            f"bomb__{name}", args, workdir=folder, agent=f"bomber-{number}", deadline_ms=DEADLINE_MS, within_s=60.0
        )
        error = result.get("error", {})
        limit = error.get("message", "").removeprefix("the limit ").split(" was reached")[0]
        code = error.get("code", "ok")
        told[f"{name:15} {code}" + (f" {limit}" if " was reached" in error.get("message", "") else "")] += 1
        left.append(sum(path.lstat().st_blocks * 512 for path in folder.iterdir()))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _neighbour(made: Bench, folder: Path, times: list[float]) -> None:
    while True:
        began = time.perf_counter()
        result = await made.call("quiet__quiet", workdir=folder, agent="neighbour")
        assert result["status"] == "ok", result
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)


def _shown(times: list[float]) -> str:
    ordered = sorted(times)
    parts = " ".join(f"p{part} {1000 * ordered[len(ordered) * part // 100]:.2f}" for part in (50, 95, 99))
    return f"{parts} max {1000 * ordered[-1]:.1f} ms of {len(ordered)} calls"


async def _run(options: argparse.Namespace, place: Path) -> None:
    source = (Path(__file__).parents[1] / "tests" / "containment" / "bombs.py").read_text(encoding="utf-8")
    names = [*dict.fromkeys(name for name, _ in BOMBS), "quiet"]
    bomb, quiet = (
        make_tool(place, source, *names, name=name, sandbox=SandboxSpec(limits=LIMITS)) for name in ("bomb", "quiet")
    )
    told: Counter[str] = Counter()
    left: list[int] = []
    quiet_times: list[float] = []
    times: list[float] = []
    work = place / "neighbour"
    work.mkdir()
    async with bench(bomb, quiet, max_jails=options.jails * 2 + 2, grouped=not options.watched) as made:
        for collected, seconds in ((quiet_times, 2.0), (times, float(options.seconds))):
            await made.call("quiet__quiet", workdir=work, agent="neighbour")
            calling = asyncio.ensure_future(_neighbour(made, work, collected))
            until = time.monotonic() + seconds
            if collected is quiet_times:
                await asyncio.sleep(seconds)
            else:
                bombers = (
                    _bomber(made, number, place / f"w{number}", until, told, left) for number in range(options.jails)
                )
                await asyncio.gather(*bombers)
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling
        kept = made.facts.groups is not None
    print(
        f"{options.jails} jails, {'control groups' if kept else 'watched'}, uid {os.geteuid()}, {os.cpu_count()} CPUs"
    )
    for line, count in sorted(told.items()):
        print(f"  {count:4} x {line}")
    print(f"  most left on disk by one jail: {max(left) >> 20} MiB of {LIMITS.disk_mb}")
    print(f"  neighbour alone:          {_shown(quiet_times)}")
    print(f"  neighbour while they bomb: {_shown(times)}")


def main() -> None:
    """Run it in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--watched", action="store_true", help="without control groups")
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--jails", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        asyncio.run(_run(options, Path(folder)))


if __name__ == "__main__":
    main()
