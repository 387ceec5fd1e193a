"""`gdn trace [TURN]`: what a turn did and how long each part took, with or without a running kernel.

Source: design section 11; schemas/traces.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kernel.cli import options

if TYPE_CHECKING:
    from kernel.cli.terminal import Style
    from kernel.trace import ModelCall, Step, ToolCall, Trace
    from schemas.receipts import JailReceipt, Receipt


@click.command()
@click.argument("turn", required=False, metavar="[TURN]")
@click.option("--last", is_flag=True, help="The turn that began last (also without TURN).")
@click.option(
    "--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Look only at this agent's turns."
)
@click.option(
    "--instance",
    metavar="KEY",
    shell_complete=options.completed("instances"),
    help="Look only at this instance's turns.",
)
@options.bundle
@options.as_json
def command(
    turn: str | None, last: bool, agent: str | None, instance: str | None, bundle: str | None, as_json: bool
) -> int:
    """Show what a turn did: steps, model calls, tool calls, times, and what was seen of each call's jail.

    TURN is a turn's or an event's id, as `gdn send --json` prints them; without it, the turn that began last.
    """
    import sys

    from kernel.cli.output import write, write_json
    from kernel.cli.state import state_of
    from kernel.cli.terminal import style_of
    from kernel.paths import find_bundle
    from kernel.trace_files import find_trace
    from schemas.errors import fail

    if last and turn is not None:
        raise fail("E_USAGE", "give TURN or --last, not both")
    trace = find_trace(state_of(find_bundle(bundle)), turn, agent=agent, instance=instance)
    write_json(trace) if as_json else write(*render(trace, style_of(sys.stdout)))
    return 0


def render(trace: Trace, style: Style) -> list[str]:
    """A trace for a person: a line for each thing, with the time since the turn began."""
    from kernel.cli.terminal import printable

    whose = f"{printable(trace.agent)}/{'…' if trace.instance_key is None else printable(trace.instance_key)}"
    took = f" in {duration(trace.duration_ms)}" if trace.duration_ms is not None else ""
    attempt = f", attempt {trace.attempt}" if trace.attempt > 1 else ""
    lines = [
        f"{style.bold('turn ' + printable(trace.turn_id))}  {_status(trace.status, style)}{took}",
        f"  {whose}, event {printable(trace.event_id)}{attempt}, began {printable(trace.started_at)}",
    ]
    lines += [f"  taken up again at {printable(at)}" for at in trace.resumed_at]
    for step in trace.steps:
        lines += _step(trace, step, style)
    if trace.error is not None:
        lines.append(f"  {style.bad('error')}: {printable(trace.error.message)} [{printable(trace.error.code)}]")
    if tokens := _tokens(trace.input_tokens, trace.output_tokens):
        lines.append(f"  in all: {tokens}")
    return lines


def _step(trace: Trace, step: Step, style: Style) -> Iterator[str]:
    title = f"step {step.step}" if step.model is not None else "operator call"
    yield f"{_offset(trace, step.started_at)}  {style.bold(title)}"
    parts: list[tuple[str, str, Receipt | None]] = []
    if step.model is not None:
        parts.append((step.model.started_at, _model(step.model, style), None))
    parts += [(call.started_at, _tool(call, style), call.receipt) for call in step.tools]
    for index, (at, text, receipt) in enumerate(parts):
        branch, stem = ("└─", "  ") if index == len(parts) - 1 else ("├─", "│ ")
        yield f"{_offset(trace, at)}  {style.dim(branch)} {text}"
        if receipt is not None:
            yield f"{'':>10}  {style.dim(f'{stem}   {_jail(receipt.jail)}')}"


def _model(call: ModelCall, style: Style) -> str:
    from kernel.cli.terminal import printable

    what = [f"model {printable(call.model)}" if call.model else "model", _status(call.status, style, call.code)]
    what.append(duration(call.duration_ms) if call.duration_ms is not None else "")
    what.append(_tokens(call.input_tokens, call.output_tokens))
    what.append(style.dim(printable(call.finish_reason)) if call.finish_reason else "")
    return "  ".join(part for part in what if part)


def _tool(call: ToolCall, style: Style) -> str:
    from kernel.cli.terminal import printable

    took = duration(call.duration_ms) if call.duration_ms is not None else ""
    what = [printable(call.tool_name), _status(call.status, style, call.code), took]
    if call.direct:
        what.append(style.warning("not in the catalog, by policy"))
    return "  ".join(part for part in [*what, style.dim(printable(call.tool_call_id))] if part)


def _jail(jail: JailReceipt) -> str:
    """What the tool host saw of the jail until the call had its result."""
    from kernel.cli.terminal import printable

    what = [f"jail {jail.tier}", f"peak {jail.peak_memory_kb / 1024:.1f} MiB", f"cpu {duration(jail.cpu_ms)}"]
    if jail.denied:
        what.append(f"denied {' '.join(printable(host) for host in jail.denied)}")
    if jail.exit is not None:
        what.append(f"ended: {printable(jail.exit)}")
    return ", ".join(what)


def _status(status: str, style: Style, code: str | None = None) -> str:
    from kernel.cli.terminal import printable

    text = printable(status if code is None else f"{status} {code}")
    if status in ("completed", "answered", "ok"):
        return style.good(text)
    return style.warning(text) if status in ("running", "pending", "lost", "abandoned") else style.bad(text)


def _tokens(read: int | None, written: int | None) -> str:
    return "" if read is None and written is None else f"{read or 0} tokens in, {written or 0} out"


def _offset(trace: Trace, at: str) -> str:
    from kernel.trace import between_ms

    after = between_ms(trace.started_at, at)
    return f"{'' if after is None else '+' + duration(after):>10}"


def duration(ms: int) -> str:
    """A time in three digits or so: `7 ms`, `1.24 s`, `3 min 5 s`."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.2f} s"
    return f"{ms // 60_000} min {ms // 1000 % 60} s"
