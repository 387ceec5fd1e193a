"""`kill -9` of anything but the supervisor, again and again, while a batch runs: every line gets exactly one result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from contextlib import suppress

import pytest

from tests.kernel_fixture import Sandbox

ROLES = ("broker", "forkserver", "toolhost", "agent", "worker")
CHAOS = "GOONDAN_CHAOS_KILLS" in os.environ
#: Every role's turn comes this often; a role that has no process at that moment is passed over.
TURNS = 2 if CHAOS else 1
LINES_A_TURN = 10


def kill_one(kernel: Sandbox, role: str, chance: random.Random) -> bool:
    """`kill -9` of some process of a role."""
    pids = [int(row["pid"]) for row in kernel.ps() if row["role"] == role and row["pid"]]
    if not pids:
        return False
    with suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    return True


@pytest.mark.parametrize("seed", range(1, 5 if CHAOS else 2))
def test_every_line_gets_one_result_whatever_dies(kernel_of_a_transport: Sandbox, seed: int) -> None:
    kernel = kernel_of_a_transport
    kernel.detach()
    chance = random.Random(seed)
    process = kernel.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    printed: list[bytes] = []
    reading = threading.Thread(target=lambda: printed.extend(process.stdout or []))
    reading.start()
    killed: set[str] = set()
    lines = 0
    for role in chance.sample(ROLES * TURNS, len(ROLES) * TURNS):
        for _ in range(LINES_A_TURN):
            call = {
                "tool": "bash__exec",
                "args": {"command": f"sleep 0.03; echo {lines}"},
                "instance": f"i{lines % 10}",
            }
            process.stdin.write(json.dumps({"id": lines, **call}).encode() + b"\n")
            lines += 1
        process.stdin.flush()
        reading.join(chance.uniform(0.02, 0.2))  # the calls are in different places each time
        if kill_one(kernel, role, chance):
            killed.add(role)
    process.stdin.close()
    reading.join(40)
    assert not reading.is_alive(), kernel.log("supervisor")
    assert process.wait(30) == 0
    assert len(killed) >= 3, killed
    results = [json.loads(line) for line in printed]
    assert sorted(result["id"] for result in results) == list(range(lines))
    for result in results:
        if result["result"]["status"] == "ok":
            assert result["result"]["output"]["stdout"] == f"{result['id']}\n"
        else:
            assert result["result"]["error"]["code"].startswith("E_")
    assert kernel.call("echo next")["output"]["stdout"] == "next\n"
