"""What commands and the console of `gdn run` ask about one conversation, over an open session.

Messages are read from the instance's file. What an agent has to do itself goes to it as an operator's event, which
waits for the turns before it.

Source: docs/design/turns.md section 11; docs/design/commands.md section 9.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.kernel.cli.session import NO_SUCH_QUESTION, Session
from goondan.kernel.conversations import Overview, messages, overview
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import (
    OPERATOR_TOOLS,
    Answer,
    OperatorTool,
    ToolResult,
)

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
        answer = await self._session.ask(
            self.agent,
            self.instance,
            kind,
            asked,
            event_id=self._session.new_id(),
            workdir=self._workdir,
            timeout_s=ANSWER_S,
        )
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
            if error.info.code == NO_SUCH_QUESTION:
                return 0  # no feature of this kernel lets a conversation begin anew, so each counts from its beginning
            raise
        return int(answered["generation"])


def tool_lines(tools: list[OperatorTool], *, typed: bool) -> list[str]:
    """The tools for a person, one line each. `typed`: a person calls them by `/TOOL`, as in the embedded console."""
    from goondan.kernel.cli.plain import one_line
    from goondan.kernel.cli.terminal import filled, width_of

    if not tools:
        return ["This agent has no tools. Add some to its spec.tools."]
    width = max(width_of(tool.name) for tool in tools)
    return [
        "1 tool:" if len(tools) == 1 else f"{len(tools)} tools:",
        *(
            f"  {'/' * typed}{filled(tool.name, width)}  {one_line(tool.description or '', MAX_DESCRIPTION)}".rstrip()
            for tool in tools
        ),
    ]


def _output(answer: Answer) -> Any:
    """The output of the operator's event. Raises GoondanError when the answer has none."""
    result = from_raw(answer.output, ToolResult) if answer.output is not None else None
    if result is None or result.output is None:
        raise fail("E_AGENT_FAILED", "the agent's answer has no result")
    return from_raw(result.output, object)


def messages_text(count: int) -> str:
    """A number of messages, for a person."""
    return "1 message" if count == 1 else f"{count} messages"
