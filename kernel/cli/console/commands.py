"""The commands of the console of `gdn run`: lines that never reach the model, whatever the model is.

A line that begins with any other `/word` is a message. So a question about `/etc/hosts` is asked, and the embedded
console gets its calls of tools.

Source: docs/design/commands.md section 9.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from goondan.features import FEATURES, Feature
from goondan.kernel.cli.commands import import_whole
from goondan.kernel.cli.console.conversation import Conversation, messages_text, tool_lines
from goondan.kernel.cli.plain import one_line
from goondan.schemas.text.visible import argument_line
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import Kernel
    from goondan.kernel.cli.session import Session
    from goondan.kernel.conversations import Overview

_OF_FEATURES: Final[Mapping[str, Feature]] = {name: feature for feature in FEATURES for name in feature.typed}
#: Each command, with what it takes and does.
HELP: Final[Mapping[str, tuple[str, str]]] = {
    "new": ("[KEY]", "begin another conversation; with KEY: go to the one of this instance"),
    "history": ("[N]", "show the last messages of this conversation (20 if N is left out)"),
    "attach": ("[FILE]", "send this picture or PDF with the next message; without FILE: send none"),
    "model": ("", "say which model the agent talks to"),
    "tools": ("", "list the tools that the agent could call now"),
    "tokens": ("", "say how many messages and tokens this conversation has taken"),
    **{name: ("", feature.typed[name]) for name, feature in _OF_FEATURES.items()},
    "help": ("", "show this list"),
}
#: How many messages `/history` shows.
HISTORY: Final = 20
#: The longest text of a message in it (characters).
MAX_SHOWN: Final = 160
#: The beginning of what the kernel says about a model that is the embedded console (kernel/bundle/models.py).
EMBEDDED: Final = "the embedded console"


class Command(Struct, frozen=True):
    """A command as it was typed."""

    #: Its name, without the slash.
    name: str
    #: What stands behind it.
    argument: str = ""


def read_command(text: str) -> Command | None:
    """The command that a line is; None for a message."""
    if not text.startswith("/"):
        return None
    name, *rest = text[1:].split(maxsplit=1) or [""]
    if name not in HELP or not text[1:].startswith(name):
        return None
    return Command(name, "".join(rest).strip())


class Commands:
    """The commands of one conversation, which changes with `/new`. `workdir`: where the tools of its agent work, None
    for the instance's own.
    """

    def __init__(self, session: Session, kernel: Kernel, instance: str, workdir: str | None) -> None:
        self._session = session
        self._kernel = kernel
        self._workdir = workdir
        #: The key of the instance that is talked to.
        self.instance = instance
        self._attached: list[str] = []
        self._performs: dict[str, Callable[[str], Awaitable[list[str]]]] = {
            "new": self._new,
            "history": self._history,
            "attach": self._attach,
            "model": self._model,
            "tools": self._tools,
            "tokens": self._tokens,
            "help": self._help,
        }

    async def perform(self, command: Command) -> list[str]:
        """Carry a command out. Returns lines for the person. Raises GoondanError."""
        takes, _ = HELP[command.name]
        if command.argument and not takes:
            raise fail("E_USAGE", f"/{command.name} takes nothing", suggestion="/help shows the commands.")
        owner = _OF_FEATURES.get(command.name)
        if owner is not None:
            typed = import_whole(f"goondan.features.{owner.name}.command").TYPED
            lines: list[str] = await typed[command.name](self._conversation)
            return lines
        return await self._performs[command.name](command.argument)

    def take_attached(self) -> list[str]:
        """The paths of the files that go with the next message. They go with one message only."""
        taken, self._attached = self._attached, []
        return taken

    async def goes_on(self) -> str | None:
        """Which conversation is continued, since when, and how long it is. None for a new one."""
        numbers = await self._conversation.overview() if self._kernel.entry_agent else None
        if numbers is None or not numbers.messages:
            return None
        return f"{self._name} goes on: {_span(numbers)}"

    # --- inside

    @property
    def _conversation(self) -> Conversation:
        agent = self._kernel.entry_agent
        if not agent:
            raise fail("E_AGENT_NOT_FOUND", "the bundle has no entry agent to talk to")
        return Conversation(self._session, self._kernel.place.state_dir, agent, self.instance, self._workdir)

    @property
    def _is_embedded(self) -> bool:
        """Whether the agent is a console, which takes calls of tools as lines."""
        return (self._kernel.model or "").startswith(EMBEDDED)

    @property
    def _name(self) -> str:
        return one_line(f"{self._kernel.entry_agent or 'nobody'}/{self.instance}", 200)

    async def _new(self, argument: str) -> list[str]:
        from goondan.kernel.cli.batch import check_instance

        self.instance = check_instance(argument) if argument else new_instance()
        told = await self.goes_on()
        return [told or f"{self._name} begins; /new {one_line(self.instance, 200)} comes back to it"]

    async def _history(self, argument: str) -> list[str]:
        if argument and not (argument.isascii() and argument.isdigit() and 0 < int(argument[:10]) <= 1_000_000):
            raise fail("E_USAGE", f"/history takes a number of messages, not {argument[:40]!r}")
        messages = await self._conversation.messages(int(argument) if argument else HISTORY)
        return [history_line(message) for message in messages] or [f"{self._name} has no messages yet"]

    async def _attach(self, argument: str) -> list[str]:
        if not argument:
            dropped = self.take_attached()
            return [
                f"{len(dropped)} files are not sent" if dropped else "no file is attached; /attach FILE attaches one"
            ]
        from goondan.kernel.cli.message_files import close_files, open_files

        wanted = [*self._attached, os.path.abspath(os.path.expanduser(argument))]
        opened = open_files(wanted)  # what is wrong is said now; they are read when the message goes
        close_files(opened)
        self._attached = wanted
        return [
            f"with the next message: {', '.join(f'{one_line(file.name, 80)} ({file.media_type})' for file in opened)}"
        ]

    async def _model(self, argument: str) -> list[str]:
        return [f"{self._kernel.entry_agent or 'nobody'} talks to {self._kernel.model or 'a model that is not known'}"]

    async def _tools(self, argument: str) -> list[str]:
        return tool_lines(await self._conversation.tools(), typed=self._is_embedded)

    async def _tokens(self, argument: str) -> list[str]:
        from goondan.kernel.cli.commands.instances import token_text

        numbers = await self._conversation.overview()
        return [f"{self._name}: {messages_text(numbers.messages)}; tokens: {token_text(numbers.usage)}"]

    async def _help(self, argument: str) -> list[str]:
        width = max(len(f"{name} {takes}") for name, (takes, _) in HELP.items())
        lines = [f"  /{f'{name} {takes}':<{width}}  {what}" for name, (takes, what) in HELP.items()]
        told = ["These lines never reach the model:", *lines, "Every other line does, also one that begins with `/`."]
        if self._is_embedded:
            told.append(
                "The embedded console calls tools: /TOOL {json} or /TOOL key=value …; @AGENT asks another agent."
            )
        return told


def new_instance() -> str:
    """A key that no instance has: the day, and four digits at random."""
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}-{os.urandom(2).hex()}"


def history_line(message: Any) -> str:
    """A stored message in one line: who, and what."""
    data = message.get("data") if isinstance(message, dict) else None
    data = data if isinstance(data, dict) else {}
    role, content = str(data.get("role")), data.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    files = data.get("files")
    texts = [_part(part) for part in [*parts, *(files if isinstance(files, list) else [])] if isinstance(part, dict)]
    return f"{role:<9}  {one_line(' '.join(text for text in texts if text), MAX_SHOWN)}".rstrip()


def _part(part: dict[str, Any]) -> str:
    """One part of a message: text, a call, a result, or a file."""
    kind = part.get("type")
    if kind == "tool-call":
        return f"{part.get('toolName')} {argument_line(part.get('args'))}".rstrip()
    if kind == "tool-result":
        result = part.get("result")
        status = result.get("status") if isinstance(result, dict) else None
        return f"{part.get('toolName')}: {status}"
    if kind == "file":
        return f"[{part.get('name') or part.get('mediaType')}]"
    return str(part.get("text") or "")


def _span(numbers: Overview) -> str:
    since = (numbers.since or "")[:16].replace("T", " ")
    return f"{messages_text(numbers.messages)} since {since} UTC" if since else messages_text(numbers.messages)
