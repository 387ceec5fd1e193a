"""A broker without a supervisor: it loads the bundle, takes the kernel's lock and leaves tokens to be made.

Nothing starts agents or tool hosts then: they are started by hand or by another process manager, with tokens from
`python -m goondan.kernel.broker.token`. What is not started stays wanted, and its events wait.

Source: docs/design/processes.md section 7.
"""

from __future__ import annotations

import os
import sys
import time

from goondan.kernel import lock, paths, rundir
from goondan.kernel.bundle.loader import open_bundle
from goondan.kernel.premises import Premises
from goondan.kernel.state_root import open_state_root
from goondan.kernel.trust.private_copy import sweep
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.tokens import SECRET_BYTES, Claims, mint


def prepare(bundle: str, run_dir: str | None) -> tuple[KernelPlan, bytes, Premises]:
    """Load the bundle and become its kernel; the locks are held until the process ends.

    Raises GoondanError: what is wrong with the bundle, E_KERNEL_RUNNING, E_RUN_DIR, E_STATE.
    """
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
