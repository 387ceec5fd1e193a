"""A swarm that does a real piece of work (purpose_swarm.py), and `kill -9` of each kind of process at each of ten
moments: the files in the shared folder are right, and each message has one answer.

`make test` kills a few at a time, by a seed; `make chaos` runs the whole table, one kill in each job.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from goondan.schemas.wire.errors import GoondanError
from tests.chaos import purpose_swarm as swarm
from tests.kernel_fixture import Sandbox, sandbox, wait_until

CHAOS: Final = "GOONDAN_CHAOS_KILLS" in os.environ
KINDS: Final = ("supervisor", "broker", "forkserver", "agent", "toolhost", "worker", "mcp worker", "mcp")
#: How long a job may take that is disturbed, and one moment until it is reached (seconds).
JOB_S: Final = 100.0
#: Kills in the one job of `make test`, each of another kind and at another moment.
FEW: Final = 3


class Moment(NamedTuple):
    """When something is killed."""

    #: The agent whose turn runs.
    agent: str
    #: What it was told, and the step: its model is being asked. "" and 0: a tool works.
    message: str = ""
    step: int = 0
    #: The mark that the tool makes when it has begun, and the name of the tool.
    mark: str = ""
    tool: str = ""


MOMENTS: Final = {
    "a command of the coder runs": Moment("coder", mark=".at-coder", tool="bash"),
    "the coder's model is asked": Moment("coder", "Step 1: the library.", 1),
    "a tool with a dependency works": Moment("coder", mark=".at-venv", tool="table"),
    "the MCP server works": Moment("coder", mark=".at-mcp"),
    "a script of the skill runs": Moment("coder", mark=".at-skill", tool="skills"),
    "a command of the reviewer runs, and two agents wait": Moment("reviewer", mark=".at-reviewer", tool="bash"),
    "the reviewer is about to answer": Moment("reviewer", "Review lib/stats.py.", 4),
    "the coder is about to answer": Moment("coder", "Step 1: the library.", 11),
    "a command of the planner runs": Moment("planner", mark=".at-planner", tool="bash"),
    "the last answer is being made": Moment("planner", swarm.JOB, 8),
}


class Work:
    """The kernel, its model, and jobs."""

    def __init__(self, kernel: Sandbox, model: swarm.Model) -> None:
        self.kernel, self.model = kernel, model

    def folder(self, key: str) -> Path:
        (state,) = self.kernel.home.glob("state/workspaces/*")
        return state / "instances" / "planner" / key / "workspace"

    def pids(self, kind: str, moment: Moment, key: str) -> list[int]:
        """The processes that are killed; for a jail that of the tool which works, or any of the job's."""
        if kind == "mcp worker":
            return [pid for pid, command in self.kernel.processes().items() if "mcp/jail/start.py" in command]
        try:
            rows = [row for row in self.kernel.ps() if row["role"] == kind and row["pid"]]
        except (GoondanError, OSError):  # nobody answers just now
            return []
        if kind in ("agent", "worker", "mcp"):
            rows = [row for row in rows if row["instanceKey"] == key]
        names = {"agent": moment.agent, "worker": moment.tool}.get(kind)
        return [int(row["pid"]) for row in rows if not names or row["name"] == names]

    def kill(self, kind: str, moment: Moment, key: str) -> None:
        for pid in wait_until(lambda: self.pids(kind, moment, key), what=f"a process of the kind {kind}"):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if kind == "supervisor":
            self.kernel.wait_for_nothing()
            self.kernel.detach()

    def killed_at(self, plan: dict[str, str], key: str) -> list[str]:
        """Do the job, and kill at each moment of the plan. Returns the moments, as they were reached."""
        done: list[str] = []
        faults: list[BaseException] = []
        lock = threading.Lock()

        def now(name: str) -> None:
            with lock:  # one at a time
                if name in done:
                    return
                done.append(name)
                try:
                    self.kill(plan[name], MOMENTS[name], key)
                except BaseException as error:
                    faults.append(error)

        def before(agent: str, message: str, step: int) -> None:
            for name in plan:
                if MOMENTS[name][:3] == (agent, message, step):
                    now(name)

        def watch() -> None:
            marks = {MOMENTS[name].mark: name for name in plan if MOMENTS[name].mark}
            folder = self.folder(key)
            while not over.wait(0.01):
                for mark in [mark for mark in marks if (folder / mark).exists()]:
                    now(marks.pop(mark))

        over = threading.Event()
        watching = threading.Thread(target=watch)
        self.model.before, self.model.pauses = before, {MOMENTS[name].mark for name in plan} - {""}
        watching.start()
        try:
            self.job(key, lock)
        finally:
            over.set()
            watching.join()
            self.model.before = lambda agent, message, step: None
            assert not faults, faults  # here: without the kernel that was to be started again, nobody answers
        return done

    def job(self, key: str, restarting: threading.Lock) -> None:
        """Send the message until it is answered, under one id; then look at everything."""
        answers = []
        for _ in range(4):
            sent = self.kernel.gdn("send", swarm.JOB, *self.names(key), timeout=JOB_S)
            if sent.status == 0:
                answers.append(sent.json)
                break
            assert sent.json["error"]["code"] in ("E_KERNEL_LOST", "E_KERNEL_NOT_RUNNING"), sent.out
            with restarting:
                pass
        assert answers, "nobody answered"
        asked = self.model.asked.total()
        again = self.kernel.gdn("send", swarm.JOB, *self.names(key)).json
        assert (again["turnId"], again["response"]) == (answers[0]["turnId"], swarm.LAST + swarm.SEAL)
        assert self.model.asked.total() == asked, "the same id is the same event"
        self.judge(key)

    def names(self, key: str) -> tuple[str, ...]:
        return ("--instance", key, "--event-id", f"job-{key}", "--json")

    def judge(self, key: str) -> None:
        """The files are right, and every agent had each message once and gave it one answer."""
        assert self.model.faults == []
        folder = self.folder(key)
        found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        assert {name: found[name].read_text() for name in found if not name.startswith(".at-")} == swarm.FILES
        for agent in ("planner", "coder", "reviewer"):
            assert self.kernel.gdn("send", agent, swarm.AUDIT, "--instance", key).out == f"shown{swarm.SEAL}\n"
            assert swarm.turns_of(self.model.shown[agent]) == swarm.expected_turns(agent), agent


