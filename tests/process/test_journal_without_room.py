"""The journal on a disk that something else goes on filling: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: In a namespace of its own: fills the disk with new events, then with a file, and ends the events all the same.
ENDING = """
import os, subprocess, sys, time
from goondan.kernel.broker.journal import committer
from goondan.kernel.broker.state.records import Item, Put, Retire
from goondan.kernel.broker.journal.committer import open_store, start
from goondan.kernel.broker.__main__ import _assemble
from tests.process.bare_broker import plan

folder, durability = sys.argv[1:3]
if sys.argv[3:]:
    committer.FULL_RETRY_S = float(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", folder], check=True)
store = open_store(folder, durability)
journal = start(store, folder)

def refused(item):
    journal.append([item])
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for refused in journal.settled():
            return bool(refused)
        time.sleep(0.001)
    raise SystemExit("an end was not written")

accepted = []
while not refused(Item((Put(f"event:{len(accepted)}", b"x" * 1500),), True)):
    accepted.append(f"event:{len(accepted)}")

def fill():
    with open(folder + "/filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

for name in accepted:
    fill()
    assert not refused(Item((Retire(name, b"d" * 16, "done", b"answer" * 100),)))
journal.close()
fill()
store = open_store(folder, durability)
_assemble(plan(folder), b"s" * 32, store, folder)
assert len(accepted) > 100, len(accepted)
print([row.subject for row in store.rows()])
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs a mount of its own")
@pytest.mark.parametrize("plan", [("process",), ("power",), ("process", "0"), ("power", "0")], ids=" ".join)
def test_running_work_ends_and_a_broker_starts_while_something_fills_the_disk(
    tmp_path: Path, plan: tuple[str, ...]
) -> None:
    """Also when each write tries whether the disk is still full: the reserve is not lost by that."""
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", ENDING, str(tmp_path), *plan],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "['epochs']", done.stderr + done.stdout
