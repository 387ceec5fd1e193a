"""`gdn record FILE`: a run as a file, from which `gdn replay` and `provider: replay` repeat it without a model."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.output import error_lines, write, write_json, write_text
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goondan.kernel.cli.attach import BundleTarget, Kernel
    from goondan.kernel.cli.message_files import OpenFile
    from goondan.schemas.wire.frames import Answer


@click.command(epilog="Without MESSAGE each line of standard input is one.")
@click.argument("file", metavar="FILE", shell_complete=options.completed_path("file"))
@click.argument("messages", metavar="[MESSAGE]…", nargs=-1)
@options.bundle
@options.policy
@options.trust
@click.option("--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Who gets the messages.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--attach",
    "attached",
    metavar="FILE",
    multiple=True,
    shell_complete=options.completed_path("file"),
    help="A picture or a PDF that comes with the first message; may be given several times.",
)
@options.as_json
def command(
    file: str,
    messages: tuple[str, ...],
    attached: tuple[str, ...],
    bundle: str | None,
    policy: str | None,
    trust: bool,
    agent: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Start a swarm, send it messages one after the other, and write the run to FILE.

    The run has instances of its own, so it begins without a history. What the models answered and what the tools
    resulted in is written without secrets. Other commands can use the swarm meanwhile; that is recorded as well.
    """
    from goondan.kernel.bundle.recordings import RECORD_VARIABLE
    from goondan.kernel.cli.attach import locate, start
    from goondan.kernel.cli.message_files import open_files
    from goondan.kernel.recordings import collect, make

    if os.path.lexists(file) and not force:
        raise fail("E_USAGE", f"{file} is there already", suggestion="Give --force to replace it.")
    texts = messages or _lines()
    files = open_files(attached)
    place = locate(bundle, policy, trust=trust)
    run = os.urandom(8).hex()
    os.environ[RECORD_VARIABLE] = run
    # The instance key stands in texts of the run, where `default` is put in its place: no other word has it.
    key = f"recorded-{run}"
    kernel = start(place)
    try:
        entry = agent or kernel.entry_agent
        if not entry:
            raise fail("E_USAGE", "the bundle has no entry agent; name the agent (--agent)")
        messages_sent = [Sent(entry, key, text, files if number == 0 else []) for number, text in enumerate(texts)]
        answers = asked(kernel, messages_sent, None if as_json else _show)
    finally:
        kernel.finish()
        noted = collect(place.state_dir, run)
    made = make(noted, key, entry, _redactor(place))
    _write(file, made.data)
    told = {"file": os.path.abspath(file), "turns": made.turns, "requests": made.steps, "calls": made.calls}
    if as_json:
        write_json({**told, "agents": made.agents, "warnings": made.warnings})
    else:
        what = f"{made.turns} turns, {made.steps} requests to models, {made.calls} calls"
        write(f"{file}: {what}", *(f"warning: {text}" for text in made.warnings), stream=sys.stderr)
    return 0 if all(answer.status == "completed" for answer in answers) else 1


class Sent(NamedTuple):
    """A message."""

    #: The agent that gets it.
    agent: str
    #: Its instance.
    instance: str
    #: The text.
    text: str
    #: The pictures and PDFs that come with it.
    files: list[OpenFile]


def asked(kernel: Kernel, messages: Iterable[Sent], then: Callable[[Answer], bool] | None) -> list[Answer]:
    """Send messages, each when the one before is answered. `then` gets each answer, and says whether to go on. Returns
    the answers. Raises GoondanError.
    """
    import asyncio

    from goondan.kernel.cli.session import USER_MESSAGE, Session

    async def ask_all() -> list[Answer]:
        answers = []
        async with Session(kernel) as session:
            for agent, key, text, files in messages:
                parts = session.lay_down(files)
                answer = await session.ask(agent, key, USER_MESSAGE, text, event_id=session.new_id(), files=parts)
                answers.append(answer)
                if then is not None and not then(answer):
                    break
        return answers

    return asyncio.run(ask_all())


def _show(answer: Answer) -> bool:
    if answer.error is not None:
        write(*error_lines(answer.error), stream=sys.stderr)
    else:
        write_text(answer.response or "")
    return True


def _lines() -> list[str]:
    """The lines of standard input. Raises GoondanError E_USAGE when there is none."""
    from goondan.kernel.cli.lines import MAX_LINE_BYTES, read_all

    text = read_all(MAX_LINE_BYTES).decode("utf-8", "replace")
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise fail("E_USAGE", "there is no message to send", suggestion="gdn record FILE MESSAGE…")
    return lines


def _redactor(place: BundleTarget) -> Callable[[str], str]:
    """Takes values of the person's environment out of a text: those that look like secrets, and those that the bundle
    and its tools are given.
    """
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.bundle.variables import EnvironmentRedactor, wanted_variables

    inspected = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy)
    granted = {name for tool in inspected.checked.runs_in_jails for name in (tool.granted or tool.sandbox).env}
    loaded = inspected.loaded
    named = granted.union(wanted_variables(loaded.documents))
    return EnvironmentRedactor(os.environ, named, [source.data for source in loaded.sources])


def _write(file: str, data: bytes) -> None:
    """Put the file in its place, whole. Raises GoondanError E_USAGE."""
    from contextlib import suppress

    beside = f"{file}.new-{os.getpid()}"
    try:
        with open(beside, "xb") as made:
            made.write(data)
        os.replace(beside, file)
    except OSError as error:
        with suppress(OSError):
            os.unlink(beside)
        raise fail("E_USAGE", f"{file} cannot be written: {error.strerror}") from None
