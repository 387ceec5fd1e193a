"""`kill -9` of every process during a call: a result or one structured error within 5 s, and the next call works."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.kernel_fixture import Sandbox, sandbox, wait_until

#: The promise (seconds), besides what the command of the call itself takes, where a start and a call take START_S.
PROMISE_S = 5.0
CALL_S = 1.0
START_S = 1.0


@pytest.fixture(scope="module")
def place() -> Iterator[Sandbox]:
    """One bundle for all tests."""
    with sandbox() as made:
        yield made


@pytest.fixture(scope="module")
def promise_s(place: Sandbox) -> float:
    """The promise on this machine, in this hour."""
    began = time.monotonic()
    place.detach()
    place.call("true")
    return PROMISE_S * max(1.0, (time.monotonic() - began) / START_S)


@pytest.fixture
def kernel(place: Sandbox) -> Sandbox:
    """Its kernel: the one that the test before left, however that one treated it, or a new one."""
    if not place.ps():
        place.detach()
    return place


def running(kernel: Sandbox, instance: str, seconds: float = CALL_S) -> subprocess.Popen[bytes]:
    """A call that lasts so long, and has begun."""
    command = {"command": f"touch started; sleep {seconds}; echo survived"}
    call = kernel.popen("call", "bash__exec", json.dumps(command), "--json", "--instance", instance)
    wait_until(lambda: any(kernel.home.glob(f"state/workspaces/*/instances/*/{instance}/workspace/started")))
    return call


def victim(kernel: Sandbox, role: str, instance: str) -> int:
    """The process of `role`, while the call runs."""

    def find() -> int | None:
        rows = [row for row in kernel.ps() if row["role"] == role and row["instanceKey"] in (None, instance)]
        return next((row["pid"] for row in rows if row["pid"]), None)

    return int(wait_until(find))


@pytest.mark.parametrize("role", ["worker", "toolhost", "agent", "forkserver", "broker"])
def test_a_killed_process_costs_at_most_one_structured_error(promise_s: float, kernel: Sandbox, role: str) -> None:
    call = running(kernel, role)
    os.kill(victim(kernel, role, role), signal.SIGKILL)
    killed = time.monotonic()
    out, err = call.communicate(timeout=30)
    assert time.monotonic() - killed < promise_s + CALL_S, kernel.log("")
    document = json.loads(out)
    if call.returncode == 0:
        assert document["output"]["stdout"] == "survived\n"
    else:
        error = document["error"]
        assert error["code"].startswith("E_")
        assert error["message"]
        assert error["helpUrl"]
    assert err == b""
    if role in ("broker", "forkserver"):
        assert call.returncode == 0, document  # nothing of the call ran there
    begun = time.monotonic()
    assert kernel.call("echo next", "--instance", role)["output"]["stdout"] == "next\n"
    assert time.monotonic() - begun < promise_s


@pytest.mark.parametrize("role", ["broker", "toolhost", "forkserver"])
def test_services_that_keep_dying_come_back_every_time(kernel: Sandbox, role: str) -> None:
    def restarts() -> int:
        return int(next(row["restarts"] for row in kernel.ps() if row["role"] == role))

    before, ready = restarts(), kernel.times_ready(role)
    for number in range(2):
        os.kill(kernel.pid(role), signal.SIGKILL)
        ready += 1
        wait_until(lambda wanted=ready: kernel.times_ready(role) == wanted)
        assert restarts() == before + number + 1
    assert kernel.call("echo back", "--instance", f"fresh-{role}")["output"]["stdout"] == "back\n"


def test_a_killed_supervisor_takes_everything_along_and_the_next_start_works_at_once(
    promise_s: float, kernel: Sandbox
) -> None:
    call = running(kernel, "supervisor", 60.0)
    os.kill(kernel.pid("supervisor"), signal.SIGKILL)
    kernel.wait_for_nothing()
    out, _ = call.communicate(timeout=30)
    assert call.returncode == 1
    assert json.loads(out)["error"]["code"] == "E_KERNEL_LOST"
    begun = time.monotonic()
    kernel.detach()
    assert time.monotonic() - begun < promise_s
    assert kernel.call("echo again")["output"]["stdout"] == "again\n"


def test_a_start_waits_for_what_is_left_of_a_killed_kernel(kernel: Sandbox) -> None:
    os.kill(kernel.pid("supervisor"), signal.SIGKILL)
    result = kernel.gdn("run", "--detach")  # at once, with everything still dying
    assert result.status == 0, result.err
    assert kernel.call("echo again")["output"]["stdout"] == "again\n"


def test_a_start_gives_up_on_leftovers_that_do_not_end_and_leaves_their_lock(kernel: Sandbox) -> None:
    (folder,) = kernel.home.glob("state/workspaces/*/kernel")
    with open(folder / "alive", "rb") as leftover:
        fcntl.flock(leftover, fcntl.LOCK_SH)
        os.kill(kernel.pid("supervisor"), signal.SIGKILL)
        for _ in range(2):  # the second start must not be fooled by the first
            result = kernel.gdn("run", "--detach", "--json")
            assert (result.status, result.json["error"]["code"]) == (1, "E_KERNEL_RUNNING")
    kernel.detach()