@pytest.fixture(scope="module")
def work() -> Iterator[Work]:
    model = swarm.Model()
    server = swarm.serve(model)
    try:
        with sandbox("") as kernel:
            swarm.make_bundle(kernel.home, model.base)
            kernel.detach()
            yield Work(kernel, model)
    finally:
        server.shutdown()
        server.server_close()


def few(seed: int) -> dict[str, str]:
    """A few kinds, each at a moment of its own."""
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(len(MOMENTS)), FEW))
    return {list(MOMENTS)[number]: kind for number, kind in zip(moments, chance.sample(KINDS, FEW), strict=True)}


def test_the_job_has_forty_steps_and_each_kind_of_process_is_in_it() -> None:
    assert swarm.STEPS == 40
    assert len(MOMENTS) == 10
    for moment in MOMENTS.values():
        if moment.message:
            assert moment.step < len(swarm.SCRIPTS[moment.agent, moment.message])


@pytest.mark.feature("mcp", "skills")
@pytest.mark.timeout(120)
def test_a_job_with_a_few_kills(work: Work) -> None:
    plan = few(27)
    assert sorted(work.killed_at(plan, "few")) == sorted(plan), json.dumps(plan)


@pytest.mark.feature("mcp", "skills")
@pytest.mark.skipif(not CHAOS, reason="make chaos")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table(work: Work, kind: str, moment: str) -> None:
    key = f"{KINDS.index(kind)}-{list(MOMENTS).index(moment)}"
    for asked in (work.model.asked, work.model.shown):
        asked.clear()
    assert work.killed_at({moment: kind}, key) == [moment]
