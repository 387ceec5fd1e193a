"""`gdn run`: starts a swarm and talks to its entry agent.

The kernel is a child process, and this process is a client like any other. Lines of stdin become events, and answers
are printed in the order of the lines. At the end of input the command waits for the answers, and then stops the kernel.
On a terminal a person types message after message, and sees each answer while it is made. A swarm that runs detached is
joined, and goes on when this command ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from goondan.kernel import lock
from goondan.kernel.cli import attach
from goondan.kernel.cli.output import emit, is_terminal, wants_json, write
from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.rules.direct import DEFAULT_INSTANCE
from goondan.kernel.cli.state import BundleTarget, absolute_workdir, locate, new_instance
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    import click


def run(
    bundle: str | None,
    policy: str | None,
    trust: bool,
    detach: bool,
    watch: bool,
    accept_loss: bool,
    instance: str | None,
    is_new: bool,
    workdir: str | None,
    reasoning: bool,
    beside: Mapping[str, str] | None = None,
) -> int:
    """Start a swarm and talk to its entry agent, or talk to one that runs detached.

    The conversation of the instance goes on where it was; --new begins another one. A swarm that ran before goes on
    when this command ends.
    """
    # Of each command that runs beside the kernel, the value of its option. Wrong ones are found before anything starts.
    words = _words_of(beside) if beside else []
    place = locate(bundle, policy, trust=trust, accept_loss=accept_loss, watch=watch)
    of_messages = {"--workdir": workdir is not None, "--instance": instance is not None, "--new": is_new}
    if detach:
        for option in (name for name, is_given in of_messages.items() if is_given):
            raise fail("E_USAGE", f"{option} belongs to messages", suggestion="Give it to gdn send.")
        return _detach(place, words)
    if is_new and instance is not None:
        raise fail("E_USAGE", "give --new or --instance, not both")
    key = check_instance(DEFAULT_INSTANCE if instance is None else instance)
    if is_new:
        key = new_instance()
    where = None if workdir is None else absolute_workdir(workdir, place)
    return _talk(place, where, key, is_new, reasoning, words)


def _words_of(beside: Mapping[str, str]) -> list[list[str]]:
    from goondan.kernel.cli.beside import words_of

    return words_of(beside)


def _start_beside(place: BundleTarget, words: list[list[str]]) -> dict[str, dict[str, Any]]:
    """Start commands beside the kernel that is ready; what each says of itself. Raises GoondanError."""
    from goondan.kernel.cli.beside import start

    return {one[0]: start(place, one) for one in words}


def _detach(place: BundleTarget, words: list[list[str]]) -> int:
    from goondan.kernel.cli.starting import start_supervisor

    started = start_supervisor(place, detach=True, meanwhile=None)
    said: dict[str, dict[str, Any]] = {}
    if words:
        try:
            said = _start_beside(place, words)
        except BaseException:
            ask_supervisor(place.state_dir, "stop")
            started.wait_end()
            raise
    started.let_go()
    model = _model_of(place)
    record = lock.read_record(place.state_dir)
    run_dir = record.run_dir if record is not None else None
    document = {"pid": started.pid, "bundle": place.bundle, "runDir": run_dir, "stateDir": place.state_dir}
    talks_to = [] if model is None else [f"it talks to {model}"]
    lines = [f"ready, pid {started.pid}; logs in {place.state_dir}/logs", *talks_to, *_lines(said)]
    emit({**document, "model": model} | ({"beside": said} if said else {}), lines)
    return 0


def _model_of(place: BundleTarget) -> str | None:
    """The entry agent's model, as the kernel that has just started says."""
    try:
        kernel = attach.hold(place)
    except GoondanError:
        return None  # it was stopped at once
    if kernel is None:
        return None
    with kernel:
        return kernel.model


def _lines(said: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{name}: {document.get('text', 'ready')}" for name, document in said.items()]


def _talk(
    place: BundleTarget, workdir: str | None, instance: str, is_new: bool, reasoning: bool, words: list[list[str]]
) -> int:
    about_server: Callable[[str | None], str | None] = lambda model: None
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        from goondan.kernel.bundle.rules.kinds import local_models

        about_server = local_models().before_start(place.bundle, place.state_dir, place.policy)
    kernel, joined = attach.join_or_start(place, "goondan.kernel.cli.console.talk")
    from goondan.kernel.cli.console.talk import Talk, TalkOptions  # it was imported while the kernel started

    try:
        if joined and words:
            message = f"--{words[0][0]} applies only to a kernel that this command starts; one is running"
            raise fail("E_USAGE", message, suggestion=f"Run `gdn {words[0][0]}`.")
        if words:
            write(*_lines(_start_beside(place, words)), stream=sys.stderr)
    except BaseException:
        kernel.finish()
        raise
    if joined and not wants_json():
        write("joined the swarm that runs already; it goes on when you leave", stream=sys.stderr)
    return Talk(kernel, TalkOptions(wants_json(), workdir, instance, is_new, reasoning), about_server).run()


def make_command() -> click.Command:
    """The command as click has it."""
    import click

    from goondan.kernel.cli import options
    from goondan.kernel.cli.beside import offered

    def collect(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.params.setdefault("beside", {})[param.opts[0].removeprefix("--")] = value

    def with_beside(command: Any) -> Any:
        for name, line in offered().items():
            how: Any = {"is_flag": False, "flag_value": "", "expose_value": False, "callback": collect}
            command = click.option(f"--{name}", metavar="[VALUE]", help=line, **how)(command)
        return command

    @click.command("run", help=run.__doc__)
    @options.bundle
    @options.policy
    @options.trust
    @click.option("--detach", is_flag=True, help="Return when the swarm is ready and leave it running.")
    @click.option("--watch", is_flag=True, help="Follow changes of the bundle: what they affect restarts.")
    @click.option(
        "--accept-loss", is_flag=True, help="Go on with what is whole of a damaged journal; see E_JOURNAL_CORRUPT."
    )
    @click.option(
        "--instance",
        metavar="KEY",
        shell_complete=options.completed("instances"),
        help=f"Talk to this instance of the entry agent.  [default: {DEFAULT_INSTANCE}]",
    )
    @click.option("--new", "is_new", is_flag=True, help="Begin a new conversation, in an instance of its own.")
    @options.workdir
    @options.reasoning
    @with_beside
    @options.json
    def command(**given: Any) -> int:
        return run(**given)

    return command


COMMANDS = {"run": make_command}
