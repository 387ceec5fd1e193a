"""A whole kernel for one benchmark: it is started and stopped with `gdn`, and the use of its processes is measured."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from goondan.kernel import lock
from goondan.kernel.cli.attach import attach
from goondan.kernel.cli.session import Message, Session
from goondan.kernel.cli.state import locate

#: A turn that takes longer is stuck (seconds).
PATIENCE_S = 120.0
#: An agent with the console for a model, so that a turn takes only the kernel's own time.
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/agents, Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: bench}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}], policy: {maxLiveAgents: LIVE}}
"""
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Swarm:
    """A bundle in a folder of its own; its kernel runs between `start` and `stop`."""

    bundle: Path
    runs: bool = False

    def use(self) -> None:
        """From now on commands refer to this swarm."""
        folder = self.bundle.parent
        os.environ.update(GOONDAN_STATE_ROOT=f"{folder}/state", XDG_RUNTIME_DIR=f"{folder}/r", GOONDAN_TRUST="1")

    def start(self) -> float:
        """Run `gdn run --detach`. Returns how long it took (seconds)."""
        begun = time.perf_counter()
        self._gdn("run", "--detach")
        self.runs = True
        return time.perf_counter() - begun

    def stop(self) -> None:
        """`gdn stop`."""
        self._gdn("stop")
        self.runs = False

    def _gdn(self, *arguments: str) -> None:
        command = [sys.executable, "-I", "-m", "goondan.kernel.cli", *arguments, "--bundle", str(self.bundle)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    @property
    def state_dir(self) -> Path:
        """The folder of its state."""
        return Path(locate(str(self.bundle)).state_dir)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A link of a client; enter it with `async with`."""
        kernel = attach(locate(str(self.bundle)))
        try:
            yield Session(kernel)
        finally:
            kernel.finish()

    def processes(self) -> dict[int, str]:
        """Every process of the kernel, with its name."""
        record = lock.read_record(str(self.state_dir))
        if record is None:
            raise SystemExit("the kernel of the benchmark has gone")
        children: dict[int, list[int]] = {}
        names: dict[int, str] = {}
        for entry in os.listdir("/proc"):
            with suppress(OSError, ValueError):
                stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
                names[int(entry)] = stat[stat.index("(") + 1 : stat.rindex(")")]
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
        found, todo = {}, [record.pid]
        while todo:
            pid = todo.pop()
            found[pid] = names.get(pid, "")
            todo += children.get(pid, [])
        return found

    def pid(self, name: str) -> int:
        """The process of this name."""
        return next(pid for pid, known in self.processes().items() if known == name)

    def cpu(self) -> float:
        """Processor time of all living processes, with that of their children that have ended (seconds)."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
                total += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        return total / _TICKS_S

    def pss(self) -> float:
        """The memory of all processes (GiB). A shared page counts in parts."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                rollup = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="ascii")
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return total / (1 << 20)


async def said(session: Session, instance: str, text: str) -> float:
    """One turn that must succeed. Returns how long it took (seconds)."""
    begun = time.perf_counter()
    answer = await session.ask(Message("main", instance, text), timeout_s=PATIENCE_S)
    if answer.status != "completed":
        raise SystemExit(f"{text[:40]}: {answer}")
    return time.perf_counter() - begun


async def all_said(session: Session, instances: Sequence[str], text: str) -> list[float]:
    """The same for many at once."""
    return await asyncio.gather(*(said(session, instance, text) for instance in instances))


@contextmanager
def swarm(live: int = 256, model: str | None = None) -> Iterator[Swarm]:
    """A swarm that is not started yet. It is stopped and removed at the end. `model` is a Model's `spec` in YAML."""
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        bundle = Path(folder, "goondan.yaml")
        bundle.write_text(
            BUNDLE.replace("LIVE", str(live)).replace("{provider: embedded}", model or "{provider: embedded}")
        )
        Path(folder, "r").mkdir(mode=0o700)
        made = Swarm(bundle)
        made.use()
        try:
            yield made
        finally:
            if made.runs:
                made.use()
                made.stop()
