"""Puts a broker together from its plan and its journal, or from a bundle if it has no supervisor.

Without a supervisor nothing starts agents or tool hosts: they are started by hand or by another process manager, with
tokens from `python -m goondan.kernel.broker.token`. What is not started stays wanted, and its events wait.

Source: docs/design/delivery.md section 8; docs/design/processes.md section 7.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from goondan.features import FEATURES, parts
from goondan.kernel.broker.instance_folders import InstanceFolders
from goondan.kernel.broker.journal.committer import wall_ms
from goondan.kernel.broker.journal.store import JournalStore
from goondan.kernel.broker.routing.recovery import BadRow, reserved_epochs
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.bus import Bus, MakeParts
from goondan.kernel.broker.state.ledger import EPOCH_BLOCK, Ledger
from goondan.kernel.broker.state.mailbox import Epochs
from goondan.kernel.broker.state.records import EPOCHS
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.premises import Premises


def assemble(
    plan: KernelPlan,
    secret: bytes,
    store: JournalStore,
    *,
    boot_id: str,
    broker_id: str,
    now: float,
    blobs: str | None,
    new_kernel: bool = False,
) -> Router:
    """The router, with the state that the journal holds. `now` is the broker's clock. `new_kernel`: the kernel has just
    started, and this is its first broker.

    Raises GoondanError E_CONFIG_UNSUPPORTED for a plan with a part that no feature takes, E_JOURNAL_CORRUPT for a
    record that cannot be applied for the first time, E_DISK_FULL.
    """
    refuse_unclaimed(plan)
    wall_s = wall_ms() / 1000
    epochs = Epochs(reserved_epochs(store.find_records(EPOCHS)), wall_ms())
    ledger = Ledger(boot_id, wall_s - now)
    bus = Bus(
        plan,
        secret,
        broker_id=broker_id,
        started_ms=int(now * 1000),
        epochs=epochs,
        archive=store,
        ledger=ledger,
        blobs=blobs,
    )
    bus.new_kernel = new_kernel
    top = epochs.to_reserve(EPOCH_BLOCK)
    if top is not None:
        store.commit(ledger.epochs(top).writes, wall_ms())
    bad: list[BadRow] = []
    router = Router(bus, InstanceFolders(plan.state_dir), features())
    router.restore(store.rows(), bad.append)
    _give_up(store, bad)
    router.resume()
    return router


def refuse_unclaimed(plan: KernelPlan) -> None:
    """Refuse a plan with a part for a feature that this broker does not have, and a part of an agent for a feature that
    is not there at all: what the bundle asks for would be left out in silence.

    Raises GoondanError E_CONFIG_UNSUPPORTED.
    """
    mine = {feature.name for feature in FEATURES if "broker" in feature.files}
    every = {feature.name for feature in FEATURES}
    of_agents = {name for spec in plan.agents.values() for name in spec.parts}
    for name in sorted({*(plan.parts.keys() - mine), *(of_agents - every)}):
        message = f"the bundle needs the feature {visible_line(name)}, which this installation does not have"
        raise fail("E_CONFIG_UNSUPPORTED", message, suggestion="Install the kernel anew, with that feature.")


def features() -> list[MakeParts]:
    """What makes the parts of each feature. Raises ImportError when a file of one is missing."""
    return [module.parts for module in parts("broker")]


def _give_up(store: JournalStore, bad: list[BadRow]) -> None:
    """End the start when a row fails for the first time, because the machine may be the cause. From the second failure
    on, the row is put aside. All bad rows are counted in one start: many of them cause at most two failed starts.
    """
    kept = [row for row in bad if not store.suspect(row.row, row.reason, wall_ms())]
    for row in bad:
        if row not in kept:
            text = f"{row}; it was put aside in the table `quarantine` of {store.path}"
            print(visible_line(text), file=sys.stderr)
    if kept:
        more = f" (and {len(kept) - 1} more)" if len(kept) > 1 else ""
        message = f"{store.path}: {kept[0]}{more}; what fails once more is put aside in the table `quarantine`"
        raise fail("E_JOURNAL_CORRUPT", message, suggestion="Start the kernel again.")


def prepare(bundle: str, run_dir: str | None) -> tuple[KernelPlan, bytes, Premises]:
    """Load the bundle and become its kernel; the locks are held until the process ends.

    Raises GoondanError: what is wrong with the bundle, E_KERNEL_RUNNING, E_RUN_DIR, E_STATE.
    """
    # What loads bundles is not for a broker that has a supervisor.
    from goondan.kernel import lock, paths, rundir
    from goondan.kernel.bundle.loader import open_bundle
    from goondan.kernel.premises import Premises
    from goondan.kernel.state_root import open_state_root
    from goondan.kernel.trust.private_copy import sweep
    from goondan.schemas.wire.tokens import SECRET_BYTES, Claims, mint

    bundle = paths.find_bundle(bundle)
    state_dir = paths.state_dir(bundle)
    for line in open_state_root(paths.root_of(state_dir), workspace=state_dir, make=True).mended:
        print(visible_line(line), file=sys.stderr)
    plan = open_bundle(bundle, state_dir=state_dir).plan
    premises = Premises.enter(
        bundle, state_dir, os.path.abspath(run_dir) if run_dir is not None else None, by_hand=True
    )
    for reason in premises.unused:
        print(f"the runtime directory is {premises.run_dir}: {reason}", file=sys.stderr)
    until = time.monotonic() + lock.LEFTOVERS_S
    while not premises.is_quiet():
        if time.monotonic() >= until:
            raise fail("E_KERNEL_RUNNING", f"processes of an earlier kernel with the state in {state_dir} do not end")
        time.sleep(lock.LEFTOVERS_POLL_S)
    premises.settle()
    premises.describe(plan.entry_agent, plan.revision)
    sweep(plan.state_dir, keep=plan.private_copy)
    secret = os.urandom(SECRET_BYTES)
    premises.write(rundir.SECRET_FILE, secret)
    token = mint(secret, Claims("client", revision=plan.revision, operator=True, uid=os.geteuid()))
    premises.write(rundir.CLIENT_TOKEN, token.encode())
    return plan, secret, premises
