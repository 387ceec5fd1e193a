"""`gdn call` asks without an event loop first. What takes longer, is larger, is ended or is lost goes on over a
session, under the same id: the call is made once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.kernel.cli.one_message import PATIENCE_S, Attempt
from goondan.kernel.cli.session import Session
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame
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
    assert process.wait(timeout=30) == status
    assert process.stderr is not None
    assert process.stderr.read().strip() == b"cancelled"
    assert made_in(running, instance) == "once\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_behind_the_event_is_noted_and_the_next_one_leaves(number: signal.Signals) -> None:
    """The first is for the session, which is not there yet."""
    left: list[int] = []
    before = signal.signal(number, lambda got, frame: left.append(got))
    try:
        with Attempt() as attempt:
            signal.raise_signal(number)
            assert (attempt.number, left) == (None, [number]), "nothing was sent yet"
            attempt.note()
            signal.raise_signal(number)
            assert (attempt.number, left) == (number, [number])
            signal.raise_signal(number)
            assert left == [number] * 2
        signal.raise_signal(number)
        assert left == [number] * 3
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("ms", [930, 950, 970, 990])
def test_a_signal_cancels_the_call_whenever_it_comes(running: Sandbox, ms: int) -> None:
    """About when the command begins a session."""
    instance = f"after{ms}"
    process = running.popen(
        "call", "bash__exec", f'{{"command":"{APPENDS}; sleep 4; echo done >> made"}}', "--instance", instance
    )
    wait_until(lambda: list(running.state_dirs[0].glob(f"instances/_operator/{instance}/workspace/made")))
    time.sleep(PATIENCE_S * ms / 1000)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert process.stderr is not None
    assert process.stderr.read().strip() == b"cancelled"
    assert made_in(running, instance) == "once\n"


async def test_a_call_that_a_kernel_had_taken_before_it_stopped_is_said_to_be_kept() -> None:
    """Sent again, it would run twice."""
    with sandbox() as kernel:
        kernel.detach()
        asked = [kernel.popen("call", "bash__exec", f'{{"command":"{APPENDS}; sleep 60"}}') for _ in range(2)]
        (run_dir,) = kernel.run_dirs
        link = Link(f"ipc://{run_dir}/clients.sock", Path(run_dir, "client.token").read_text().strip(), on_frame=print)
        await link.start()
        open_events = 0
        while open_events < 2:
            counts = await link.post(Frame("admin", payload=to_raw({"op": "stats"})))
            open_events = from_raw(counts.payload, dict)["openEvents"]
        await link.close(0)
        assert kernel.gdn("stop").status == 0
        for command in asked:
            _, err = command.communicate(timeout=30)
            assert b"is kept, and its turn goes on at the next start" in err


@pytest.mark.parametrize(("accepted", "told"), [((), "stopped"), (("e1",), "stopped; the message e1 is kept")])
async def test_a_kernel_that_has_stopped_before_the_session_was_stopped(
    tmp_path: Path, accepted: tuple[str, ...], told: str
) -> None:
    """It leaves no record. What it had accepted before is named."""
    kernel: Any = SimpleNamespace(place=SimpleNamespace(state_dir=str(tmp_path)), pidfd=os.pidfd_open(os.getpid()))
    with pytest.raises(GoondanError) as caught:
        await Session(kernel, accepted=accepted).__aenter__()
    asyncio.get_running_loop().remove_reader(kernel.pidfd)
    os.close(kernel.pidfd)
    assert caught.value.info.code == "E_KERNEL_STOPPED"
    assert caught.value.info.message.startswith(f"the kernel was {told}")


def test_a_broker_that_is_lost_in_the_middle_is_asked_again(running: Sandbox) -> None:
    process = running.popen("call", "bash__exec", f'{{"command":"{APPENDS}; sleep 0.7"}}', "--instance", "lost")
    place = lambda: list(running.state_dirs[0].glob("instances/_operator/lost/workspace/made"))
    wait_until(place)
    os.kill(running.pid("broker"), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert b'"status":"ok"' in out
    assert made_in(running, "lost") == "once\n"
