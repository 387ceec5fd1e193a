"""`gdn instance list|show|export|delete`: the instances of a workspace, also those without a process.

Files on disk are read as `gdn trace` reads them. If a kernel runs, it is asked for the rest. Only the kernel deletes,
because only the kernel knows which work an instance still has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.attach import attach
from goondan.kernel.cli.operator_question import NO_SUCH_QUESTION, ask_broker, ask_kernel
from goondan.kernel.cli.output import OPERATOR_NOTE, can_ask, columns, confirmed, emit, token_text, write_json
from goondan.kernel.cli.rules import batch, plain
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.kernel.traces.conversations import Instance, Overview, instances, messages, overview
from goondan.kernel.traces.search import Search
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_AGENT

#: How long a deletion may take (seconds). The turn, the process and the jails have 5 to 15 s each, and a broker that
#: ends in between is back after a few seconds.
_DELETE_S: Final = 60.0
_agent: Final = click.argument("agent", shell_complete=options.completed("agents"))
_key: Final = click.argument("key", default=options.DEFAULT_INSTANCE, shell_complete=options.completed("instances"))


@click.command(name="list")
@options.bundle
@click.option("--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Only those of this agent.")
@options.json
def list_(bundle: str | None, agent: str | None) -> None:
    """List them, the one that was used last first. Other commands take the names as they stand here: AGENT/KEY.

    Calls of `gdn call` have an agent of their own, which --agent _operator shows.
    """
    rows = instance_rows(locate(bundle), agent)
    emit(rows, instance_lines(rows))


def instance_rows(place: BundleTarget, agent: str | None) -> list[dict[str, Any]]:
    """The rows of `gdn instance list --json`."""
    running = _processes(place)
    return [
        {
            **found.document(),
            "status": running.get((found.agent, found.instance_key or ""), {}).get("status", "dormant"),
        }
        for found in instances(place.state_dir, agent)
    ]


@click.command(name="show")
@_agent
@_key
@options.bundle
@options.json
def show(agent: str, key: str, bundle: str | None) -> None:
    """Show one: its conversation in numbers, its files, its process, its last turn, and the messages that wait for it.
    KEY is `default` if left out. AGENT/KEY will do as well.
    """
    agent, key = options.named(agent, key)
    document = instance_document(locate(bundle), agent, key)
    numbers = document["conversation"]
    parts = ("events", "lastTurn", "conversation")
    lines = [f"{name:<16} {plain.one_line(str(document[name]), 200)}" for name in document if name not in parts]
    lines += [f"{'messages':<16} {numbers.messages}{span_text(numbers)}", f"{'tokens':<16} {token_text(numbers.usage)}"]
    last_turn = document["lastTurn"]
    if last_turn is not None:
        lines.append(f"{'lastTurn':<16} {last_turn['turnId']} {last_turn['status']} {last_turn['startedAt']}")
    lines += [f"{event['state']:<16} {plain.one_line(event['eventId'], 200)}" for event in document["events"]]
    emit(document, lines)


def instance_document(place: BundleTarget, agent: str, key: str) -> dict[str, Any]:
    """The document of `gdn instance show --json`. Raises GoondanError E_INSTANCE_NOT_FOUND."""
    found = found_instance(place, agent, key)
    process = _processes(place).get((agent, key))
    document: dict[str, Any] = {**found.document(), "status": "dormant", "pid": None, "restarts": 0, "lastExit": None}
    document |= process or {}
    document["workdir"] = instance_workdir(place.state_dir, agent, key)
    document["conversation"] = overview(place.state_dir, agent, key, _generation(place, agent))
    document["events"], document["more"] = _events(place, agent, key)
    document["lastTurn"] = None
    try:
        last = Search(place.state_dir, rfc3339(time.time())).last_alone(agent, key)
        document["lastTurn"] = {"turnId": last.turn_id, "status": last.status, "startedAt": last.started_at}
    except GoondanError as error:
        if error.info.code != "E_TURN_NOT_FOUND":
            raise
    return document


@click.command(name="export")
@_agent
@_key
@options.bundle
def export(agent: str, key: str, bundle: str | None) -> None:
    """Print a conversation as one JSON document, with all its messages: {agent, instanceKey, messages}. KEY is
    `default` if left out.
    """
    agent, key = options.named(agent, key)
    place, _ = begun(agent, key, bundle)
    found = messages(place.state_dir, agent, key, _generation(place, agent))
    write_json({"agent": agent, "instanceKey": key, "messages": found})


@click.command(name="delete")
@_agent
@click.argument("key", required=False, shell_complete=options.completed("instances"))
@options.bundle
@click.option("--force", is_flag=True, help="Cancel its work first; whoever waits for it is told so.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.json
def delete(agent: str, key: str | None, bundle: str | None, force: bool, yes: bool) -> None:
    """Delete one for good: its conversation, its traces and its workdir.

    One that has work is refused, unless --force is given. A workdir that others work in stays, and so does a folder of
    your own. What is sent to it later begins a new one. A kernel must run.
    """
    agent, key = options.named(agent, key)
    if key is None:
        raise fail("E_USAGE", "name the instance: AGENT KEY, or AGENT/KEY")
    delete_instance(agent, key, bundle, force=force, yes=yes)


def delete_instance(agent: str, key: str, bundle: str | None, *, force: bool, yes: bool) -> None:
    """Delete an instance. Raises GoondanError."""
    batch.check_instance(key)
    place = locate(bundle)
    name = plain.one_line(f"{agent}/{key}", 400)
    with attach(place) as kernel:
        if not yes and can_ask() and not confirmed(_question(place, agent, key, name)):
            raise fail("E_CANCELLED", f"{name} was not deleted", suggestion="Answer y, or give --yes.")
        question = {"op": "instance.delete", "agent": agent, "instanceKey": key, "force": force}
        answer = ask_kernel(kernel, question, _DELETE_S)
    emit(answer, [f"deleted {name}"])


def begun(agent: str, key: str, bundle: str | None) -> tuple[BundleTarget, Instance]:
    """An instance, and whose it is. Raises GoondanError E_INSTANCE_NOT_FOUND for one that nobody began."""
    place = locate(bundle)
    return place, found_instance(place, agent, key)


def found_instance(place: BundleTarget, agent: str, key: str) -> Instance:
    """An instance of a workspace. Raises GoondanError E_INSTANCE_NOT_FOUND for one that nobody began."""
    batch.check_instance(key)
    found = next(iter(instances(place.state_dir, agent, key)), None)
    if found is None:
        raise fail("E_INSTANCE_NOT_FOUND", f"there is no instance {agent[:100]}/{key[:100]}")
    return found


def span_text(numbers: Overview) -> str:
    """From when to when the messages are, for a person."""
    return "" if numbers.since is None else f", from {numbers.since} to {numbers.last}"


def _generation(place: BundleTarget, agent: str) -> int:
    """From when on a conversation counts, as the kernel that runs says. 0 when none runs, or it has no such agent, or
    no feature of it lets a conversation begin anew.
    """
    try:
        return int(ask_broker(place.bundle, {"op": "generation", "agent": agent})["generation"])
    except GoondanError as error:
        if error.info.code in ("E_KERNEL_NOT_RUNNING", NO_SUCH_QUESTION):
            return 0
        raise


def _question(place: BundleTarget, agent: str, key: str, name: str) -> str:
    """The question, with what will be deleted."""
    found = next(iter(instances(place.state_dir, agent, key)), None)
    size = "" if found is None else f" ({max(1, found.bytes // 1024)} KiB)"
    return f"Delete {name}, with its conversation{size} and the files in its workdir? It cannot be brought back. [y/N] "


def instance_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each instance: its status, its size, and when it was written last. Its name comes last, because it
    is text from outside; all commands take it as it stands there.
    """
    lines = [("STATUS", "BYTES", "WRITTEN", "INSTANCE")]
    for row in rows:
        name = f"{row['agent']}/{row['instanceKey'] if row['instanceKey'] is not None else row['folder']}"
        lines.append((row["status"], str(row["bytes"]), row["written"], plain.one_line(name, 400)))
    note = [OPERATOR_NOTE] if any(row["agent"] == OPERATOR_AGENT for row in rows) else []
    return [*columns(lines), *note] if rows else ["there are no instances yet"]


def _processes(place: BundleTarget) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of `gdn ps` about agents, by agent and key; empty when no kernel runs."""
    reply = ask_supervisor(place.state_dir, "ps")
    return {
        (row.name, row.instance_key or ""): {
            "status": row.status,
            "pid": row.pid,
            "restarts": row.restarts,
            "lastExit": row.last_exit,
        }
        for row in (() if reply is None else reply.processes or ())
        if row.role == "agent"
    }


def _events(place: BundleTarget, agent: str, key: str) -> tuple[list[dict[str, Any]], int]:
    """The event that the instance works on and the events that wait for it. Empty when no kernel runs."""
    try:
        answer = ask_broker(place.bundle, {"op": "events", "agent": agent, "instanceKey": key})
    except GoondanError as error:
        # No kernel runs, or the running bundle no longer has this agent.
        if error.info.code in ("E_KERNEL_NOT_RUNNING", "E_AGENT_NOT_FOUND"):
            return [], 0
        raise
    return list(answer["events"]), int(answer["more"])


COMMANDS = {
    "instance list": list_,
    "instance show": show,
    "instance export": export,
    "instance delete": delete,
}
