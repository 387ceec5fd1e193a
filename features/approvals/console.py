"""The items that wait for a person while a command talks to a swarm. They are shown, and asked on a terminal.

The broker says when its list has changed, and then the list is read again. Such news can be lost, so the list is also
read from time to time.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from goondan.features.approvals.command import COLUMNS, command_lines, is_long, item_lines
from goondan.features.approvals.wire import WAITS
from goondan.kernel.cli.console.questions import Questions, Waiting
from goondan.kernel.cli.named_files import with_files
from goondan.kernel.cli.output import columns_of, write
from goondan.schemas.text.visible import argument_line, visible_line
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.cli.console.prompt import Prompt
    from goondan.kernel.cli.console.screen import Screen
    from goondan.kernel.cli.session import Session

#: How long a lost change may stay unknown (seconds). One look costs the broker a tenth of a millisecond.
LOOK_S: Final = 5.0
#: How long an answer of the broker may take (seconds): longer than a restart of it takes.
ANSWER_S: Final = 30.0
#: How often a person is asked again after an input that is no answer.
MAX_TRIES: Final = 3


class Asked(Questions):
    """The items of a session. `changed` is set when they have changed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        #: The items that wait, by their codes.
        self.items: dict[str, dict[str, Any]] = {}
        #: The ids of events whose work has stopped: everything that is left of it waits for a person.
        self.blocked: frozenset[str] = frozenset()
        self.changed = asyncio.Event()
        self._changes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shown: set[str] = set()
        self._news = asyncio.Event()
        session.on("approval.news", self._news.set)

    async def watch(self) -> None:
        """Read the list again and again, until cancelled."""
        while True:
            self._news.clear()
            with suppress(GoondanError):
                await self._session.admin({"op": "approve.watch"}, ANSWER_S)
                await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):  # not wait_for, see Session
                    await self._news.wait()

    async def look(self) -> None:
        """Read the list. Raises GoondanError."""
        listed = await self._session.admin({"op": "approve.list"}, ANSWER_S)
        self.items = {item["code"]: item for item in listed["items"]}
        self.blocked = frozenset(listed.get("blocked", ()))
        self._shown &= self.items.keys()
        self.changed.set()
        self._changes.set_result(None)
        self._changes = asyncio.get_running_loop().create_future()

    async def next_change(self) -> None:
        """Return when the list was read again."""
        await asyncio.shield(self._changes)

    def waiting(self) -> list[Waiting]:
        """The items that wait now."""
        return [
            Waiting(
                code=item["code"],
                events=(item["eventId"], item.get("rootEvent") or item["eventId"]),
                title=visible_line(f"{item['tool']} {argument_line(item.get('args'))}".strip()),
                yes_or_no=item["kind"] != "question",
                command="; ".join(command_lines(item)),
            )
            for item in self.items.values()
        ]

    async def whole(self, code: str) -> list[str]:
        """The lines of an item with all of its arguments. Raises GoondanError."""
        shown = await self._session.admin({"op": "approve.show", "id": code}, ANSWER_S)
        return _lines(shown, whole=True)

    async def decide(self, code: str, *, yes: bool) -> None:
        """Approve or deny an item. Raises GoondanError."""
        asked = {"op": "approve.answer", "id": code, "decision": "yes" if yes else "no"}
        await self._session.admin(asked, ANSWER_S)

    def stops(self, event_id: str) -> bool:
        """Whether only a person can bring the work of this event further."""
        return event_id in self.blocked

    def stopped(self, event_id: str) -> GoondanError:
        """The error of a command that does not wait for a person."""
        message = f"the message {event_id} waits for a person; it is kept, and goes on at the next start"
        return fail(WAITS, message)

    def new(self) -> list[dict[str, Any]]:
        """The items that nobody was shown yet. From now on they count as shown."""
        found = [item for code, item in self.items.items() if code not in self._shown]
        self._shown.update(item["code"] for item in found)
        return found

    async def announce(self) -> None:
        """When nobody can be asked: write each item and its command to stderr, until cancelled."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            for item in self.new():
                write(*_lines(item), *command_lines(item), stream=sys.stderr)

    async def notices(self, prompt: Prompt) -> None:
        """While a person types a message: say which items wait, until cancelled. The person is asked in the next turn,
        or before it.
        """
        known = set(self._shown)
        while True:
            await self.changed.wait()
            self.changed.clear()
            for code, item in self.items.items():
                if code not in known:
                    known.add(code)
                    await prompt.notice([*_lines(item), *command_lines(item)])

    async def ask_each(self, prompt: Prompt, screen: Screen) -> None:
        """Ask about the items that wait, one after another, until cancelled. `screen` shows nothing meanwhile."""
        while True:
            await self.ask_waiting(prompt, screen)
            self.changed.clear()
            if not self.items.keys() - self._shown:
                await self.changed.wait()

    async def ask_waiting(self, prompt: Prompt, screen: Screen | None = None) -> None:
        """Ask about the items that wait now and that nobody was asked about."""
        for item in self.new():
            if item["code"] not in self.items:
                continue
            if screen is not None:
                screen.pause()
            try:
                await self._ask(item, prompt)
            finally:
                if screen is not None:
                    screen.go_on()

    async def _ask(self, item: dict[str, Any], prompt: Prompt) -> None:
        write(*_lines(item), stream=sys.stderr)
        question, unread = item["kind"] == "question", is_long(item)
        text = "answer (JSON), no, or later? " if question else "yes, no (and why), or later? "
        for _ in range(MAX_TRIES):
            said = await prompt.question(text)
            word, _, rest = (said or "").strip().partition(" ")
            if said is None or word.lower() in ("later", "l"):
                break
            decision: dict[str, Any] | None = None
            if word.lower() in ("no", "n"):
                decision = {"decision": "no", "reason": rest.strip() or None}
            elif not question and word.lower() in ("yes", "y") and not rest:
                decision = {"decision": "yes"}
            elif question and said.strip():
                decision = _answer(item, said)
            if decision is not None and unread and decision["decision"] != "no":
                unread = not await self._show_whole(item)
            elif decision is not None:
                await self._decide(item, decision)
                return
        write(*command_lines(item), stream=sys.stderr)

    async def _show_whole(self, item: dict[str, Any]) -> bool:
        """Show all of it, because a yes is only for what was shown. Returns whether it could be shown."""
        try:
            shown = await self._session.admin({"op": "approve.show", "id": item["code"]}, ANSWER_S)
        except GoondanError as error:  # its turn has ended
            write(f"{item['code']}: {error.info.message}", stream=sys.stderr)
            return False
        last = "that was all of it; what you say now counts"
        write(*_lines(shown, whole=True), last, stream=sys.stderr)
        return True

    async def _decide(self, item: dict[str, Any], decision: dict[str, Any]) -> None:
        try:
            asked = {"op": "approve.answer", "id": item["code"], **decision}
            told = await self._session.admin(asked, ANSWER_S)
            write(f"{told['code']} is {told['state']}", stream=sys.stderr)
        except GoondanError as error:  # somebody else was quicker, or its turn has ended
            write(f"{item['code']}: {error.info.message}", stream=sys.stderr)


def _answer(item: dict[str, Any], said: str) -> dict[str, Any] | None:
    """The answer to a question. None when it does not fit, after the person was told why."""
    from goondan.features.approvals.command import answer_issues, encoded_answer
    from goondan.kernel.cli.rules.batch import parse_json

    try:
        value = parse_json(said)
        issues = answer_issues(item.get("schema"), value)
        if not issues:
            return {"decision": "answer", "answer": encoded_answer(value)}
        write(*issues, stream=sys.stderr)
    except GoondanError as error:
        write(error.info.message, stream=sys.stderr)
    return None


def _lines(item: dict[str, Any], *, whole: bool = False) -> list[str]:
    return item_lines(with_files(item), columns_of(sys.stderr, COLUMNS), whole=whole)


QUESTIONS: Final = Asked
