"""Questions of operators to the broker of a running kernel, and the commands that are one such question: a table of
rows `Op`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from goondan.features import parts
from goondan.kernel.cli import options, output
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import Kernel

#: How long the broker may take to answer (seconds): longer than a restart of it takes.
ANSWER_S: Final = 30.0
#: The broker's code for a question of clients that nothing in it answers, as when the feature for it is not there.
NO_SUCH_QUESTION: Final = "E_FRAME_INVALID"
#: The same for what it has learned, which stands below something else.
LEARNED_S: Final = 2.0


#: A question of the broker, or its answer.
Document = Mapping[str, Any]


class Op(NamedTuple):
    """A command that is one question to the broker. It has --bundle and --json beside its parameters."""

    #: The broker's name of the question: `dead.list`. The last part is the command's name.
    op: str
    #: The text of its --help.
    help: str
    #: The lines for a person, of the answer and of the question.
    render: Callable[[Document, Document], Iterable[str]]
    #: Its parameters, as decorators of click.
    params: tuple[options.Decorator, ...] = ()
    #: The fields of the question, from the values of the parameters. By default each parameter is a field: that of
    #: `event_id` is `eventId`. Raises GoondanError E_USAGE.
    fields: Callable[..., Document] | None = None

    def command(self) -> click.Command:
        """The command of this row."""

        def ask(bundle: str | None, **values: Any) -> None:
            fields = _as_fields(**values) if self.fields is None else self.fields(**values)
            question = {"op": self.op, **fields}
            answer = ask_broker(bundle, question)
            output.emit(answer, self.render(answer, question))

        decorated: Callable[..., Any] = ask
        for param in reversed((*self.params, options.bundle, options.json)):
            decorated = param(decorated)
        return click.command(name=self.op.rpartition(".")[2], help=self.help)(decorated)


def operator_group(name: str, help: str, *ops: Op) -> click.Group:
    """A group of commands, from its rows. Others can be added to it."""
    return click.Group(name, help=help, commands=[op.command() for op in ops])


def _as_fields(**values: Any) -> Document:
    """Values of parameters as fields of a question: `event_id` is `eventId`."""
    named = {name: name.split("_") for name in values}
    return {first + "".join(map(str.capitalize, more)): values[name] for name, (first, *more) in named.items()}


def ask_broker(bundle: str | None, question: Mapping[str, Any], answer_s: float = ANSWER_S) -> dict[str, Any]:
    """Ask the broker of the kernel that runs `bundle` (None: the bundle of this folder), and return the answer's
    object.

    Raises GoondanError: E_USAGE for a text that is not UTF-8, E_KERNEL_NOT_RUNNING, the errors of `Session.admin`, and
    the broker's refusal.
    """
    from goondan.kernel.cli.attach import attach
    from goondan.kernel.cli.state import locate

    check_texts(question)
    with attach(locate(bundle)) as kernel:
        return ask_kernel(kernel, question, answer_s)


def ask_kernel(kernel: Kernel, question: Mapping[str, Any], answer_s: float = ANSWER_S) -> dict[str, Any]:
    """Ask the broker of a kernel that the command holds already. The command still holds it afterwards."""
    from goondan.kernel.cli.session import WELCOME_S, over_session

    check_texts(question)
    return over_session(kernel, lambda session: session.admin(dict(question), answer_s), min(answer_s, WELCOME_S))


class Learned(NamedTuple):
    """What a feature's part in the broker has learned by itself: `LEARNED` of its `status.py`. `gdn ps` shows it below
    the processes.
    """

    #: The broker's name of the question. The answer has the rows under the same name. With `forget` they are forgotten.
    op: str
    #: A row for a person.
    line: Callable[[Document], str]
    #: It is about the limits of model servers: `gdn usage` shows it, too, and it can be forgotten.
    limits: bool = True


def learning(*, limits: bool) -> list[Learned]:
    """What features learn: only of limits, or everything."""
    return [module.LEARNED for module in parts("status") if module.LEARNED.limits or not limits]


def learned(bundle: str | None, *, forget: bool = False, limits: bool = True) -> tuple[list[Document], list[str]]:
    """What was learned in the kernel that runs `bundle`: the rows, and their lines for a person; only of limits, or
    everything. Nothing when no broker answers, unless it has to forget them. Raises GoondanError.
    """
    rows: list[Document] = []
    lines: list[str] = []
    for of_feature in learning(limits=limits):
        try:
            asked = {"op": of_feature.op, "forget": forget}
            found = ask_broker(bundle, asked, ANSWER_S if forget else LEARNED_S)[of_feature.op]
        except GoondanError:
            if forget:
                raise
            found = []
        rows += found
        lines += map(of_feature.line, found)
    return rows, lines


def check_texts(question: Mapping[str, Any]) -> None:
    """Check the texts of the question. Raises GoondanError E_USAGE for a text that is not UTF-8: no frame can hold
    it.
    """
    from goondan.kernel.paths import is_utf8

    for field, value in question.items():
        if isinstance(value, str) and not is_utf8(value):
            raise fail("E_USAGE", f"what was given for {field} is not UTF-8")
