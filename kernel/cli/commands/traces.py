"""`gdn trace`, `gdn turns` and `gdn denied`: what turns did and how long it took, the last messages of people, and the
calls that were refused. They read the notes on disk; no running kernel is needed.

Source: docs/traces.md; docs/design/traces.md; docs/design/commands.md section 8; schemas/traces/turn_notes.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec
from msgspec import structs

from goondan.kernel.cli import commands, options, state
from goondan.kernel.cli.output import Style, columns, emit, money, printable, style_of, write
from goondan.kernel.cli.rules.plain import duration, one_line
from goondan.kernel.paths import find_bundle
from goondan.kernel.traces.conversations import conversation_files, read_file
from goondan.kernel.traces.rules.tree import TraceTree, calls_of, total_of
from goondan.kernel.traces.rules.turn import ModelCall, Step, Tokens, ToolCall, Total, Trace, between_ms
from goondan.kernel.traces.rules.waterfall import rows, stages
from goondan.kernel.traces.search import Search
from goondan.schemas.text.times import rfc3339
from goondan.schemas.traces.turn_notes import RefusedDetail, Refuser, TryDetail
from goondan.schemas.wire import errors, spans

if TYPE_CHECKING:
    from sqlite3 import Connection

    from goondan.schemas.worker.receipts import JailReceipt


commands.load_codes()  # of features, which refuse calls as well

#: A line: the time since the beginning (None: the line shows no time), and the text.
Line = tuple[str | None, str]
#: Lines for the calls of one script. It may have made thousands.
MAX_INNER: Final = 30
#: Calls whose way is shown.
MAX_WATERFALLS: Final = 50
#: Arguments and results in a line (characters). --json has what is kept.
MAX_SAID: Final = 200
#: The statuses of turns and calls that are not over, or whose end is not known.
_OPEN: Final = ("running", "pending", "lost", "abandoned", "interrupted")


@click.command()
@click.argument("turn", required=False, metavar="[TURN]")
@click.option("--last", is_flag=True, help="The last message of a person, with all that it set going.")
@click.option("--waterfall", is_flag=True, help="Show the way of each tool call, from the agent to its jail and back.")
@click.option("--search", is_flag=True, help="Look into the files of all instances for a turn that the index has not.")
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
@options.json
def trace_(
    turn: str | None,
    last: bool,
    waterfall: bool,
    search: bool,
    agent: str | None,
    instance: str | None,
    bundle: str | None,
) -> None:
    """Show what a turn did: steps, model calls, tool calls, times, what was seen of each call's jail, and the turns of
    other agents that it asked for.

    TURN is the id of a turn, of an event or of a trace, as `gdn send --json` prints them, or the correlation id of what
    an agent has asked. Without it, what began last is shown, calls of `gdn call` included.
    """
    if last and turn is not None:
        raise errors.fail("E_USAGE", "give TURN or --last, not both")
    agent, instance = options.named(agent, instance)
    found = find_trace(state.state_of(find_bundle(bundle)), turn, agent, instance, search, last)
    found.total = total_of(found)
    emit(found, (waterfall_lines if waterfall else trace_lines)(found, style_of(sys.stdout)))


def find_trace(
    state_dir: str, name: str | None, agent: str | None, instance: str | None, search: bool, last: bool
) -> Trace | TraceTree:
    """The part to show: a trace, or a turn with all turns that it led to. Raises GoondanError."""
    looking = Search(state_dir, rfc3339(time.time()), everywhere=search)
    if last and agent is None and instance is None and (messages := looking.messages(1)):
        return messages[0]
    if name is None:
        return looking.last(agent, instance)
    if agent is None and instance is None and spans.is_trace_id(name) and (tree := looking.trace(name)) is not None:
        return tree
    return looking.turn(name, agent, instance)


def trace_lines(found: Trace | TraceTree, style: Style) -> list[str]:
    """A turn or a trace for a person: one line for each step, call and turn, with the time since the beginning."""
    total = total_of(found)
    if isinstance(found, Trace):
        lines = list(_turn(found, found.started_at, style))
        if found.trace_id is not None:
            lines.append((None, f"  in trace {printable(found.trace_id)}"))
    else:
        took = f" in {duration(found.duration_ms)}" if found.duration_ms is not None else ""
        turns = "1 turn" if total.turns == 1 else f"{total.turns} turns"
        agents = ", ".join(map(printable, total.agents))
        began = f"{duration(found.work_ms)} of work, began {printable(found.started_at)}"
        lines = [
            (None, f"{style.bold('trace ' + printable(found.trace_id))}  {_status(found.status, style)}{took}"),
            (None, f"  {turns} of {agents}, {began}"),
        ]
        for turn in found.turns:
            lines += _turn(turn, found.started_at, style)
        if found.left_out:
            lines.append((None, f"  {style.warning(f'{found.left_out} more turns are not shown')}"))
    if used := _used(total):
        turns = f" of {total.turns} turns" if total.turns > 1 else ""
        lines.append((None, f"  in all{turns}: {used}"))
    return [text if offset is None else f"{offset:>10}  {text}" for offset, text in lines]


def waterfall_lines(found: Trace | TraceTree, style: Style) -> list[str]:
    """The way of each tool call for a person: a line for each stage, with its times and a bar."""
    lines: list[str] = []
    calls = calls_of(found)
    for call in calls[:MAX_WATERFALLS]:
        table = columns(rows(stages(call))) if call.way is not None else ["its way was not kept"]
        lines += [_tool(call, style), *(f"  {line}" for line in table)]
    if len(calls) > MAX_WATERFALLS:
        lines.append(f"and {len(calls) - MAX_WATERFALLS} more calls; --json has them")
    return lines or ["no tool was called"]


def _turn(trace: Trace, start: str, style: Style) -> Iterator[Line]:
    """The lines of one turn, and of everything below it."""
    whose = f"{printable(trace.agent)}/{'…' if trace.instance_key is None else printable(trace.instance_key)}"
    took = f" in {duration(trace.duration_ms)}" if trace.duration_ms is not None else ""
    attempt = f", attempt {trace.attempt}" if trace.attempt > 1 else ""
    yield None, f"{style.bold('turn ' + printable(trace.turn_id))}  {_status(trace.status, style)}{took}"
    yield None, f"  {whose}, event {printable(trace.event_id)}{attempt}, began {printable(trace.started_at)}"
    if where := _times(trace):
        yield None, f"  {where}"
    for at in trace.resumed_at:
        yield None, f"  taken up again at {printable(at)}"
    if trace.status == "interrupted":
        words = f"interrupted since {printable(trace.last_at or trace.started_at)}: its kernel has ended"
        yield None, f"  {style.warning(f'{words}; it goes on when the kernel starts again')}"
    for hang in trace.hangs:
        took = "and has not gone on" if hang.duration_ms is None else f"for {duration(hang.duration_ms)}"
        words = f"extension {printable(hang.extension)} hung at {printable(hang.point)} {took}"
        yield _offset(start, hang.started_at), style.warning(words)
    for step in trace.steps:
        yield from _step(step, start, style)
    if trace.turns:
        yield "", style.bold("asked by the turn itself")
        yield from _below(trace.turns, "", start, style)
    if trace.error is not None:
        yield None, f"  {style.bad('error')}: {printable(trace.error.message)} [{printable(trace.error.code)}]"


def _times(trace: Trace) -> str:
    """How a turn used its time: its work, and its waits."""
    waits = trace.waits
    if waits is None:
        return ""
    named = (
        ("the model", waits.model_ms),
        ("agents", waits.agents_ms),
        ("jails", waits.sandbox_ms),
        ("a process", waits.lost_ms),
        ("a person", waits.person_ms),
    )
    told = [f"work {duration(trace.work_ms)}"] if trace.work_ms is not None else []
    told += [f"waited for {what} {duration(ms)}" for what, ms in named if ms]
    if waits.queue_ms:
        told.append(f"in the queue before {duration(waits.queue_ms)}")
    if waits.place_ms:
        told.append(f"for a place {duration(waits.place_ms)}")
    return ", ".join(told)


def _step(step: Step, start: str, style: Style) -> Iterator[Line]:
    title = f"step {step.step}" if step.model is not None else "operator call"
    took = f"  {duration(step.duration_ms)}" if step.duration_ms is not None else ""
    yield _offset(start, step.started_at), f"{style.bold(title)}{took}"
    if step.model is not None:
        branch = "├─" if step.tools else "└─"
        yield _offset(start, step.model.started_at), f"{style.dim(branch)} {_model(step.model, style)}"
        stem = "│ " if step.tools else "  "
        for failed in step.model.tries:
            yield "", style.dim(f"{stem}   {_try(failed)}")
    for call in step.tools:
        branch, stem = ("└─", "  ") if call is step.tools[-1] else ("├─", "│ ")
        yield _offset(start, call.started_at), f"{style.dim(branch)} {_tool(call, style)}"
        yield from _said(call, f"{stem}   ", style)
        if call.receipt is not None:
            yield "", style.dim(f"{stem}   {_jail(call.receipt.jail)}")
        yield from _inner(call, stem, start, style)
        yield from _below(call.turns, stem, start, style)


def _inner(script: ToolCall, stem: str, start: str, style: Style) -> Iterator[Line]:
    """The calls that a script has made, further to the right. Of many only the first ones."""
    shown = script.calls if len(script.calls) <= MAX_INNER else script.calls[: MAX_INNER - 1]
    more = len(script.calls) - len(shown)
    for call in shown:
        branch = "└─" if call is shown[-1] and not more else "├─"
        yield _offset(start, call.started_at), f"{style.dim(f'{stem} {branch}')} {_tool(call, style)}"
        yield from _said(call, f"{stem}    ", style)
        yield from _below(call.turns, f"{stem}   ", start, style)
    if more:
        failed = sum(1 for call in script.calls if call.status == "error")
        of_all = f"; {failed} of all {len(script.calls)} failed" if failed else ""
        yield "", style.dim(f"{stem} └─ and {more} more calls{of_all}; --json has them")


def _said(call: ToolCall, stem: str, style: Style) -> Iterator[Line]:
    """The arguments of a call and what it gave, each in one line, as far as they are known."""
    allow = None if call.refused is None else f"{call.refused.by}; to allow it: {call.refused.allow}"
    for what, text in (("with", call.args), ("gave", call.output or call.message), ("refused by", allow)):
        if text:
            yield "", style.dim(f"{stem}{what} {one_line(text, MAX_SAID)}")


def _below(turns: list[Trace], stem: str, start: str, style: Style) -> Iterator[Line]:
    """The turns below a call or a turn: beside the same times, further to the right."""
    for turn in turns:
        began = _offset(start, turn.started_at)
        for offset, text in _turn(turn, start, style):
            yield began if offset is None else offset, f"{style.dim(stem)}   {text}"
            began = ""  # only the first line has it


def _model(call: ModelCall, style: Style) -> str:
    what = [f"model {printable(call.model)}" if call.model else "model", _status(call.status, style, call.code)]
    what.append(duration(call.duration_ms) if call.duration_ms is not None else "")
    what.append(_used(call))
    what.append(f"asked for {printable(call.asked)}" if call.asked else "")
    what.append(f"{call.attempts} tries, {duration(call.paused_ms)} between them" if call.attempts > 1 else "")
    what.append(f"held back {duration(call.paused_ms)}" if call.attempts == 1 and call.paused_ms else "")
    what.append(f"waited {duration(call.waited_ms)} for others" if call.waited_ms else "")
    what.append(f"{call.left_out} messages left out" if call.left_out else "")
    what.append(f"{call.shortened} results shortened" if call.shortened else "")
    what.append(style.dim(printable(call.finish_reason)) if call.finish_reason else "")
    what.append(style.warning("cut off") if call.cut_off else "")
    return "  ".join(part for part in what if part)


def _try(failed: TryDetail) -> str:
    """An attempt that failed and was followed by another one."""
    after = f"; the next {duration(failed.waited_ms)} later" if failed.waited_ms else ""
    return f"tried: {printable(failed.error)}{after}"


def _tool(call: ToolCall, style: Style) -> str:
    took = duration(call.duration_ms) if call.duration_ms is not None else ""
    what = [printable(call.tool_name), _status(call.status, style, call.code), took]
    if call.turns and call.work_ms is not None:
        what.append(f"work {duration(call.work_ms)}")
    if call.direct:
        what.append(style.warning("not in the catalog, by policy"))
    return "  ".join(part for part in [*what, style.dim(printable(call.tool_call_id))] if part)


def _jail(jail: JailReceipt) -> str:
    """What the tool host observed of the jail before the call had its result."""
    what = [f"jail {jail.tier}", f"peak {jail.peak_memory_kb / 1024:.1f} MiB", f"cpu {duration(jail.cpu_ms)}"]
    if jail.denied:
        what.append(f"denied {' '.join(printable(host) for host in jail.denied)}")
    if jail.exit is not None:
        what.append(f"ended: {printable(jail.exit)}")
    return ", ".join(what)


def _status(status: str, style: Style, code: str | None = None) -> str:
    text = printable(status if code is None else f"{status} {code}")
    if status in ("completed", "answered", "ok"):
        return style.good(text)
    return style.warning(text) if status in _OPEN else style.bad(text)


def _used(counts: Tokens) -> str:
    """`900 tokens in (800 cached, 50 into the cache), 70 out (60 reasoning), $0.01`; "" when nobody has counted."""
    if not counts.input_tokens and not counts.output_tokens:
        return ""
    cached = [(counts.cached_tokens, "cached"), (counts.cache_write_tokens, "into the cache")]
    read = ", ".join(f"{count} {what}" for count, what in cached if count)
    reasoned = f" ({counts.reasoning_tokens} reasoning)" if counts.reasoning_tokens else ""
    read = f" ({read})" if read else ""
    tokens = f"{counts.input_tokens} tokens in{read}, {counts.output_tokens} out{reasoned}"
    return ", ".join([tokens, *(money(cost, currency) for currency, cost in counts.costs.items())])


def _offset(start: str, at: str) -> str:
    after = between_ms(start, at)
    return "" if after is None else f"+{duration(after)}"


#: How much of a message is shown (characters).
_WORDS: Final = 60
_COLUMNS: Final = ("TURN", "STATE", "BEGAN", "TOOK", "AGENTS", "TOKENS", "MONEY", "MESSAGE")


@click.command()
@click.option("-n", "number", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many at most.")
@options.bundle
@options.json
def turns(number: int, bundle: str | None) -> None:
    """List the last messages of people, the last one first: state, time, agents, tokens and money of all turns that a
    message set going, and its first words. `gdn trace TURN` shows one.
    """
    found = Search(state.state_of(find_bundle(bundle)), rfc3339(time.time())).messages(number)
    totals = [(turn, total_of(turn)) for turn in found]
    emit(
        [structs.replace(turn, total=total, steps=[], turns=[]) for turn, total in totals],
        message_lines(totals) if found else ["no message yet"],
    )


def message_lines(turns: Sequence[tuple[Trace, Total]]) -> list[str]:
    """One line for each message."""
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


#: Text in a line (characters).
_MAX_TEXT: Final = 400
_REFUSED: Final = "SELECT at, turn_id, detail FROM runtime_events WHERE type = 'call.refused' ORDER BY seq DESC LIMIT ?"


@click.command()
@click.option(
    "--by",
    type=click.Choice(list(dict.fromkeys((*get_args(Refuser), *errors.refusers())))),
    help="Only what was refused by this.",
)
@click.option("--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Only those of this agent.")
@click.option("-n", "number", type=click.IntRange(1, 50_000), default=50, show_default=True, help="So many at most.")
@options.bundle
@options.json
def denied(by: str | None, agent: str | None, number: int, bundle: str | None) -> None:
    """List the calls of tools that a catalog, a rule, a grant, a budget, a person or an extension refused, the last one
    first: when, whose, with what, why, and the line that would allow it.
    """
    agent, instance = options.named(agent, None)
    found: list[dict[str, Any]] = []
    for place in conversation_files(state.state_of(find_bundle(bundle)), agent, instance):
        try:
            rows = read_file(place, lambda db: list(_refused(db, by, number))) or []
        except errors.GoondanError as error:  # the others are shown
            write(f"not read: {error.info.message}", stream=sys.stderr)
            continue
        found += [{"agent": place.agent, "instanceKey": place.instance_key, **row} for row in rows]
    found = sorted(found, key=lambda row: str(row["at"]), reverse=True)[:number]
    emit(found, refused_lines(found))


def _refused(db: Connection, by: str | None, number: int) -> Iterator[dict[str, Any]]:
    """The last ones of one file. What another version has written in another form is left out."""
    for at, turn_id, text in db.execute(_REFUSED, (number if by is None else -1,)):
        try:
            detail = msgspec.json.decode(text, type=RefusedDetail)
        except (msgspec.DecodeError, TypeError, UnicodeError):
            continue
        if by in (None, detail.by):
            yield {"at": at, "turnId": turn_id, **msgspec.to_builtins(detail)}


def refused_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Some lines for each call."""
    lines = []
    for row in rows:
        whose = f"{row['agent']}/{row['instanceKey'] or '…'}"
        what = row.get("toolName") or "the turn"
        told = [f"{row['at']}  {whose}  {what}  refused by {row['by']}  (gdn trace {row['turnId']})"]
        told += [f"    with {row['args']}"] if row.get("args") else []
        told += [f"    {row['message']} [{row['code']}]", f"    to allow it: {row['allow']}"]
        lines += [one_line(line, _MAX_TEXT) for line in told]
    return lines or ["nothing was refused"]


COMMANDS = {"trace": trace_, "turns": turns, "denied": denied}
