"""`gdn mcp list`: the MCP servers of a bundle, and how those are that run.

Source: docs/mcp.md, "Looking at servers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.terminal import columns, printable

if TYPE_CHECKING:
    from goondan.schemas.worker.tool_host_reports import WorkerNews

_COLUMNS = ("SERVER", "INSTANCE", "STATE", "ATTACHED", "CALLS", "MEMORY", "PID", "PROTOCOL")


@click.command(name="list")
@options.bundle
@options.policy
@options.as_json
def command(bundle: str | None, policy: str | None, as_json: bool) -> int:
    """Show the MCP servers of a bundle: state, calls, memory, last error."""
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.bundle.servers import is_mcp, prefix_of
    from goondan.kernel.cli.attach import locate
    from goondan.kernel.cli.output import write, write_json
    from goondan.kernel.supervisor_client import SupervisorClient

    place = locate(bundle, policy)
    client = SupervisorClient.connect(place.state_dir)
    running: list[WorkerNews] = []
    if client is not None:
        running = client.ask("ps").servers or []
        client.close()
    inspected = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy)
    rows = [row(news) for news in running if news.server is not None]
    seen = {one["server"] for one in rows}
    for prefix, server in sorted(inspected.checked.servers.items()):
        if prefix not in seen:
            rows.append(idle_row(prefix, server.spec.extension, server.spec.transport))
    named = {server.spec.extension for server in inspected.checked.servers.values()}
    for spec in (one.spec(None) for one in inspected.checked.extensions.values() if one.name not in named):
        if is_mcp(spec.entry, spec.bundled) and spec.config:
            told = idle_row(prefix_of(spec.name, spec.config), spec.name, spec.config["transport"]["type"])
            rows.append({**told, "state": "no agent names it"})
    if as_json:
        write_json(rows)
    elif rows:
        write(*render(rows))
    else:
        write(f"no MCP servers in {place.bundle}")
    return 0


def row(news: WorkerNews) -> dict[str, Any]:
    """One session of a server, as the tool host told of it last."""
    state = news.server
    if state is None:
        raise AssertionError("only news of servers has a row")
    return {
        "server": state.server,
        "extension": state.extension,
        "transport": state.transport,
        "agent": state.agent,
        "instanceKey": news.instance_key,
        "state": state.state,
        "protocolVersion": state.protocol_version,
        "attached": state.attached,
        "openCalls": state.open_calls,
        "calls": state.calls,
        "memoryKb": state.memory_kb,
        "pid": news.pid or None,
        "since": news.since,
        "lastError": state.last_error,
    }


def idle_row(prefix: str, extension: str, transport: str) -> dict[str, Any]:
    """A server that nobody has attached to."""
    return {
        "server": prefix,
        "extension": extension,
        "transport": transport,
        "agent": None,
        "instanceKey": None,
        "state": "idle",
        "protocolVersion": "",
        "attached": 0,
        "openCalls": 0,
        "calls": 0,
        "memoryKb": 0,
        "pid": None,
        "since": "",
        "lastError": None,
    }


def render(rows: list[dict[str, Any]]) -> list[str]:
    """The table, with the last error of a server below it. What servers and agents are called is text from outside."""
    head, *lines = columns([_COLUMNS, *map(_cells, rows)])
    shown = [head]
    for one, line in zip(rows, lines, strict=True):
        shown.append(line)
        if one["lastError"]:
            shown.append(f"    {printable(str(one['lastError']))}")
    return shown


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    instance = one["instanceKey"] or "-"
    if one["agent"]:
        instance = f"{one['agent']}/{instance}"
    calls = str(one["calls"]) + (f" ({one['openCalls']} open)" if one["openCalls"] else "")
    memory = f"{one['memoryKb'] // 1024} MiB" if one["memoryKb"] else "-"
    cells = (one["server"], instance, one["state"], str(one["attached"]), calls, memory, str(one["pid"] or "-"))
    return tuple(map(printable, (*cells, one["protocolVersion"] or "-")))
