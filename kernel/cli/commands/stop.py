"""`gdn stop`: returns when every process of the kernel is gone, within ten seconds."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.attach import STOP_S, BundleTarget, end_of, locate
from goondan.kernel.cli.output import write_result

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import BundleTarget

#: How long the supervisor may take to accept the request to stop (seconds). One that takes longer hangs.
HEAR_S: Final = 2.0
#: After that, how long it has until it is killed (seconds).
DEAF_S: Final = 1.0
#: How often the command checks whether the signal was taken (seconds). A supervisor that works takes it at once.
HEAR_POLL_S: Final = 0.01


@click.command()
@options.bundle
@options.as_json
def command(bundle: str | None, as_json: bool) -> int:
    """Stop a running swarm."""
    from goondan.kernel import lock
    from goondan.kernel.supervisor_client import SupervisorClient
    from goondan.schemas.wire.errors import GoondanError, fail

    place = locate(bundle)
    until = time.monotonic() + STOP_S
    client = SupervisorClient.connect(place.state_dir)
    if client is None:
        record = lock.read_record(place.state_dir)
        if record is not None and record.by_hand and lock.is_held(place.state_dir):
            message = f"the kernel of {place.bundle} was started by hand, without a supervisor"
            raise fail("E_KERNEL_RUNNING", message, suggestion="End its processes as they were started.")
        if (pidfd := lock.holder(place.state_dir)) is not None:
            return _end(pidfd, place, as_json, until)
        if not lock.clear_after_death(place.state_dir):
            message = f"processes of a killed kernel with the state in {place.state_dir} do not end"
            raise fail("E_KERNEL_RUNNING", message)
        write_result({"stopped": False}, "no kernel runs " + place.bundle, as_json=as_json)
        return 0
    patience = DEAF_S
    with suppress(GoondanError):
        client.ask("stop", HEAR_S)
        patience = max(DEAF_S, until - time.monotonic() - 1.0)  # a second is kept for the kill
    orderly = end_of(client.pidfd, place.state_dir, patience)
    client.close()
    _report(orderly, as_json)
    return 0


def _end(pidfd: int, place: BundleTarget, as_json: bool, until: float) -> int:
    """End a supervisor whose runtime directory is gone: it still holds the lock, and still takes signals."""
    import os
    import signal

    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        patience = max(DEAF_S, until - time.monotonic() - 1.0) if _hears(pidfd) else DEAF_S
        orderly = end_of(pidfd, place.state_dir, patience)
    finally:
        os.close(pidfd)
    _report(orderly, as_json)
    return 0


def _hears(pidfd: int) -> bool:
    """Whether the process takes the SIGTERM that was sent to it. In a stopped process the signal stays pending."""
    import select
    import signal

    bit = 1 << signal.SIGTERM - 1
    until = time.monotonic() + HEAR_S
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as info:
            pid = next(line.split()[1] for line in info if line.startswith("Pid:"))
        while time.monotonic() < until:
            with open(f"/proc/{pid}/status") as status:
                pending = next(line.split()[1] for line in status if line.startswith("ShdPnd:"))
            if not int(pending, 16) & bit or select.select([pidfd], [], [], HEAR_POLL_S)[0]:
                return True
    except OSError:
        return True  # it is gone
    return False


def _report(orderly: bool, as_json: bool) -> None:
    text = "stopped" if orderly else "did not stop in time and was killed"
    write_result({"stopped": True, "killed": not orderly}, text, as_json=as_json)
