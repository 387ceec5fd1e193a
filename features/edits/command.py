"""`gdn instance undo|reset|fork`, and `/undo` in the console: the last turn is taken back, every message is removed, or
another instance begins with a copy.

Only the agent changes its conversation (agent.py), so all are events of an operator. An instance that has work is
changed by none of them; the one that is copied may have some.

Source: docs/design/turns.md section 11; docs/design/commands.md section 9.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import click
import msgspec
from msgspec import Struct

from goondan.features.edits.wire import Forked
from goondan.kernel.cli import attach, options
from goondan.kernel.cli.commands.instances import begun, delete_instance
from goondan.kernel.cli.console.conversation import Conversation, messages_text
from goondan.kernel.cli.output import can_ask, confirmed, emit
from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.session import over_session
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR_FORK, OPERATOR_RESET, OPERATOR_UNDO, ConversationEdited

_T = TypeVar("_T", bound=Struct)


@click.command(name="undo")
@click.argument("agent", shell_complete=options.completed("agents"))
@click.argument("key", default=options.DEFAULT_INSTANCE, shell_complete=options.completed("instances"))
@options.bundle
@options.json
def undo(agent: str, key: str, bundle: str | None) -> None:
    """Take the last turn of a conversation back: its messages go, and the model never sees them again.

    What its tools have done stays done, and its trace stays. An instance that has work is refused. KEY is `default` if
    left out. Without a kernel one is started for it.
    """
    agent, key = options.named(agent, key)
    done = _perform(agent, key, bundle, take_back)
    text = f"took back {one_line(done.said or '', 60)!r}: {done.removed} messages, {done.left} are left"
    emit(done, [text])


@click.command(name="reset")
@click.argument("agent", shell_complete=options.completed("agents"))
@click.argument("key", default=options.DEFAULT_INSTANCE, shell_complete=options.completed("instances"))
@options.bundle
@click.option("--files", is_flag=True, help="Remove traces and the files of its workdir, too; as `delete` does.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.json
def reset(agent: str, key: str, bundle: str | None, files: bool, yes: bool) -> None:
    """Remove every message of a conversation. Its traces and its workdir stay, unless --files is given.

    An instance that has work is refused. KEY is `default` if left out. Without a kernel one is started for it.
    """
    agent, key = options.named(agent, key)
    if files:
        delete_instance(agent, key, bundle, force=False, yes=yes)
        return
    name = one_line(f"{agent}/{key}", 400)
    question = f"Remove the conversation of {name}? It cannot be brought back. [y/N] "
    if not yes and can_ask() and not confirmed(question):
        raise fail("E_CANCELLED", f"{name} was not reset", suggestion="Answer y, or give --yes.")
    done = _perform(agent, key, bundle, remove_all)
    emit(done, [f"{name} begins again; {done.removed} messages were removed"])


@click.command(name="fork")
@click.argument("agent", shell_complete=options.completed("agents"))
@click.argument("key", metavar="[KEY]", shell_complete=options.completed("instances"))
@click.argument("new", metavar="NEW", required=False)
@click.option("--turn", metavar="TURN", help="Copy what is before this turn. Without it everything is copied.")
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Copy what is before this step of the turn.")
@options.bundle
@options.json
def fork(agent: str, key: str, new: str | None, turn: str | None, step: int | None, bundle: str | None) -> None:
    """Begin the instance NEW of an agent with the messages of KEY, which stays as it is and may be at work.

    The turns of KEY that are over are copied, with their pictures. Its workdir, traces, usage and the state of
    extensions are not. `--turn TURN` ends before the message of that turn, `--step N` before what the model said in its
    step N. KEY is `default` if left out. Without a kernel one is started for it.
    """
    if new is None:
        key, new = options.DEFAULT_INSTANCE, key
    agent, key = options.named(agent, key)
    if turn is None and step is not None:
        raise fail("E_USAGE", "a step is one of a turn", suggestion="Give --turn, too; `gdn trace` shows the turns.")
    asked = {"from": key, **({} if turn is None else {"turnId": turn, "step": step or 1})}
    done = _perform(
        agent,
        key,
        bundle,
        lambda conversation: _edited(conversation, OPERATOR_FORK, asked, Forked),
        check_instance(new),
    )
    said = [] if done.message is None else [f"the next message there was {one_line(done.message, 60)!r}"]
    name, source = (one_line(f"{agent}/{one}", 400) for one in (new, key))
    emit(done, [f"{name} begins with {messages_text(done.copied)} of {source}", *said])


async def take_back(conversation: Conversation) -> ConversationEdited:
    """Take the last turn back. Raises GoondanError E_INSTANCE_BUSY, E_UNDO_REFUSED, those of the session."""
    await conversation.check_idle()
    last = (await conversation.overview()).last_turn_id
    asked = None if last is None else {"turnId": last}
    return await _edited(conversation, OPERATOR_UNDO, asked, ConversationEdited)


async def remove_all(conversation: Conversation) -> ConversationEdited:
    """Remove every message. Raises GoondanError E_INSTANCE_BUSY, those of the session."""
    await conversation.check_idle()
    return await _edited(conversation, OPERATOR_RESET, None, ConversationEdited)


async def typed_undo(conversation: Conversation) -> list[str]:
    """`/undo` in the console. Returns lines for the person. Raises GoondanError."""
    done = await take_back(conversation)
    left = "none is left" if not done.left else f"{messages_text(done.left)} left"
    return [f"took back {one_line(done.said or '', 60)!r} ({messages_text(done.removed)}); {left}"]


COMMANDS: Final[Mapping[str, click.Command]] = {"instance undo": undo, "instance reset": reset, "instance fork": fork}
TYPED: Final[Mapping[str, Callable[[Conversation], Awaitable[list[str]]]]] = {"undo": typed_undo}


async def _edited(conversation: Conversation, kind: str, asked: Any, answer: type[_T]) -> _T:
    return msgspec.convert(await conversation.operate(kind, asked), answer)


def _perform(
    agent: str, key: str, bundle: str | None, change: Callable[[Conversation], Awaitable[_T]], new: str | None = None
) -> _T:
    """Have an agent change the conversation of an instance that was begun; or the one of `new`, which need not be.
    Raises GoondanError E_INSTANCE_NOT_FOUND.
    """
    place, _ = begun(agent, key, bundle)
    with attach.attach_or_start(place, ()) as kernel:
        return over_session(kernel, lambda session: change(Conversation(session, place.state_dir, agent, new or key)))
