"""`gdn ps`, `gdn restart` and `gdn stop`: the processes of a running swarm, and their end. They work while the broker
is down.

Source: docs/design/commands.md sections 4 and 8.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import click
from msgspec import UNSET

from goondan.kernel import lock
from goondan.kernel.cli import options
from goondan.kernel.cli.attach import ByHand, by_hand
from goondan.kernel.cli.beside import Beside, running
from goondan.kernel.cli.operator_question import NO_SUCH_QUESTION, ask_broker, ask_kernel, learned
from goondan.kernel.cli.output import OPERATOR_NOTE, columns, emit
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.rules.waits import render as render_waits
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.kernel.supervisor_client import (
    STOP_S,
    ProcessInfo,
    SupervisorClient,
    ask_supervisor,
    end_of,
    has_ended,
    kernels,
)
from goondan.schemas.text.times import age, rfc3339
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_AGENT

_COLUMNS = ("ROLE", "NAME", "INSTANCE", "PID", "STATUS", "SINCE", "RESTARTS", "LAST EXIT")


@click.command()
@options.bundle
@click.option("--all", "everywhere", is_flag=True, help="Show all your kernels, of whatever bundle and state root.")
@click.option("--why", is_flag=True, help="Show who waits for whom, and since when.")
@click.option("--forget-limits", is_flag=True, help="Forget what was learned of the limits of model servers.")
@options.json
def ps(bundle: str | None, everywhere: bool, why: bool, forget_limits: bool) -> None:
    """Show the processes of a running swarm, and what was learned of the limits of its model servers.

    --why shows what its agents wait for: their model, its server's limit, another agent, a person, a tool, a jail, an
    extension, a place, their turn, a process, a budget, room on the disk.
    """
    if everywhere:
        found, now = kernels(), datetime.datetime.now(datetime.UTC)
        emit(found, _kernel_lines(found, now) if found else ["no kernel of yours runs"])
        return
    if why:
        try:
            answer = ask_broker(bundle, {"op": "why"})
        except GoondanError as error:
            if error.info.code != NO_SUCH_QUESTION:
                raise
            message = "the kernel that runs has no feature `waits`, which tells who waits for whom"
            raise fail("E_FEATURE_MISSING", message, suggestion="Install Goondan anew, whole.") from None
        emit(answer, render_waits(answer))
        return
    if forget_limits:
        forgotten, lines = learned(bundle, forget=True)
        emit(forgotten, [f"forgotten: {line}" for line in lines] or ["nothing was learned"])
        return
    place = locate(bundle)
    reply = ask_supervisor(place.state_dir, "ps")
    rows: list[ProcessInfo] = []
    copy: str | None = None
    if reply is not None:
        rows, copy = reply.processes or [], reply.private_copy
    elif (broker := by_hand(place)) is not None:
        rows = external(broker)
    rows += [_row(one) for one in (running(place.state_dir) if rows else ())]
    emit(rows, _shown_processes(rows, place.bundle, copy))


def _row(one: Beside) -> ProcessInfo:
    """A row for what runs beside the kernel."""
    return ProcessInfo(role="beside", name=one.name, pid=one.pid, status=one.text or "running", since=one.since)


def _shown_processes(rows: list[ProcessInfo], bundle: str, copy: str | None) -> Iterator[str]:
    """`copy`: the folder that the code of the bundle at `bundle` runs from; None: the bundle itself."""
    if not rows:
        yield "no kernel runs " + bundle
        return
    yield from process_lines(rows, datetime.datetime.now(datetime.UTC))
    if copy is not None:
        yield from ("", f"others can write to {bundle}: its code runs from the copy {copy}")
    yield from learned(bundle, limits=False)[1]


def _kernel_lines(found: list[lock.KernelRecord], now: datetime.datetime) -> list[str]:
    lines = [
        (str(one.pid), _since(one.started_at, now), one.entry_agent or "-", one.bundle, one.state_dir) for one in found
    ]
    return columns([("PID", "SINCE", "ENTRY", "BUNDLE", "STATE"), *lines])


def external(broker: ByHand) -> list[ProcessInfo]:
    """The rows of a broker without a supervisor: the broker and its peers. How often they were restarted is not
    known.
    """
    from goondan.schemas.transport.link import boottime_ms  # the whole link, and hardly a broker has no supervisor

    with broker:
        peers = ask_kernel(broker, {"op": "peers"})["peers"]
        offset_ms = time.time() * 1000 - boottime_ms()
        own = {"role": "broker", "name": "broker", "pid": broker.pid, "startedMs": broker.started_ms}
        return [
            ProcessInfo(
                role=peer["role"],
                name=peer["name"],
                instance_key=peer.get("instanceKey"),
                pid=peer["pid"],
                status="external",
                since=rfc3339((peer["startedMs"] + offset_ms) / 1000),
                run_dir=broker.run_dir if peer is own else UNSET,
            )
            for peer in (own, *peers)
        ]


def process_lines(rows: list[ProcessInfo], now: datetime.datetime) -> list[str]:
    """The table: one line for each process, columns as wide as their content."""
    cells = [
        (
            row.role,
            row.name,
            row.instance_key or "-",
            str(row.pid) if row.pid is not None else "-",
            row.status,
            _since(row.since, now),
            str(row.restarts),
            row.last_exit or "-",
        )
        for row in rows
    ]
    note = [OPERATOR_NOTE] if any(row.name == OPERATOR_AGENT for row in rows) else []
    return [*columns([_COLUMNS, *cells]), *note]


def _since(moment: str, now: datetime.datetime) -> str:
    """How long ago a moment was; `-` for a text that is none."""
    try:
        return age((now - datetime.datetime.fromisoformat(moment)).total_seconds())
    except (ValueError, TypeError):
        return "-"


#: How long a restart may take (seconds): reading the bundle, the grace of the running turns, the ends of all processes,
#: and a start. Each has a limit of its own, and their sum is less than this.
RESTART_S: Final = 120.0


@click.command()
@options.bundle
@click.option(
    "--agent",
    metavar="AGENT",
    shell_complete=options.completed("agents"),
    help="Only the processes of this agent; the bundle is not read.",
)
@click.option("--fresh", is_flag=True, help="Conversations begin anew; what was said is kept in earlier.db.")
@options.json
def restart(bundle: str | None, agent: str | None, fresh: bool) -> None:
    """Restart a running swarm in place, with its bundle as it is now.

    Nothing is lost: conversations and messages stay, turns that run go on behind their next step, and commands that
    wait for an answer get it. A bundle that may not run changes nothing.
    """
    place = locate(bundle)
    client = SupervisorClient.connect(place.state_dir)
    if client is None:
        _check_by_hand(place, "E_RESTART_REFUSED", "Restart its processes as they were started.")
        raise fail("E_KERNEL_NOT_RUNNING", f"no kernel runs {place.bundle}")
    try:
        reply = client.ask("restart", RESTART_S, reason="gdn restart", agent=agent, fresh=fresh)
        pid = client.pid
    finally:
        client.close()
    if agent is not None:
        many = reply.restarted or 0
        text = f"restarted {many} process{'' if many == 1 else 'es'} of {one_line(agent, 100)}"
        emit({"restarted": "agent", "agent": agent, "processes": many, "fresh": fresh}, [text])
    else:
        emit({"restarted": "kernel", "pid": pid, "fresh": fresh}, [f"restarted, pid {pid}"])


#: How long the supervisor may take to accept the request to stop (seconds). One that takes longer hangs.
HEAR_S: Final = 2.0
#: After that, how long it has until it is killed (seconds).
DEAF_S: Final = 1.0
#: How often the command checks whether the signal was taken (seconds). A supervisor that works takes it at once.
HEAR_POLL_S: Final = 0.01


@click.command()
@options.bundle
@options.json
def stop(bundle: str | None) -> None:
    """Stop a running swarm."""
    place = locate(bundle)
    until = time.monotonic() + STOP_S
    client = SupervisorClient.connect(place.state_dir)
    if client is None:
        _check_by_hand(place, "E_KERNEL_RUNNING", "End its processes as they were started.")
        if (pidfd := lock.holder(place.state_dir)) is not None:
            _end(pidfd, place, until)
            return
        if not lock.clear_after_death(place.state_dir):
            message = f"processes of a killed kernel with the state in {place.state_dir} do not end"
            raise fail("E_KERNEL_RUNNING", message)
        emit({"stopped": False}, ["no kernel runs " + place.bundle])
        return
    patience = DEAF_S
    with suppress(GoondanError):
        client.ask("stop", HEAR_S)
        patience = max(DEAF_S, until - time.monotonic() - 1.0)  # a second is kept for the kill
    orderly = end_of(client.pidfd, place.state_dir, patience)
    client.close()
    _report(orderly)


def _check_by_hand(place: BundleTarget, code: str, suggestion: str) -> None:
    """Raise GoondanError when a kernel without a supervisor runs the bundle: nobody here can do that to it."""
    record = lock.read_record(place.state_dir)
    if record is not None and record.by_hand and lock.is_held(place.state_dir):
        message = f"the kernel of {place.bundle} was started by hand, without a supervisor"
        raise fail(code, message, suggestion=suggestion)


def _end(pidfd: int, place: BundleTarget, until: float) -> None:
    """End a supervisor whose runtime directory is gone: it still holds the lock, and still takes signals."""
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        patience = max(DEAF_S, until - time.monotonic() - 1.0) if _hears(pidfd) else DEAF_S
        orderly = end_of(pidfd, place.state_dir, patience)
    finally:
        os.close(pidfd)
    _report(orderly)


def _hears(pidfd: int) -> bool:
    """Whether the process takes the SIGTERM that was sent to it. In a stopped process the signal stays pending."""
    bit = 1 << signal.SIGTERM - 1
    until = time.monotonic() + HEAR_S
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as info:
            pid = next(line.split()[1] for line in info if line.startswith("Pid:"))
        while time.monotonic() < until:
            with open(f"/proc/{pid}/status") as status:
                pending = next(line.split()[1] for line in status if line.startswith("ShdPnd:"))
            if not int(pending, 16) & bit or has_ended(pidfd, HEAR_POLL_S):
                return True
    except OSError:
        return True  # it is gone
    return False


def _report(orderly: bool) -> None:
    text = "stopped" if orderly else "did not stop in time and was killed"
    emit({"stopped": True, "killed": not orderly}, [text])


COMMANDS = {"ps": ps, "restart": restart, "stop": stop}
