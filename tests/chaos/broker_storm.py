"""A broker that is killed again and again, each time at another moment, and another one in its place.

`python -m tests.chaos.broker_storm RUN_DIR PLAN_FD SECRET_FD SEED KILLS` prints `up` when the first one listens and
`over` when the last one does, which stays until stdin ends. Each broker is forked from this process, which has imported
it: a start costs some 50 ms, so that several die in a second.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import time
from typing import Final

from goondan.kernel.broker.__main__ import main as broker
from goondan.kernel.spawn import memory_file

#: How long a broker lives at most before it is killed (seconds): from its first hello to steady work.
LIFE_S: Final = 0.15
#: How long a start may take on a machine that does other things (seconds).
START_S: Final = 60.0


def start(run_dir: str, plan: bytes, secret: bytes) -> int:
    """A broker that listens. Its pid."""
    plan_fd, secret_fd = memory_file("plan", plan), memory_file("secret", secret)
    ready, says_so = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            os.close(ready)
            arguments = ["--run-dir", run_dir, "--plan-fd", str(plan_fd), "--secret-fd", str(secret_fd)]
            os._exit(broker([*arguments, "--ready-fd", str(says_so), "--parent-pid", str(parent)]))
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(os.EX_SOFTWARE)
    for fd in (plan_fd, secret_fd, says_so):
        os.close(fd)
    if not select.select([ready], [], [], START_S)[0] or os.read(ready, 1) != b"\n":
        raise SystemExit("a broker did not start")
    os.close(ready)
    return pid


def main() -> None:
    """The whole storm."""
    run_dir, plan_fd, secret_fd, seed, kills = sys.argv[1:]
    with open(int(plan_fd), "rb") as source:
        plan = source.read()
    with open(int(secret_fd), "rb") as source:
        secret = source.read()
    chance = random.Random(int(seed))
    gc.freeze()
    pid = start(run_dir, plan, secret)
    print("up", flush=True)
    for _ in range(int(kills)):
        time.sleep(chance.uniform(0.0, LIFE_S))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pid = start(run_dir, plan, secret)
    print("over", flush=True)
    sys.stdin.read()
    os.kill(pid, signal.SIGTERM)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
