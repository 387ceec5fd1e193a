"""`gdn run --detach` on the quickstart, until it returns: the kernel is ready then.

`first` begins with an empty home directory: the workspace's state is made, and the modules of the bundle's tools are
inspected in a jail. `again` is each later start. `processor` is the processor time of all programs until then: on a
busy machine it is more reliable than the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from bench.compare import Benchmark, Metric
from goondan.kernel import paths

#: The tree that is measured: that of the interpreter, also where this file is of another one (bench/pairs.py).
ROOT = Path(paths.__file__).resolve().parent.parent
GDN = str(Path(sys.executable).parent / "gdn")
BUNDLE = ("--bundle", str(ROOT / "examples" / "quickstart"))
#: The unit of times in /proc/PID/stat (seconds).
TICK = 1 / os.sysconf("SC_CLK_TCK")


def start(home: str) -> tuple[float, float]:
    """Start and stop a kernel with that home directory. Returns the milliseconds until it was ready, and of processor
    time.
    """
    # No PYTHON*: without bytecode, say, an interpreter that heeds it would compile everything anew.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOONDAN_", "PYTHON"))}
    environment |= {"HOME": home, "XDG_RUNTIME_DIR": f"{home}/r", "GOONDAN_PROVIDER": "embedded", "GOONDAN_TRUST": "1"}
    begun = time.perf_counter()
    command = subprocess.Popen([GDN, "run", "--detach", "--json", *BUNDLE], env=environment, stdout=subprocess.PIPE)
    said = command.stdout.read() if command.stdout is not None else b""
    _, status, used = os.wait4(command.pid, 0)
    took = time.perf_counter() - begun
    command.returncode = os.waitstatus_to_exitcode(status)
    try:
        if command.returncode:
            raise SystemExit(f"gdn run: {command.returncode}")
        processor = used.ru_utime + used.ru_stime + sum(map(processor_time, descendants(json.loads(said)["pid"])))
    finally:
        subprocess.run([GDN, "stop", *BUNDLE], env=environment, check=True, stdout=subprocess.DEVNULL)
    return took * 1e3, processor * 1e3


def descendants(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from descendants(int(child))


def processor_time(pid: int) -> float:
    """The processor time of a process and of its children that have ended (seconds)."""
    try:
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15]
        threads = [Path(f"/proc/{pid}/task/{thread}/schedstat") for thread in os.listdir(f"/proc/{pid}/task")]
        return sum(map(int, ended)) * TICK + sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    except OSError:
        return 0.0


@contextmanager
def empty_home() -> Iterator[str]:
    """A home directory with nothing in it but a place for sockets."""
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as home:
        os.mkdir(f"{home}/r", 0o700)
        yield home


def side(again: bool, seconds: float) -> Mapping[str, float]:
    """One start."""
    with empty_home() as home:
        if again:
            start(home)
        ready, processor = start(home)
        return {"ready": ready, "processor": processor}


BENCHMARK = Benchmark(
    name="start",
    what="`gdn run --detach` on the quickstart, until the kernel is ready",
    sides={"first": partial(side, False), "again": partial(side, True)},
    metrics=[Metric("ready", "ms", "lower"), Metric("processor", "ms", "lower", against={"cacb0f6e": 0.5})],
)
