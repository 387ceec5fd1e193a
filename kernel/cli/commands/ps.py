"""`gdn ps`: the processes of a running kernel, also while its broker is down."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.operator_question import ask_broker, ask_kernel, learned_limits
from goondan.kernel.cli.output import write, write_json, write_result
from goondan.kernel.cli.terminal import OPERATOR_NOTE, columns
from goondan.kernel.cli.waits import render as render_waits
from goondan.kernel.cli.waits import render_limits

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import ByHand
    from goondan.kernel.supervisor_client import ProcessInfo

_COLUMNS = ("ROLE", "NAME", "INSTANCE", "PID", "STATUS", "SINCE", "RESTARTS", "LAST EXIT")


@click.command()
@options.bundle
@click.option("--all", "everywhere", is_flag=True, help="Show all your kernels, of whatever bundle and state root.")
@click.option("--why", is_flag=True, help="Show who waits for whom, and since when.")
@click.option("--forget-limits", is_flag=True, help="Forget what was learned of the limits of model servers.")
@options.as_json
def command(bundle: str | None, everywhere: bool, why: bool, forget_limits: bool, as_json: bool) -> int:
    """Show the processes of a running swarm, and what was learned of the limits of its model servers.

    --why shows what its agents wait for: their model, its server's limit, another agent, a person, a tool, a jail, an
    extension, a place, their turn, a process, a budget, room on the disk.
    """
    if everywhere:
        return _all(as_json)
    if why or forget_limits:
        return _why(bundle, as_json) if why else _forget(bundle, as_json)
    from goondan.kernel.cli.attach import by_hand, locate
    from goondan.kernel.supervisor_client import SupervisorClient

    place = locate(bundle)
    client = SupervisorClient.connect(place.state_dir)
    rows: list[ProcessInfo] = []
    copy: str | None = None
    if client is not None:
        reply = client.ask("ps")
        rows, copy = reply.processes or [], reply.private_copy
        client.close()
    elif (broker := by_hand(place)) is not None:
        rows = external(broker)
    if as_json:
        write_json(rows)
    elif rows:
        note = [] if copy is None else ["", f"others can write to {place.bundle}: its code runs from the copy {copy}"]
        note += render_limits(learned_limits(bundle))
        write(*render(rows, datetime.datetime.now(datetime.UTC)), *note)
    else:
        write("no kernel runs " + place.bundle)
    return 0


def _all(as_json: bool) -> int:
    from goondan.kernel.running import kernels

    found, now = kernels(), datetime.datetime.now(datetime.UTC)
    lines = [
        (str(one.pid), _age(one.started_at, now), one.entry_agent or "-", one.bundle, one.state_dir) for one in found
    ]
    table = columns([("PID", "SINCE", "ENTRY", "BUNDLE", "STATE"), *lines])
    write_result(found, *(table if found else ["no kernel of yours runs"]), as_json=as_json)
    return 0


def _why(bundle: str | None, as_json: bool) -> int:
    answer = ask_broker(bundle, {"op": "why"})
    write_result(answer, *render_waits(answer), as_json=as_json)
    return 0


def _forget(bundle: str | None, as_json: bool) -> int:
    answer = ask_broker(bundle, {"op": "gates", "forget": True})
    lines = [f"forgotten: {line}" for line in render_limits(answer["gates"])] or ["nothing was learned"]
    write_result(answer["gates"], *lines, as_json=as_json)
    return 0


def external(broker: ByHand) -> list[ProcessInfo]:
    """The rows of a broker without a supervisor: the broker and its peers. How often they were restarted is not
    known.
    """
    import time

    from msgspec import UNSET

    from goondan.kernel.supervisor_client import ProcessInfo
    from goondan.schemas.text.times import rfc3339
    from goondan.schemas.transport.link import boottime_ms

    try:
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
                restarts=0,
                last_exit=None,
                run_dir=broker.run_dir if peer is own else UNSET,
            )
            for peer in (own, *peers)
        ]
    finally:
        broker.finish()


def render(rows: list[ProcessInfo], now: datetime.datetime) -> list[str]:
    """The table: one line for each process, columns as wide as their content."""
    from goondan.schemas.wire.frames import OPERATOR_AGENT

    cells = [
        (
            row.role,
            row.name,
            row.instance_key or "-",
            str(row.pid) if row.pid is not None else "-",
            row.status,
            _age(row.since, now),
            str(row.restarts),
            row.last_exit or "-",
        )
        for row in rows
    ]
    note = [OPERATOR_NOTE] if any(row.name == OPERATOR_AGENT for row in rows) else []
    return [*columns([_COLUMNS, *cells]), *note]


def _age(since: str, now: datetime.datetime) -> str:
    """A time span in the largest unit of which it has at least one."""
    try:
        seconds = int((now - datetime.datetime.fromisoformat(since)).total_seconds())
    except (ValueError, TypeError):
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"
