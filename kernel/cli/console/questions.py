"""What a feature asks the person at the console while a command talks to a swarm: the interface, and its loading.

At most one feature asks: two would take each other's answers from the terminal.

Source: docs/design/features.md section 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from goondan.features import parts

if TYPE_CHECKING:
    from goondan.kernel.cli.console.prompt import Prompt
    from goondan.kernel.cli.console.screen import Screen
    from goondan.kernel.cli.session import Session
    from goondan.schemas.wire.errors import GoondanError


class Waiting(Struct, frozen=True):
    """A question, for a command that asks it in another way than at the console."""

    #: Its name.
    code: str
    #: The event whose turn asks, and the one that all this work began with.
    events: tuple[str, ...]
    #: What it is about, in a few words.
    title: str
    #: Whether yes or no is an answer. Otherwise it has to be answered by the command.
    yes_or_no: bool
    #: How it is answered by a command.
    command: str


class Questions:
    """The hooks of a feature at the console. This class asks nothing: it is used when no feature does."""

    async def watch(self) -> None:
        """Follow what there is to ask, until cancelled."""

    async def look(self) -> None:
        """Read anew what there is to ask. Raises GoondanError."""

    async def next_change(self) -> None:
        """Return when it was read again."""
        await asyncio.get_running_loop().create_future()

    async def follow(self, ask: Callable[[Waiting], object]) -> None:
        """Tell `ask` what there is to ask, again at each change, until cancelled."""
        watching = asyncio.ensure_future(self.watch())
        try:
            while True:
                await self.next_change()
                for waiting in self.waiting():
                    ask(waiting)
        finally:
            watching.cancel()

    async def announce(self) -> None:
        """When nobody can be asked: write what is asked to stderr, and how it can be answered; until cancelled."""

    async def notices(self, prompt: Prompt) -> None:
        """While a person types a message: say what is asked, until cancelled."""

    async def ask_waiting(self, prompt: Prompt, screen: Screen | None = None) -> None:
        """Ask what there is to ask now, and nobody was asked yet."""

    async def ask_each(self, prompt: Prompt, screen: Screen) -> None:
        """Ask one after another, until cancelled. `screen` shows nothing meanwhile."""

    def waiting(self) -> list[Waiting]:
        """What is asked now, as it was read last."""
        return []

    async def whole(self, code: str) -> list[str]:
        """All that a question is about, in lines: a yes is only for what was shown. Raises GoondanError."""
        raise NotImplementedError

    async def decide(self, code: str, *, yes: bool) -> None:
        """Answer a question with yes or no. Raises GoondanError: somebody was quicker, or nobody wants to know."""
        raise NotImplementedError

    def stops(self, event_id: str) -> bool:
        """Whether the work of this event has stopped until a person answers."""
        return False

    def stopped(self, event_id: str) -> GoondanError:
        """The error of a command that does not wait for that answer."""
        raise NotImplementedError


def questions(session: Session) -> Questions:
    """What is asked in this session: `QUESTIONS` of the one feature that has a `console.py`."""
    modules = parts("console")
    if len(modules) > 1:
        raise AssertionError(f"more than one feature asks at the console: {[module.__name__ for module in modules]}")
    made: Questions = modules[0].QUESTIONS(session) if modules else Questions()
    return made
