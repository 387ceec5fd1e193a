"""`gdn turns`: the last messages of people, each with what became of it. No running kernel is needed.

Source: docs/traces.md; docs/design/traces.md section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from goondan.kernel.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goondan.kernel.trace import Total, Trace

#: How much of a message is shown (characters).
_WORDS: Final = 60
_COLUMNS: Final = ("TURN", "STATE", "BEGAN", "TOOK", "AGENTS", "TOKENS", "MONEY", "MESSAGE")


@click.command()
@click.option("-n", "number", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many at most.")
@options.bundle
@options.as_json
def command(number: int, bundle: str | None, as_json: bool) -> int:
    """List the last messages of people, the last one first: state, time, agents, tokens and money of all turns that a
    message set going, and its first words. `gdn trace TURN` shows one.
    """
    import time

    from msgspec import structs

    from goondan.kernel.cli.output import write_result
    from goondan.kernel.cli.state import state_of
    from goondan.kernel.paths import find_bundle
    from goondan.kernel.trace_search import Search
    from goondan.kernel.trace_tree import total_of
    from goondan.schemas.text.times import rfc3339

    found = Search(state_of(find_bundle(bundle)), rfc3339(time.time())).messages(number)
    totals = [(turn, total_of(turn)) for turn in found]
    write_result(
        [structs.replace(turn, total=total, steps=[], turns=[]) for turn, total in totals],
        *(render(totals) if found else ["no message yet"]),
        as_json=as_json,
    )
    return 0


def render(turns: Sequence[tuple[Trace, Total]]) -> list[str]:
    """One line for each message."""
    from goondan.kernel.cli.answered import money
    from goondan.kernel.cli.plain import duration, one_line
    from goondan.kernel.cli.terminal import columns

    lines: list[tuple[str, ...]] = [_COLUMNS]
    for turn, total in turns:
        tokens = total.input_tokens + total.output_tokens
        line = (
            turn.turn_id,
            turn.status,
            turn.started_at[:19],
            "-" if turn.duration_ms is None else duration(turn.duration_ms),
            ",".join(total.agents),
            f"{tokens:,}" if tokens else "-",
            " + ".join(money(cost, currency) for currency, cost in total.costs.items()) or "-",
            one_line(turn.message or "-", _WORDS),
        )
        lines.append(line)
    return columns(lines)
