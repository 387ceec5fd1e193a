"""`gdn logs`: what the processes of a swarm wrote. No running kernel is needed.

Source: docs/design/commands.md section 8.
"""

from __future__ import annotations

import datetime
import select
import sys
from collections.abc import Iterable
from typing import Final
from zlib import crc32

import click

from goondan.kernel.cli import options, state
from goondan.kernel.cli.output import Style, printable, style_of, write
from goondan.kernel.paths import find_bundle
from goondan.kernel.traces.logs import AGENT, Log, LogLine, log_files, merge, roles
from goondan.schemas.wire.errors import fail

#: Lines shown without --lines.
DEFAULT_LINES: Final = 100
#: How often -f looks for new lines (milliseconds): soon enough for a person, and cheap for the machine.
LOOK_MS: Final = 200


@click.command(name="logs")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
@click.option(
    "--role",
    metavar="ROLE",
    shell_complete=options.completed("roles"),
    help="Only supervisor, broker, toolhost, forkserver, agent (all of them) or agent-NAME.",
)
@click.option(
    "--lines", type=click.IntRange(0, 1_000_000), default=DEFAULT_LINES, show_default=True, help="How many lines."
)
@options.bundle
def logs(follow: bool, role: str | None, lines: int, bundle: str | None) -> None:
    """Show the logs of a swarm's processes, merged by time.

    What tools print and log is in the tool host's.
    """
    if role is not None and role not in (*roles(), AGENT) and not role.startswith(AGENT + "-"):
        raise fail("E_USAGE", f"--role is one of {', '.join(roles())}, {AGENT} and {AGENT}-NAME")
    folder = f"{state.state_of(find_bundle(bundle))}/logs"
    style = style_of(sys.stdout)
    logs = {name: Log(name, path) for name, path in log_files(folder, role).items()}
    shown = merge([log.tail(lines) for log in logs.values()], lines)
    if shown:
        write(*log_lines(shown, style))
    elif not logs and not follow:
        write(f"nothing in {folder} yet", stream=sys.stderr)
    if not follow:
        return
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # reports errors and hang-ups: then nobody reads any more
    while not reader.poll(LOOK_MS):
        for name, path in log_files(folder, role).items():
            logs.setdefault(name, Log(name, path))
        added = merge([log.look() for log in logs.values()])
        if added:
            write(*log_lines(added, style))
    raise BrokenPipeError


def log_lines(entries: Iterable[LogLine], style: Style) -> list[str]:
    """One line for each entry: local time, role, level unless it is INFO, text. Control characters are escaped."""
    lines = []
    for entry in entries:
        text = printable(entry.text, keep="\t")
        if entry.level != "INFO":
            paint = style.warning if entry.level in ("WARNING", "WARN", "DEBUG") else style.bad
            text = paint(f"{printable(entry.level)} {text}")
        role = style.of(crc32(entry.role.encode()), f"{printable(entry.role):<12}")
        lines.append(f"{style.dim(_local(entry.time))} {role} {text}")
    return lines


def _local(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return "-" * 23  # a tool has written a time that does not exist


COMMANDS = {"logs": logs}
