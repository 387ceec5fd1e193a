"""What makes agents quick and small: one fork, filled holes, memory that is given back, a link that leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from goondan.agentproc.start import warmup
from goondan.agentproc.start.app import AgentApp
from goondan.schemas.wire.errors import GoondanError

ROOT = Path(__file__).resolve().parent.parent.parent.parent

#: Objects of 112 bytes with holes between them; how many of the next ones lie in a row, before and after.
HOLES = """
from goondan.agentproc.start.warmup import fill_pools
kept = [bytes(79) for _ in range(4000)][::2]
def in_a_row():
    made = [id(block) for block in [bytes(79) for _ in range(101)]]
    return sum(after - before == 112 for before, after in zip(made, made[1:]))
before = in_a_row()
fill_pools()
print(before, in_a_row())
"""

#: Blocks of the C library's heap, with holes between them; how many of the next ones lie in a row, before and after.
HEAP_HOLES = """
from goondan.agentproc.start.warmup import fill_heap
kept = [bytes(700) for _ in range(2000)][::2]
def in_a_row():
    made = [id(block) for block in [bytes(700) for _ in range(50)]]
    return sum(0 < after - before < 800 for before, after in zip(made, made[1:]))
before = in_a_row()
fill_heap()
print(before, in_a_row())
"""

#: How many pages have the code that makes a page of help, before and after it is laid together.
CODE = """
import argparse
from goondan.agentproc.start.warmup import _lay_together, _run_by
def play(rounds):
    parser = argparse.ArgumentParser()
    parser.add_argument("--word", choices=[word.upper() for word in ("a", "b")])
    assert "{A,B}" in parser.format_help()
def pages(run):
    return len({key // 4096 for key in run})
before = _run_by(play)
_lay_together(before)
print(pages(before), pages(_run_by(play)))
"""

#: What a loop takes of private memory (KiB) until its buffer is given back; and that it still works.
BUFFER = """
import asyncio
from pathlib import Path
from goondan.agentproc.start.app import new_loop
from goondan.agentproc.start.warmup import give_back_untouched
def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
loop = new_loop()
before = private()
give_back_untouched(loop)
print(before - private(), loop.run_until_complete(asyncio.sleep(0, 1)))
"""


def _told(program: str) -> tuple[int, int]:
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = map(int, run.stdout.split())
    return first, second


async def test_the_link_that_leads_nowhere_gets_as_far_as_a_link_without_a_broker() -> None:
    with pytest.raises(GoondanError, match="no welcome") as refused:
        await AgentApp(warmup.NOBODY).link.start(timeout_s=0)
    assert refused.value.info.code == "E_KERNEL_NOT_RUNNING"


def test_the_buffer_of_the_loop_is_given_back() -> None:
    given_back, works = _told(BUFFER)
    assert given_back >= 200
    assert works == 1


def test_what_is_made_after_the_holes_are_filled_lies_together() -> None:
    with_holes, filled = _told(HOLES)
    assert with_holes < 20
    assert filled >= 95
    with_holes, filled = _told(HEAP_HOLES)
    assert with_holes < 20
    assert filled >= 45


def test_the_code_that_runs_is_laid_together_and_does_the_same() -> None:
    scattered, together = _told(CODE)
    assert 2 * together < scattered


#: A process between this one and what it forks. What was forked tells its number, its parent, and what the C library
#: takes for its number.
FORKED = """
import ctypes, os
from goondan.agentproc.start.forkserver import _fork
from goondan.schemas.system.startup import thread_number_address
if os.fork():
    first, second = os.wait()[0], os.wait()[0]
elif not _fork():
    print(os.getpid(), os.getppid(), ctypes.c_int.from_address(thread_number_address()).value)
"""


def test_a_forked_agent_has_the_parent_of_the_fork_server_and_knows_its_number() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid, parent, number = map(int, first.stdout.read().split())
    assert (parent, number) == (first.pid, pid)
