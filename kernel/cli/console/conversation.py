"""One conversation of `gdn run`: what commands and the console ask about it over an open session, and the lines of a
person that are commands of the console. Those never reach the model, whatever the model is.

Messages are read from the instance's file. What an agent has to do itself goes to it as an operator's event, which
waits for the turns before it.

A line that begins with any other `/word` than a command is a message. So a question about `/etc/hosts` is asked, and
the embedded console gets its calls of tools.

Source: docs/design/turns.md section 11; docs/design/commands.md section 9.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.features import FEATURES, Feature
from goondan.kernel.cli import attach, operator_question, output, state
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.session import Session, opened_files
from goondan.kernel.start import import_whole
from goondan.kernel.traces.conversations import Overview, messages, overview
from goondan.schemas.text.visible import argument_line
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_TOOLS, Answer, OperatorTool, ToolResult

#: How long the agent may take to change its conversation or to list its tools (seconds): its process may have to start.
ANSWER_S: Final = 60.0
#: How long the broker may take to say which work the instance has (seconds). A broker that has just started does not
#: know yet; then the event waits for that work in any case.
WORK_S: Final = 1.0
#: How long the broker may take to say from when on a conversation counts (seconds).
GENERATION_S: Final = 5.0
#: The longest description of one tool in the list (characters).
MAX_DESCRIPTION: Final = 100


class Conversation:
    """One instance of an agent, as the session's kernel has it. `workdir`: where its tools work, None for its own."""

    def __init__(self, session: Session, state_dir: str, agent: str, instance: str, workdir: str | None = None) -> None:
        self._session = session
        self._state_dir = state_dir
        self._workdir = workdir
        #: The agent.
        self.agent = agent
        #: The key of the instance.
        self.instance = instance

    async def overview(self) -> Overview:
        """The conversation in numbers. Raises GoondanError."""
        return overview(self._state_dir, self.agent, self.instance, await self._generation())

    async def messages(self, last: int | None = None) -> list[Any]:
        """Its messages as they are stored, only the `last` ones if that is given. Raises GoondanError."""
        return messages(self._state_dir, self.agent, self.instance, await self._generation(), last)

    async def tools(self) -> list[OperatorTool]:
        """The tools that the agent could call now. Raises GoondanError."""
        return msgspec.convert(await self.operate(OPERATOR_TOOLS, None) or [], list[OperatorTool])

    async def operate(self, kind: str, asked: Any) -> Any:
        """Have the agent work on an operator's event of this type. Returns the output. Raises GoondanError."""
        message = Message(self.agent, self.instance, asked, kind, workdir=self._workdir)
        answer = await self._session.ask(message, timeout_s=ANSWER_S)
        if answer.error is not None:
            raise GoondanError(answer.error)
        return _output(answer)

    async def check_idle(self) -> None:
        """Refuse to go on while the instance has work. Raises GoondanError E_INSTANCE_BUSY."""
        question = {"op": "events", "agent": self.agent, "instanceKey": self.instance}
        listed: list[dict[str, Any]] = []
        with suppress(GoondanError):  # it is not known; the event waits for the work before it
            listed = (await self._session.admin(question, WORK_S))["events"]
        if listed:
            message = f"{self.agent}/{self.instance[:100]} has work: the message {str(listed[0]['eventId'])[:100]}"
            suggestion = f"Wait for its end, or cancel it: gdn cancel {str(listed[0]['eventId'])[:100]}"
            raise fail("E_INSTANCE_BUSY", message, suggestion=suggestion)

    # --- inside

    async def _generation(self) -> int:
        try:
            answered = await self._session.admin({"op": "generation", "agent": self.agent}, GENERATION_S)
        except GoondanError as error:
            if error.info.code == operator_question.NO_SUCH_QUESTION:
                return 0  # no feature of this kernel lets a conversation begin anew, so each counts from its beginning
            raise
        return int(answered["generation"])


def tool_lines(tools: list[OperatorTool], *, typed: bool) -> list[str]:
    """The tools for a person, one line each. `typed`: a person calls them by `/TOOL`, as in the embedded console."""
    if not tools:
        return ["This agent has no tools. Add some to its spec.tools."]
    rows = [(f"{'/' * typed}{tool.name}", one_line(tool.description or "", MAX_DESCRIPTION)) for tool in tools]
    return ["1 tool:" if len(tools) == 1 else f"{len(tools)} tools:", *(f"  {line}" for line in output.columns(rows))]


def _output(answer: Answer) -> Any:
    """The output of the operator's event. Raises GoondanError when the answer has none."""
    result = from_raw(answer.output, ToolResult) if answer.output is not None else None
    if result is None or result.output is None:
        raise fail("E_AGENT_FAILED", "the agent's answer has no result")
    return from_raw(result.output, object)


def messages_text(count: int) -> str:
    """A number of messages, for a person."""
    return "1 message" if count == 1 else f"{count} messages"


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
#: The beginning of what the kernel says about a model that is the embedded console (kernel/bundle/rules/models.py).
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

    def __init__(self, session: Session, kernel: attach.Kernel, instance: str, workdir: str | None) -> None:
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
        self.instance = check_instance(argument) if argument else state.new_instance()
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
        wanted = [*self._attached, os.path.abspath(os.path.expanduser(argument))]
        with opened_files(wanted) as files:  # what is wrong is said now; they are read when the message goes
            named = ", ".join(f"{one_line(file.name, 80)} ({file.media_type})" for file in files)
        self._attached = wanted
        return [f"with the next message: {named}"]

    async def _model(self, argument: str) -> list[str]:
        return [f"{self._kernel.entry_agent or 'nobody'} talks to {self._kernel.model or 'a model that is not known'}"]

    async def _tools(self, argument: str) -> list[str]:
        return tool_lines(await self._conversation.tools(), typed=self._is_embedded)

    async def _tokens(self, argument: str) -> list[str]:
        numbers = await self._conversation.overview()
        return [f"{self._name}: {messages_text(numbers.messages)}; tokens: {output.token_text(numbers.usage)}"]

    async def _help(self, argument: str) -> list[str]:
        rows = [(f"  /{name} {takes}", what) for name, (takes, what) in HELP.items()]
        told = ["These lines never reach the model:", *output.columns(rows)]
        told.append("Every other line does, also one that begins with `/`.")
        if self._is_embedded:
            told.append(
                "The embedded console calls tools: /TOOL {json} or /TOOL key=value …; @AGENT asks another agent."
            )
        return told


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
