"""`gdn instance undo|reset`, and `/undo` in the console: the last turn is taken back, or every message is removed.

Only the agent changes its conversation (agent.py), so both are events of an operator. They are refused while the
instance has work.

Source: docs/design/turns.md section 11; docs/design/commands.md section 9.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import click
import msgspec

from goondan.kernel.cli import attach, options
from goondan.kernel.cli.commands.instances import begun, delete_instance
from goondan.kernel.cli.console.conversation import Conversation, messages_text
from goondan.kernel.cli.output import can_ask, confirmed, emit
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.session import over_session
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR_RESET, OPERATOR_UNDO, ConversationEdited


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


async def take_back(conversation: Conversation) -> ConversationEdited:
    """Take the last turn back. Raises GoondanError E_INSTANCE_BUSY, E_UNDO_REFUSED, those of the session."""
    await conversation.check_idle()
    last = (await conversation.overview()).last_turn_id
    return await _edited(conversation, OPERATOR_UNDO, None if last is None else {"turnId": last})


async def remove_all(conversation: Conversation) -> ConversationEdited:
    """Remove every message. Raises GoondanError E_INSTANCE_BUSY, those of the session."""
    await conversation.check_idle()
    return await _edited(conversation, OPERATOR_RESET, None)


async def typed_undo(conversation: Conversation) -> list[str]:
    """`/undo` in the console. Returns lines for the person. Raises GoondanError."""
    done = await take_back(conversation)
    left = "none is left" if not done.left else f"{messages_text(done.left)} left"
    return [f"took back {one_line(done.said or '', 60)!r} ({messages_text(done.removed)}); {left}"]


COMMANDS: Final[Mapping[str, click.Command]] = {"instance undo": undo, "instance reset": reset}
TYPED: Final[Mapping[str, Callable[[Conversation], Awaitable[list[str]]]]] = {"undo": typed_undo}


async def _edited(conversation: Conversation, kind: str, asked: object) -> ConversationEdited:
    return msgspec.convert(await conversation.operate(kind, asked), ConversationEdited)


def _perform(
    agent: str, key: str, bundle: str | None, change: Callable[[Conversation], Awaitable[ConversationEdited]]
) -> ConversationEdited:
    """Have the agent change its conversation. Raises GoondanError E_INSTANCE_NOT_FOUND for one that nobody began."""
    place, _ = begun(agent, key, bundle)
    with attach.attach_or_start(place, ()) as kernel:
        return over_session(kernel, lambda session: change(Conversation(session, place.state_dir, agent, key)))
