"""`kill -9` of anything but the supervisor, again and again, while a batch runs: every line gets exactly one result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from tests.kernel_fixture import Sandbox

LINES = 150
ROLES = ("broker", "forkserver", "toolhost", "agent", "worker")


@pytest.mark.parametrize("seed", [1, 2])
def test_every_line_gets_one_result_whatever_dies(kernel: Sandbox, seed: int) -> None:
    kernel.detach()
    chance = random.Random(seed)
    process = kernel.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    lines = [
        {"id": n, "tool": "bash__exec", "args": {"command": f"sleep 0.03; echo {n}"}, "instance": f"i{n % 10}"}
        for n in range(LINES)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    printed: list[bytes] = []
    talking = threading.Thread(target=lambda: printed.append(process.communicate(data)[0]))
    talking.start()
    killed: set[str] = set()
    until = time.monotonic() + 40
    while talking.is_alive() and time.monotonic() < until:
        talking.join(chance.uniform(0.05, 0.4))
        rows = [row for row in kernel.ps() if row["role"] in ROLES and row["pid"]]
        role = chance.choice(sorted({row["role"] for row in rows} | {"nobody"}))
        for row in chance.sample(rows, len(rows)):
            if row["role"] == role:
                with suppress(ProcessLookupError):
                    os.kill(row["pid"], signal.SIGKILL)
                killed.add(role)
                break
    talking.join(10)
    assert not talking.is_alive(), kernel.log("supervisor")
    assert process.returncode == 0
    assert len(killed) >= 2
    results = [json.loads(line) for line in printed[0].splitlines()]
    assert sorted(result["id"] for result in results) == list(range(LINES))
    for result in results:
        if result["result"]["status"] == "ok":
            assert result["result"]["output"]["stdout"] == f"{result['id']}\n"
        else:
            assert result["result"]["error"]["code"].startswith("E_")
    assert kernel.call("echo next")["output"]["stdout"] == "next\n"
