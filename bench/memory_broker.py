"""`python -m bench.memory_broker`: the broker with a journal in memory, as a baseline. Its options are those of
goondan.kernel.broker.
"""

from __future__ import annotations

import argparse
import os
import secrets

import msgspec

from goondan.kernel.broker.__main__ import features
from goondan.kernel.broker.instance_folders import InstanceFolders
from goondan.kernel.broker.journal.committer import boot_id, wall_ms
from goondan.kernel.broker.loop import BrokerLoop, clock
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.ledger import Ledger
from goondan.kernel.broker.state.mailbox import Epochs
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.system.startup import report_ready
from tests.unit.kernel.broker.memory_journal import MemoryJournal


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir")
    for name in ("--plan-fd", "--secret-fd", "--ready-fd"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    with os.fdopen(options.plan_fd, "rb") as source:
        plan = msgspec.msgpack.decode(source.read(), type=KernelPlan)
    with os.fdopen(options.secret_fd, "rb") as source:
        secret = source.read()
    journal, now = MemoryJournal(), clock()
    bus = Bus(
        plan,
        secret,
        broker_id=secrets.token_hex(4),
        started_ms=int(now * 1000),
        epochs=Epochs(0, wall_ms()),
        archive=journal,
        ledger=Ledger(boot_id(), wall_ms() / 1000 - now),
    )
    loop = BrokerLoop(Router(bus, InstanceFolders(plan.state_dir), features=features()), journal, options.run_dir)
    loop.bind()
    report_ready(options.ready_fd)
    try:
        loop.run()
    finally:
        loop.close()


if __name__ == "__main__":
    main()
