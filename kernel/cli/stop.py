"""`gdn stop`: returns when every process of the kernel is gone, within ten seconds."""

from __future__ import annotations

import time
from typing import Final

import click

from kernel.cli import options

#: How long the supervisor may take to hear us (seconds); one that does not hangs, and is killed soon after.
HEAR_S: Final = 2.0
DEAF_S: Final = 1.0


@click.command()
@options.bundle
@options.as_json
def command(bundle: str | None, as_json: bool) -> int:
    """Stop a running swarm."""
    from contextlib import suppress

    from kernel import rundir
    from kernel.cli.attach import STOP_S, by_hand, end_of, locate
    from kernel.cli.output import write, write_json
    from kernel.supervisor_client import SupervisorClient
    from schemas.errors import GoondanError, fail

    place = locate(bundle)
    until = time.monotonic() + STOP_S
    client = SupervisorClient.connect(place.run_dir)
    if client is None:
        if by_hand(place) is not None:
            message = f"the kernel of {place.bundle} was started by hand, without a supervisor"
            raise fail("E_KERNEL_RUNNING", message, suggestion="End its processes as they were started.")
        if not rundir.clear_after_death(place.run_dir):
            raise fail("E_KERNEL_RUNNING", f"processes of a killed kernel in {place.run_dir} do not end")
        write_json({"stopped": False}) if as_json else write("no kernel runs " + place.bundle)
        return 0
    patience = DEAF_S
    with suppress(GoondanError):
        client.ask("stop", HEAR_S)
        patience = max(DEAF_S, until - time.monotonic() - 1.0)  # a second is kept for the kill
    orderly = end_of(client.pidfd, place.run_dir, patience)
    client.close()
    if as_json:
        write_json({"stopped": True, "killed": not orderly})
    else:
        write("stopped" if orderly else "did not stop in time and was killed")
    return 0
