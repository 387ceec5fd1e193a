"""What one warm tool call costs each process on its way, counted and not timed: how often a thread falls asleep (so
often somebody had to wake it), and how often a process reads and writes.

The processes are the real ones: broker, tool host and jail; the agent's side is in this process. Counts of whole calls
hold on a machine that does other work, times do not. Where time decides (a watcher that looks every few milliseconds),
the bound is so many looks in the time that the calls took.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from bench.programs import broker, tool_host
from bench.tool_call import bare_agent, tool
from goondan.schemas.transport import VARIABLE
from goondan.toolhost.inside.worker import TAKEOVER_S
from goondan.toolhost.watch.watch import DISK_S

#: Calls before something is counted: the jail is there then, and its export is known to be quick.
WARM_UP = 50
CALLS = 200
#: What comes now and then, and belongs to no call: looks at clocks, acknowledgements, the collector.
SLACK = 0.4


@dataclass(frozen=True)
class Thread:
    """One thread, as far as it is counted."""

    name: str
    #: How often it has fallen asleep.
    sleeps: int


def threads(pid: int) -> dict[str, Thread]:
    """The threads of a process by their numbers."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        found[task.name] = Thread(fields["Name"].strip(), int(fields["voluntary_ctxt_switches"]))
    return found


def reads_and_writes(pid: int) -> tuple[int, int] | None:
    """How often a process has called read and write; None where Linux does not tell us. Sockets are not counted where
    they are read by recv and written by send.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except PermissionError:
        return None
    fields = dict(line.split(": ") for line in lines)
    return int(fields["syscr"]), int(fields["syscw"])


def children(pid: int) -> list[int]:
    """The processes below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


def worker_of(host: int) -> int:
    """The process that runs the tool. It is the last one of its jail."""
    return max(pid for pid in children(host) if b"goondan_tool/boot.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.parametrize(("transport", "of_libzmq"), [("libzmq", 1), ("native", 0)])
def test_a_call_wakes_each_of_its_threads_once_on_each_way(
    transport: str, of_libzmq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, transport)
    item, spec = tool("echo")
    with broker([item], [spec]) as bus, tool_host(bus) as host:

        async def count() -> tuple[dict[str, dict[str, float]], dict[str, tuple[float, float]], float]:
            async with bare_agent(bus) as agent:
                for _ in range(WARM_UP):
                    await agent.call(item.name)
                pids = {"broker": bus.pid, "host": host.pid, "worker": worker_of(host.pid), "agent": os.getpid()}
                before = {role: threads(pid) for role, pid in pids.items()}
                done = {role: reads_and_writes(pid) for role, pid in pids.items()}
                began = time.monotonic()
                for _ in range(CALLS):
                    await agent.call(item.name)
                took_s = time.monotonic() - began
                moved = {role: reads_and_writes(pid) for role, pid in pids.items()}
                after = {role: threads(pid) for role, pid in pids.items()}
            slept: dict[str, dict[str, float]] = {}
            for role, pid in pids.items():
                slept[role] = {}
                for number, thread in after[role].items():
                    earlier = before[role].get(number)
                    place = "main" if int(number) == pid else "libzmq" if thread.name.startswith("ZMQ") else "beside"
                    times = (thread.sleeps - (earlier.sleeps if earlier else 0)) / CALLS
                    slept[role][place] = slept[role].get(place, 0.0) + times
            counted = {}
            for role in pids:
                one, two = done[role], moved[role]
                if one is not None and two is not None:
                    counted[role] = ((two[0] - one[0]) / CALLS, (two[1] - one[1]) / CALLS)
            return slept, counted, took_s

        slept, counted, took_s = uvloop.run(count())
    told = f"{slept}, reads and writes {counted}, {took_s / CALLS * 1e3:.2f} ms a call"
    # The call comes, and its result goes back: two wake-ups where it passes by, one where it begins or ends.
    assert slept["agent"]["main"] <= 1 + SLACK, told
    assert slept["broker"]["main"] <= 2 + SLACK, told
    assert slept["host"]["main"] <= 2 + SLACK, told
    assert slept["worker"]["main"] <= 1 + SLACK, told
    # libzmq's thread is woken for each message that it reads and for each that it writes.
    assert slept["broker"].get("libzmq", 0.0) <= 4 * of_libzmq + SLACK, told
    assert slept["host"].get("libzmq", 0.0) <= 2 * of_libzmq + SLACK, told
    assert slept["agent"].get("libzmq", 0.0) <= 2 * of_libzmq + SLACK, told
    # Whoever looks at limits or at slow handlers is woken by the clock and by no call.
    assert slept["host"].get("beside", 0.0) * CALLS <= 2 * took_s / DISK_S + 10, told
    assert slept["worker"].get("beside", 0.0) * CALLS <= 2 * took_s / TAKEOVER_S + 10, told
    if counted.keys() >= {"broker", "host", "worker"}:  # where Linux tells of all of them
        # A descriptor of libzmq is read once for each message that comes in, and written once for each that goes out,
        # on both sides of it. The worker reads and writes one frame, and looks whether the call left something.
        reads, writes = counted["broker"]
        assert reads <= 4 * of_libzmq + SLACK and writes <= 4 * of_libzmq + SLACK, told
        reads, writes = counted["host"]
        looks = 2 * took_s / DISK_S / CALLS
        assert reads <= 2 * of_libzmq + looks + SLACK and writes <= 2 * of_libzmq + looks + SLACK, told
        reads, writes = counted["worker"]
        assert reads <= 2 + SLACK and writes <= 1 + SLACK, told
