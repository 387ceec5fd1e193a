"""A whole kernel for one benchmark: it is started and stopped with `gdn`, and the use of its processes is measured.

BENCH_TREE names another tree whose `gdn` is measured. What asks it then speaks the protocol, by the client for Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from goondan.kernel.cli.attach import attach
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.session import Session
from goondan.kernel.cli.state import locate
from goondan_client import connect
from goondan_client.client import Client

#: The variable with the tree that is measured; without it, this one is.
TREE: Final = "BENCH_TREE"
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
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Swarm:
    """A bundle in a folder of its own; its kernel runs between `start` and `stop`."""

    bundle: Path
    #: The pid of its supervisor, and where its sockets are, while it runs.
    supervisor: int = 0
    run_dir: str = ""

    def use(self) -> None:
        """From now on commands refer to this swarm."""
        folder = str(self.bundle.parent)
        state = {"HOME": folder, "GOONDAN_STATE_ROOT": f"{folder}/state", "XDG_RUNTIME_DIR": f"{folder}/r"}
        os.environ.update(state, GOONDAN_TRUST="1")

    def start(self) -> float:
        """Run `gdn run --detach`. Returns how long it took (seconds)."""
        begun = time.perf_counter()
        told = json.loads(self._gdn("run", "--detach", "--json"))
        self.supervisor, self.run_dir = told["pid"], told["runDir"]
        return time.perf_counter() - begun

    def stop(self) -> None:
        """`gdn stop`."""
        self._gdn("stop")
        self.supervisor = 0

    @staticmethod
    def gdn() -> list[str]:
        """The command of the tree that is measured."""
        return [f"{os.environ.get(TREE) or Path(sys.prefix).parent}/.venv/bin/gdn"]

    def _gdn(self, *arguments: str) -> bytes:
        command = [*self.gdn(), *arguments, "--bundle", str(self.bundle)]
        done = subprocess.run(command, stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stdout.decode(errors='replace')}")
        return done.stdout

    @property
    def state_dir(self) -> Path:
        """The folder of its state."""
        return Path(locate(str(self.bundle)).state_dir)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The kernel's own link of a client; enter it with `async with`."""
        kernel = attach(locate(str(self.bundle)))
        try:
            yield Session(kernel)
        finally:
            kernel.finish()

    def client(self) -> Client:
        """The client for Python; enter it with `async with`."""
        return connect(run_dir=self.run_dir)

    def processes(self) -> dict[int, str]:
        """Every process of the kernel, with its name."""
        return tree(self.supervisor)

    def pid(self, name: str) -> int:
        """The process of this name."""
        return next(pid for pid, known in self.processes().items() if known == name)

    def cpu_by_name(self) -> dict[str, float]:
        """Processor time of all living processes by name, with that of their children that have ended (seconds)."""
        total: dict[str, float] = defaultdict(float)
        for pid, name in self.processes().items():
            total[name] += processor_time(pid)
        return total

    def cpu(self) -> float:
        """The same, all together."""
        return sum(self.cpu_by_name().values())

    def pss(self) -> float:
        """The memory of all processes (GiB). A shared page counts in parts."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                rollup = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="ascii")
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return total / (1 << 20)


def tree(root: int) -> dict[int, str]:
    """A process and all that it and its children have started, each with its name."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
            names[int(entry)] = stat[stat.index("(") + 1 : stat.rindex(")")]
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        found[pid] = names.get(pid, "")
        todo += children.get(pid, [])
    return found


def processor_time(pid: int) -> float:
    """The processor time of a process and of its children that have ended (seconds)."""
    try:
        ended = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[13:15]
        threads = [Path(f"/proc/{pid}/task/{thread}/schedstat") for thread in os.listdir(f"/proc/{pid}/task")]
        return sum(map(int, ended)) * _TICK_S + sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    except OSError:
        return 0.0


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
def environment_kept() -> Iterator[None]:
    """What the block changes in the environment is as before after it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def swarm(live: int = 256, model: str | None = None, bundle: str = BUNDLE) -> Iterator[Swarm]:
    """A swarm that is not started yet. It is stopped and removed at the end. `model` is a Model's `spec` in YAML."""
    with environment_kept(), tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        made = Swarm(Path(folder, "goondan.yaml"))
        text = bundle.replace("LIVE", str(live)).replace("{provider: embedded}", model or "{provider: embedded}")
        made.bundle.write_text(text)
        Path(folder, "r").mkdir(mode=0o700)
        made.use()
        try:
            yield made
        finally:
            if made.supervisor:
                made.use()
                made.stop()
