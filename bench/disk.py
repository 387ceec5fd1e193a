"""`python -m bench.disk [--watched] [--rounds N] [--jails N] [--writers N,N]`: by how much jails exceed `diskMb`.

So many jails at once fill their workdirs in the ways of tests/containment/writers.py, each with several processes,
while one more jail writes a little and rests; it must never be ended. Each way is measured once a round for each number
of processes. It prints how much data was left on disk (nameless files leave none), and how the calls ended. The exit
status is 1 when a call ended by anything but `diskMb` or its deadline. Not part of `make bench`: nothing else should
run meanwhile.

Source: docs/design/sandbox.md section 4; docs/decisions/029.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

from bench.bombs import Cleaner, arguments, ending, in_a_folder, last_write, mechanism
from goondan.schemas.bundle.launch import Limits, SandboxSpec
from tests.containment.writers import KINDS
from tests.toolhost_fixture import Bench, bench, make_tool

LIMITS: Final = Limits(
    memory_mb=512, processes=32, file_mb=64, disk_mb=256, files=20_000, cpu_seconds=30, wall_seconds=60, output_mb=1
)
#: The deadline of a call (milliseconds).
DEADLINE_MS: Final = 30_000


class Run:
    """The measurements of one run."""

    def __init__(self, made: Bench, cleaner: Cleaner, place: Path) -> None:
        self.made = made
        self.cleaner = cleaner
        self.place = place
        self.left: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.told: Counter[str] = Counter()
        self.innocent: Counter[str] = Counter()
        self.work: list[tuple[str, int]] = []
        self.over = False

    async def jail(self, number: int) -> None:
        """One agent that fills its workdir in one way after another."""
        while self.work:
            kind, writers = self.work.pop()
            folder = self.place / f"w{number}"
            folder.mkdir(parents=True, exist_ok=True)
            args: dict[str, Any] = {"kind": kind, "writers": writers}
            result = await self.made.call(
                "disk__fill", args, workdir=folder, agent=f"a{number}", deadline_ms=DEADLINE_MS, within_s=60.0
            )
            code, limit = ending(result)
            right = (code, limit) == ("E_TOOL_LIMIT", "diskMb")
            late = code == "E_TOOL_TIMEOUT"  # it was so short of processors, or the disk so slow
            self.told["right" if right else "late" if late else f"WRONG {kind}: {result.get('error')}"] += 1
            await last_write(self.made, folder)
            self.left[kind, writers].append(await self.cleaner.clear(folder) >> 20)

    async def innocent_one(self) -> None:
        """Another agent, whose jail writes 20 MiB again and again."""
        folder = self.place / "innocent"
        folder.mkdir(parents=True)
        while not self.over:
            result = await self.made.call("little__little", workdir=folder, agent="innocent", deadline_ms=DEADLINE_MS)
            self.innocent[ending(result)[0]] += 1


async def run(options: argparse.Namespace, place: Path) -> int:
    """Measure and print. Returns how many calls ended in a wrong way."""
    source = (Path(__file__).parents[1] / "tests" / "containment" / "writers.py").read_text(encoding="utf-8")
    disk = make_tool(place, source, "fill", name="disk", sandbox=SandboxSpec(limits=LIMITS))
    little = make_tool(place, source, "little", name="little", sandbox=SandboxSpec(limits=LIMITS))
    busy = os.getloadavg()[0]
    cleaner = await Cleaner.start()
    async with bench(
        disk,
        little,
        state_dir=place / "state",
        max_jails=options.jails * 2 + 2,
        grouped=not options.watched,
    ) as made:
        measured = Run(made, cleaner, place)
        kinds = options.kinds.split(",") if options.kinds else list(KINDS)
        numbers = [int(number) for number in options.writers.split(",")]
        measured.work = [(kind, number) for _ in range(options.rounds) for number in numbers for kind in kinds]
        innocent = asyncio.ensure_future(measured.innocent_one())
        began = time.monotonic()
        await asyncio.gather(*(measured.jail(number) for number in range(options.jails)))
        took = time.monotonic() - began
        measured.over = True
        await innocent
        kept = mechanism(made)
    await cleaner.close()
    head = f"{options.jails} jails, {kept}, uid {os.geteuid()}, {os.cpu_count()} CPUs"
    print(f"{head}, load before {busy:.1f}, {took:.0f} s; MiB left of {LIMITS.disk_mb}, the middle and the most")
    for kind in kinds:
        shown = []
        for number in numbers:
            left = sorted(measured.left[kind, number])
            shown.append(f"{number} writers: {left[len(left) // 2]:4} {left[-1]:4}")
        print(f"  {kind:10} {'   '.join(shown)}")
    every = sorted(each for (kind, _), left in measured.left.items() for each in left if kind != "nameless")
    within = sum(each <= LIMITS.disk_mb for each in every)
    print(f"  all: {every[len(every) // 2]} {every[-1]}; {within} of {len(every)} stayed within the limit")
    print(f"  ended: {dict(measured.told)}; the one that writes little: {dict(measured.innocent)}")
    return sum(count for how, count in measured.told.items() if how not in ("right", "late")) + sum(
        count for how, count in measured.innocent.items() if how != "ok"
    )


def main() -> int:
    """Run it in a temporary folder."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jails", type=int, default=8)
    parser.add_argument("--writers", default="2,8", help="numbers of processes that write in one jail")
    parser.add_argument("--kinds", default="", help="those of tests/containment/writers.py; default all")
    return in_a_folder(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
