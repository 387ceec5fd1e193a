"""`gdn denied`: the calls that were refused, over all agents, and the line that would allow each. No running kernel is
needed.

Source: docs/traces.md; docs/design/traces.md section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.commands import load_codes
from goondan.schemas.traces.turn_notes import RefusedDetail, Refuser
from goondan.schemas.wire.errors import refusers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from sqlite3 import Connection

#: Text in a line (characters).
_MAX_TEXT: Final = 400
_REFUSED: Final = "SELECT at, turn_id, detail FROM runtime_events WHERE type = 'call.refused' ORDER BY seq DESC LIMIT ?"

load_codes()  # of features, which refuse calls as well


@click.command()
@click.option("--by", type=click.Choice([*get_args(Refuser), *refusers()]), help="Only what was refused by this.")
@click.option("--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Only those of this agent.")
@click.option("-n", "number", type=click.IntRange(1, 50_000), default=50, show_default=True, help="So many at most.")
@options.bundle
@options.as_json
def command(by: str | None, agent: str | None, number: int, bundle: str | None, as_json: bool) -> int:
    """List the calls of tools that a catalog, a rule, a grant, a budget, a person or an extension refused, the last one
    first: when, whose, with what, why, and the line that would allow it.
    """
    import sys

    from goondan.kernel.cli.output import write, write_result
    from goondan.kernel.cli.state import state_of
    from goondan.kernel.paths import find_bundle
    from goondan.kernel.trace_files import conversation_files, read_file
    from goondan.schemas.wire.errors import GoondanError

    agent, instance = options.named(agent, None)
    found: list[dict[str, Any]] = []
    for place in conversation_files(state_of(find_bundle(bundle)), agent, instance):
        try:
            rows = read_file(place, lambda db: list(_refused(db, by, number))) or []
        except GoondanError as error:  # the others are shown
            write(f"not read: {error.info.message}", stream=sys.stderr)
            continue
        found += [{"agent": place.agent, "instanceKey": place.instance_key, **row} for row in rows]
    found = sorted(found, key=lambda row: str(row["at"]), reverse=True)[:number]
    write_result(found, *render(found), as_json=as_json)
    return 0


def _refused(db: Connection, by: str | None, number: int) -> Iterator[dict[str, Any]]:
    """The last ones of one file. What another version has written in another form is left out."""
    import msgspec

    for at, turn_id, text in db.execute(_REFUSED, (number if by is None else -1,)):
        try:
            detail = msgspec.json.decode(text, type=RefusedDetail)
        except (msgspec.DecodeError, TypeError, UnicodeError):
            continue
        if by in (None, detail.by):
            yield {"at": at, "turnId": turn_id, **msgspec.to_builtins(detail)}


def render(rows: list[dict[str, Any]]) -> list[str]:
    """Some lines for each call."""
    from goondan.kernel.cli.plain import one_line

    lines = []
    for row in rows:
        whose = f"{row['agent']}/{row['instanceKey'] or '…'}"
        what = row.get("toolName") or "the turn"
        told = [f"{row['at']}  {whose}  {what}  refused by {row['by']}  (gdn trace {row['turnId']})"]
        told += [f"    with {row['args']}"] if row.get("args") else []
        told += [f"    {row['message']} [{row['code']}]", f"    to allow it: {row['allow']}"]
        lines += [one_line(line, _MAX_TEXT) for line in told]
    return lines or ["nothing was refused"]
