"""`python -m bench.bombs [--watched] [--seconds N] [--jails N]`: every bomb at once, and a neighbour's calls.

Twenty jails, each of an agent of its own, misbehave for a bounded time in the ways of tests/containment/bombs.py, again
and again, while another agent calls a tool that does nothing. It prints how each kind of bomb ended and whether that is
right, the most data that was left on disk, how long the neighbour's calls took, how late the tool host's loop was, and
how busy the machine was. `--watched` uses no control groups. The exit status is 1 when a bomb ended in a wrong way. Not
part of `make bench`: nothing else should run meanwhile.

The right endings. A bomb that reaches a limit ends by it, and the error names the limit. When the jails have so little
processor time that the deadline comes first, the ending is called late. A loop reaches its limit of processor time only
if it gets that much before its deadline (twenty jails on two processors get a tenth of one each). A bomb that reaches
no limit ends by its deadline.

Source: docs/design/sandbox.md sections 3.1 and 4.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from goondan.schemas.bundle.launch import Limits, SandboxSpec
from tests.toolhost_fixture import Bench, bench, make_tool


class Bomb(NamedTuple):
    """One kind of bomb."""

    #: The name of its handler.
    name: str
    #: The arguments of the handler.
    args: dict[str, Any]
    #: The limits that it may reach.
    limits: tuple[str, ...] = ()
    #: Whether its deadline may come first.
    slow: bool = False


BOMBS: Final = (
    Bomb("forks", {"stubborn": True}, ("processes",)),
    Bomb("memory", {}, ("memoryMb",)),
    Bomb("memory_of_many", {"mb": 40}, ("memoryMb",)),
    Bomb("shared_memory", {}, ("memoryMb", "openFiles")),
    Bomb("socket_buffers", {}, ("memoryMb",)),
    Bomb("one_file", {}, ("fileMb",)),
    Bomb("many_files", {"writers": 8}, ("diskMb",)),
    Bomb("allocated", {}, ("diskMb",)),
    Bomb("relay", {}, ("cpuSeconds",), slow=True),
    Bomb("spin", {}, ("cpuSeconds",), slow=True),
    Bomb("output", {}, ("memoryMb", "output")),
    Bomb("printing", {}, ("cpuSeconds",), slow=True),
    Bomb("descriptors", {}, ("openFiles",)),
    Bomb("deaf", {}, slow=True),
)
LIMITS: Final = Limits(
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
#: The deadline of a bomb (milliseconds).
DEADLINE_MS: Final = 6000
#: The pause after each call of the neighbour, and between two measurements of the loop (seconds).
PAUSE_S: Final = 0.01
BEAT_S: Final = 0.002


def ending(result: dict[str, Any]) -> tuple[str, str | None]:
    """The code that a call ended with, and the limit that it names."""
    error = result.get("error", {})
    message = error.get("message", "")
    limit = None
    if " was reached" in message:
        limit = message.removeprefix("the limit ").split(" was reached")[0]
    elif message.startswith("the output has"):
        limit = "output"
    return error.get("code", "ok"), limit


def verdict(bomb: Bomb, code: str, limit: str | None) -> str:
    """`right`, `late` or `WRONG`."""
    if code == "E_TOOL_LIMIT" and limit in bomb.limits:
        return "right"
    if code == "E_TOOL_TIMEOUT":
        return "right" if bomb.slow else "late"
    return "WRONG"


async def last_write(made: Bench, folder: Path) -> None:
    """Wait until all jails that are being ended in this folder are gone. Until then they write."""
    for session in made.host.sessions.pool.sessions():
        if not session.launching:
            live = made.live_of(session)
            if live.jail.dying and live.jail.plan.workdir == str(folder):
                await live.gone.wait()


class Cleaner:
    """A process that removes folders and measures their size. Its priority is lower than that of everything measured
    here.
    """

    SCRIPT: Final = """
import os, shutil, sys
os.nice(19)
for line in sys.stdin:
    folder = line.rstrip()
    held = 0
    for above, _, names in os.walk(folder):
        for name in names:
            try: held += os.lstat(os.path.join(above, name)).st_blocks * 512
            except OSError: pass
    shutil.rmtree(folder, ignore_errors=True)
    print(held, flush=True)
"""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def start(cls) -> Cleaner:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", cls.SCRIPT, stdin=pipe, stdout=pipe, start_new_session=True
            )
        )

    async def clear(self, folder: Path) -> int:
        """Remove the folder. Returns its size (bytes)."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None, "it was started with pipes"
        assert back is not None, "it was started with pipes"
        async with self._one_at_a_time:
            to.write(f"{folder}\n".encode())
            return int(await back.readline())

    async def close(self) -> None:
        self._process.terminate()
        await self._process.wait()


