"""A broker without a supervisor: it loads the bundle, takes the kernel's lock and leaves tokens to be made.

Nothing starts agents or tool hosts then: they are started by hand or by another process manager, with tokens from
`python -m kernel.broker.token`. What is not started stays wanted, and its events wait.

Source: design section 2 ("The supervisor is a convenience, not a condition").
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Final

from kernel import paths, rundir
from kernel.bundle.opening import load_plan
from schemas.errors import fail
from schemas.launch import KernelPlan
from schemas.tokens import SECRET_BYTES, Claims, mint

#: The kernel's secret, in the runtime directory, for whoever makes tokens by hand.
SECRET_FILE: Final = "kernel.secret"  # noqa: S105 - a file's name


def prepare(bundle: str, run_dir: str | None) -> tuple[KernelPlan, bytes, Path]:
    """Load the bundle and become the kernel of its runtime directory; the locks are held until the process ends.

    Raises GoondanError: what is wrong with the bundle, E_KERNEL_RUNNING, E_RUN_DIR.
    """
    bundle = paths.find_bundle(bundle)
    directory = os.path.abspath(run_dir) if run_dir is not None else paths.run_dir(bundle)
    plan = load_plan(bundle, state_dir=paths.state_dir(bundle))
    locks = rundir.lock(directory)
    until = time.monotonic() + rundir.LEFTOVERS_S
    while not rundir.is_quiet(locks):
        if time.monotonic() >= until:
            raise fail("E_KERNEL_RUNNING", f"processes of an earlier kernel still run in {directory}")
        time.sleep(rundir.LEFTOVERS_POLL_S)
    rundir.sweep(directory)
    secret = secrets.token_bytes(SECRET_BYTES)
    rundir.write_private(f"{directory}/{SECRET_FILE}", secret)
    token = mint(secret, Claims("client", revision=plan.revision, operator=True))
    rundir.write_private(f"{directory}/{rundir.CLIENT_TOKEN}", token.encode())
    return plan, secret, Path(directory)
