"""`python -m goondan.kernel.broker`: the broker as a program, under a supervisor or by hand.

Under the supervisor the plan and the kernel's secret come on descriptors. By hand, `--bundle` loads the bundle, takes
the kernel's lock itself and writes `client.token` and `kernel.secret` into the runtime directory; tokens for agents
and tool hosts are then made with `python -m goondan.kernel.broker.token`. Without a supervisor nothing starts agents or
tool hosts: they are started by hand or by another process manager. What is not started stays wanted, and its events
wait.

Source: docs/design/delivery.md section 8; docs/design/processes.md section 7.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from goondan.features import FEATURES, parts
from goondan.kernel.broker.instance_folders import InstanceFolders
from goondan.kernel.broker.journal.committer import boot_id, open_store, release_reserve, start, wall_ms
from goondan.kernel.broker.journal.store import JournalStore
from goondan.kernel.broker.loop import BrokerLoop, clock
from goondan.kernel.broker.routing.recovery import BadRow, reserved_epochs
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.bus import Bus, MakeParts
from goondan.kernel.broker.state.ledger import EPOCH_BLOCK, Ledger
from goondan.kernel.broker.state.mailbox import Epochs
from goondan.kernel.broker.state.records import EPOCHS, DiskFull, JournalFailed
from goondan.schemas.bundle.address import blobs_dir
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.system import blob_files, secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.tokens import SECRET_BYTES

if TYPE_CHECKING:
    from goondan.kernel.premises import Premises

parts("broker")  # now, while a broker that was forked ahead waits for its start


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
    """What makes the parts of each feature."""
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


#: Descriptors the broker may open: one per peer and some.
_WANTED_DESCRIPTORS = 65536


def main(arguments: list[str] | None = None) -> int:
    """Run the broker until it is told to stop. 0, or 1 when it could not start, or 2 for bad usage."""
    secrecy.close_memory()
    options = _parse(arguments)
    startup.close_to_others()
    try:
        startup.keep_memory_steady()
        startup.set_process_name("gdn-broker")
        begin_log("broker")
        startup.die_with_parent(options.parent_pid)
        startup.raise_descriptor_limit(_WANTED_DESCRIPTORS)
        if options.bundle is not None:
            plan, secret, premises = prepare(options.bundle, options.run_dir)
            run_dir = premises.run_dir
        else:
            plan, secret, run_dir = _from_descriptors(options)
        blobs = blobs_dir(plan.state_dir)
        blob_files.make_folder(blobs)
        startup.admit_toolhost(blobs)
        store = open_store(plan.state_dir, plan.durability, accept_loss=options.accept_loss)
        for loss in store.losses:
            print(f"E_JOURNAL_CORRUPT accepted: {loss}", file=sys.stderr)
        router = _assemble(plan, secret, store, blobs, new_kernel=options.new_kernel or options.bundle is not None)
        if options.new_kernel:  # nobody is left who could ask for what the journal does not name
            blob_files.BlobFolder(blobs).sweep(router.bus.mailbox.blobs.referenced() | store.files(), 0)
        loop = BrokerLoop(router, start(store, plan.state_dir), run_dir)
        loop.bind()
    except GoondanError as error:
        return _failed(error, options.ready_fd)
    except DiskFull:
        return _failed(fail("E_DISK_FULL", "there is no room on the disk to open the journal"), options.ready_fd)
    except JournalFailed as error:
        return _failed(fail("E_STATE", f"the journal cannot be written: {error}"), options.ready_fd)
    except OSError as error:
        return _failed(fail("E_RUN_DIR", f"the broker cannot listen: {error}"), options.ready_fd)
    startup.report_ready(options.ready_fd)
    if options.bundle is not None:
        print(visible_line(f"broker ready in {run_dir}"), file=sys.stderr)
    try:
        loop.run()
    except JournalFailed as error:
        print(f"E_STATE: the journal cannot be written: {error}; the broker ends", file=sys.stderr)
        return 1
    finally:
        loop.close()
    return 0


def _assemble(plan: KernelPlan, secret: bytes, store: JournalStore, blobs: str, *, new_kernel: bool = True) -> Router:
    """See assemble; on a full disk with as much of the reserve as it needs."""
    who = {"boot_id": boot_id(), "broker_id": os.urandom(4).hex()}
    while True:
        try:
            return assemble(plan, secret, store, **who, now=clock(), blobs=blobs, new_kernel=new_kernel)
        except DiskFull:
            if not release_reserve(plan.state_dir):
                raise


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = startup.option_parser("goondan.kernel.broker", "The Goondan broker.")
    parser.add_argument("--bundle", help="load this bundle and be a kernel's broker by hand")
    parser.add_argument("--run-dir", help="where the sockets are made")
    parser.add_argument("--plan-fd", type=int, help="descriptor of the plan (msgpack)")
    parser.add_argument("--secret-fd", type=int, help="descriptor of the kernel's secret")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets a newline when the sockets are bound")
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    parser.add_argument("--accept-loss", action="store_true", help="go on with what is whole of a damaged journal")
    parser.add_argument("--new-kernel", action="store_true", help="no process of an earlier kernel is left")
    options = parser.parse_args(arguments)
    if options.bundle is None and None in (options.run_dir, options.plan_fd, options.secret_fd):
        parser.error("give --bundle, or all of --run-dir, --plan-fd and --secret-fd")
    return options


def _from_descriptors(options: argparse.Namespace) -> tuple[KernelPlan, bytes, str]:
    try:
        with open(options.plan_fd, "rb") as source:
            plan = msgspec.msgpack.decode(source.read(), type=KernelPlan)
        with open(options.secret_fd, "rb") as source:
            secret = source.read()
    except (OSError, msgspec.DecodeError) as error:
        raise fail("E_USAGE", f"the plan or the secret cannot be read: {error}") from None
    if len(secret) < SECRET_BYTES:
        raise fail("E_USAGE", f"the secret has {len(secret)} bytes, {SECRET_BYTES} are needed")
    return plan, secret, options.run_dir


def _failed(error: GoondanError, ready_fd: int | None) -> int:
    """Say why on the ready descriptor, where somebody waits, else to the person."""
    report = msgspec.json.encode({"error": error.info})
    if ready_fd is not None:
        os.write(ready_fd, report + b"\n")
    print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
    print(visible_line(error.info.suggestion or ""), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