class Run:
    """The measurements of one run."""

    def __init__(self, made: Bench, cleaner: Cleaner) -> None:
        self.made = made
        self.cleaner = cleaner
        self.told: Counter[tuple[str, str]] = Counter()
        self.left: list[int] = []
        self.over = False

    async def bomber(self, number: int, folder: Path, until: float) -> None:
        """One agent that misbehaves in one way."""
        bomb = BOMBS[number % len(BOMBS)]
        options: dict[str, Any] = {"agent": f"bomber-{number}", "deadline_ms": DEADLINE_MS, "within_s": 60.0}
        while time.monotonic() < until:
            folder.mkdir(parents=True, exist_ok=True)
            result = await self.made.call(f"bomb__{bomb.name}", bomb.args, workdir=folder, **options)
            code, limit = ending(result)
            self.told[bomb.name, f"{verdict(bomb, code, limit):5}  {code} {limit or ''}"] += 1
            await last_write(self.made, folder)
            self.left.append(await self.cleaner.clear(folder))

    async def neighbour(self, folder: Path) -> list[float]:
        """Make another agent's calls, one after another. Returns the time of each (seconds)."""
        times = []
        while not self.over:
            began = time.perf_counter()
            result = await self.made.call("quiet__quiet", workdir=folder, agent="neighbour")
            assert result["status"] == "ok", result
            times.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
        return times

    async def beat(self) -> list[float]:
        """Measure how late the loop is (seconds), again and again."""
        late = []
        while not self.over:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            late.append(max(0.0, time.perf_counter() - began - BEAT_S))
        return late


def shown(times: list[float], what: str) -> str:
    """Percentiles in milliseconds."""
    ordered = sorted(times)
    parts = " ".join(f"p{part} {1000 * ordered[len(ordered) * part // 100]:.2f}" for part in (50, 95, 99))
    return f"{parts} max {1000 * ordered[-1]:.1f} ms of {len(ordered)} {what}"


def waited_s() -> float:
    """How long this process's first thread, which runs the loop, was ready to run and did not (seconds)."""
    with open("/proc/self/schedstat", encoding="ascii") as source:
        return int(source.read().split()[1]) / 1e9


async def run(options: argparse.Namespace, place: Path) -> int:
    """Measure and print. Returns how many bombs ended in a wrong way."""
    source = (Path(__file__).parents[1] / "tests" / "containment" / "bombs.py").read_text(encoding="utf-8")
    names = [*dict.fromkeys(bomb.name for bomb in BOMBS), "quiet"]
    bomb, quiet = (
        make_tool(place, source, *names, name=name, sandbox=SandboxSpec(limits=LIMITS)) for name in ("bomb", "quiet")
    )
    work = place / "neighbour"
    work.mkdir(parents=True)
    busy = os.getloadavg()[0]
    cleaner = await Cleaner.start()
    async with bench(
        bomb,
        quiet,
        state_dir=place / "state",
        max_jails=options.jails * 2 + 2,
        grouped=not options.watched,
    ) as made:
        await made.call("quiet__quiet", workdir=work, agent="neighbour")
        alone = Run(made, cleaner)
        calling = asyncio.ensure_future(alone.neighbour(work))
        await asyncio.sleep(2)
        alone.over = True
        quiet_times = await calling

        bombing = Run(made, cleaner)
        collected = asyncio.gather(bombing.neighbour(work), bombing.beat())
        waited, began = waited_s(), time.monotonic()
        until = began + options.seconds
        folders = [place / f"w{number}" for number in range(options.jails)]
        await asyncio.gather(*(bombing.bomber(number, folder, until) for number, folder in enumerate(folders)))
        waited, took = waited_s() - waited, time.monotonic() - began
        bombing.over = True
        times, late = await collected
        kept = mechanism(made)
    await cleaner.close()
    print(f"{options.jails} jails, {kept}, uid {os.geteuid()}, {os.cpu_count()} CPUs, load before: {busy:.1f}")
    for (name, how), count in sorted(bombing.told.items()):
        print(f"  {count:4} x {name:15} {how}")
    judged: Counter[str] = Counter()
    for (_, how), count in bombing.told.items():
        judged[how.split()[0]] += count
    print(f"  ended right: {judged['right']}, late: {judged['late']}, WRONG: {judged['WRONG']}")
    print(f"  most left on disk by one jail: {max(bombing.left) >> 20} MiB of {LIMITS.disk_mb}")
    print(f"  the loop was late:         {shown(late, 'looks')}, and waited for a CPU {waited / took:.0%} of the time")
    print(f"  neighbour alone:           {shown(quiet_times, 'calls')}")
    print(f"  neighbour while they bomb: {shown(times, 'calls')}")
    return judged["WRONG"]


def arguments(purpose: str | None) -> argparse.ArgumentParser:
    """The command line's options for the mechanisms that keep limits."""
    parser = argparse.ArgumentParser(description=(purpose or "").partition("\n")[0])
    parser.add_argument("--watched", action="store_true", help="without control groups")
    return parser


def mechanism(made: Bench) -> str:
    """The mechanisms that keep the limits, in words."""
    return "control groups" if made.facts.groups is not None else "watched"


def in_a_folder(
    run: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, int]], options: argparse.Namespace
) -> int:
    """The exit status of `run` in a temporary folder: 1 when a bomb or a call ended in a wrong way."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        return 1 if uvloop.run(run(options, Path(folder))) else 0


def main() -> int:
    """Run it in a temporary folder."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--jails", type=int, default=20)
    return in_a_folder(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
