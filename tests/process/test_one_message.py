"""`gdn call` asks without an event loop first. What takes longer, is larger, is ended or is lost goes on over a
session, under the same id: the call is made once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from goondan.kernel.cli.one_message import PATIENCE_S
from tests.kernel_fixture import Sandbox, sandbox, wait_until

APPENDS = "echo once >> made"


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """A kernel that the tests of this module share. Each uses an instance of its own."""
    with sandbox() as made:
        made.detach()
        yield made


def made_in(kernel: Sandbox, instance: str) -> str:
    """How often the command was carried out in an instance's workdir."""
    found = kernel.call("cat made", "--instance", instance)
    return str(found["output"]["stdout"])


def test_a_call_that_takes_longer_is_made_once(running: Sandbox) -> None:
    slow = running.call(f"{APPENDS}; sleep {PATIENCE_S + 0.3}; echo late", "--instance", "slow")
    assert slow["output"]["stdout"] == "late\n"
    assert made_in(running, "slow") == "once\n"


def test_a_large_result_comes_whole(running: Sandbox) -> None:
    """It goes through a file, which a session reads."""
    large = running.call(f"{APPENDS}; head -c 900000 /dev/zero | tr '\\0' a", "--instance", "large")
    assert len(large["output"]["stdout"]) > 100_000
    assert made_in(running, "large") == "once\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_call_at_once(running: Sandbox, number: signal.Signals, status: int) -> None:
    instance = number.name.lower()
    command = f'{{"command":"{APPENDS}; sleep 60"}}'
    process = running.popen("call", "bash__exec", command, "--instance", instance)
    made = lambda: list(running.state_dirs[0].glob(f"instances/_operator/{instance}/workspace/made"))
    wait_until(made)
    process.send_signal(number)
    assert process.wait(timeout=10) == status
    assert process.stderr is not None
    assert process.stderr.read().strip() == b"cancelled"
    assert made_in(running, instance) == "once\n"


def test_a_broker_that_is_lost_in_the_middle_is_asked_again(running: Sandbox) -> None:
    process = running.popen("call", "bash__exec", f'{{"command":"{APPENDS}; sleep 0.7"}}', "--instance", "lost")
    place = lambda: list(running.state_dirs[0].glob("instances/_operator/lost/workspace/made"))
    wait_until(place)
    os.kill(running.pid("broker"), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert b'"status":"ok"' in out
    assert made_in(running, "lost") == "once\n"
