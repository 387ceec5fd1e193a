"""What a person is told about an answer besides its text. It goes to stderr, so a pipe gets the text alone.

Source: docs/design/commands.md section 2.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from goondan.kernel.cli.output import is_terminal, write, write_text
from goondan.kernel.cli.terminal import printable, style_of
from goondan.schemas.wire.errors import ENVIRONMENT, GoondanError
from goondan.schemas.wire.frames import Answer, ErrorPayload
from goondan.schemas.wire.usage import Usage
from goondan.schemas.worker.tool_host_reports import WorkerNews

#: The exit status of `gdn send` for an answer that was cut off.
CUT_OFF_STATUS = 3


def tell_reasoning(answer: Answer) -> None:
    """Print the reasoning, unless the terminal on stdout has shown it while it came."""
    if answer.reasoning and not is_terminal(sys.stdout):
        write_text(answer.reasoning, stream=sys.stderr)


def tell_cut_off(answer: Answer) -> None:
    """Say that an answer was cut off, if it was."""
    if not answer.cut_off:
        return
    reason = f" ({printable(answer.finish_reason)})" if answer.finish_reason else ""
    told = (
        f"gdn: the answer was cut off at the model's limit of tokens{reason}; max_tokens in the Model's params sets it"
    )
    write(style_of(sys.stderr).warning(told), stream=sys.stderr)


def kept_lines(error: ErrorPayload, event_id: str) -> list[str]:
    """Where a message is that failed by no fault of its own."""
    kept = error.code in ENVIRONMENT
    return [f"  the message is kept: gdn dead requeue {printable(event_id)} sends it again"] if kept else []


def tell_usage(answer: Answer) -> None:
    """Say on a terminal what the turn has used, in one dim line; nothing where the server has counted nothing."""
    usage = answer.usage
    if usage is not None and (usage.input_tokens or usage.output_tokens) and is_terminal(sys.stderr):
        write(style_of(sys.stderr).dim(usage_line(usage, answer.model)), stream=sys.stderr)


def tell_servers(state_dir: str, told: set[str]) -> None:
    """Say which MCP servers have ended by themselves, or never began, with their last words; each once. What was said
    is added to `told`.
    """
    from goondan.kernel.supervisor_client import SupervisorClient

    servers: list[WorkerNews] = []
    with suppress(GoondanError, OSError):  # the kernel has ended, and that is said elsewhere
        client = SupervisorClient.connect(state_dir)
        if client is not None:
            servers = client.ask("ps").servers or []
            client.close()
    for news in servers:
        state = news.server
        if state is not None and state.state == "ended" and state.last_error and state.last_error not in told:
            told.add(state.last_error)
            line = f"gdn: {printable(state.last_error)}; `gdn mcp list` shows how it is"
            write(style_of(sys.stderr).warning(line), stream=sys.stderr)


def usage_line(usage: Usage, model: str | None) -> str:
    """What was used, in one line: `1,204 tokens in (980 cached), 40 out, $0.012300, openai/gpt-5.5`."""
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    thought = f" ({usage.reasoning_tokens:,} reasoning)" if usage.reasoning_tokens else ""
    parts = [f"{usage.input_tokens:,} tokens in{cached}", f"{usage.output_tokens:,} out{thought}"]
    if usage.cost is not None:
        parts.append(money(usage.cost, usage.currency))
    return ", ".join([*parts, *([] if model is None else [printable(model)])])


def money(cost: float, currency: str | None) -> str:
    """An amount of money: dollars with their sign, at least two digits behind the point and at most six."""
    whole = f"{cost:,.6f}".rstrip("0")
    digits = whole + "0" * max(0, 2 - len(whole.partition(".")[2]))
    return f"${digits}" if currency in (None, "USD") else f"{digits} {currency}"
