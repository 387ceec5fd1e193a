"""The bundled extension `message-integrity`: finds faults in the messages that the model will see, logs and repairs
them.

Faults come from extensions that remove or replace messages. A vendor would refuse the request, or the model would be
misled. The kernel itself only makes sure that each call is followed by one result; this extension logs the faults.

A fault is: a result without its call, a call without its result, a second result of a call, a result that does not
follow its call, and a message without any content.
"""

from __future__ import annotations

from typing import Any, Final

from goondan.agentproc.machine.messages import AssistantData, Message, ToolData, presentable
from goondan.schemas.wire.errors import fail

#: Faults that one line of the log names.
MAX_TOLD: Final = 5


def register(api: Any, config: dict[str, Any]) -> None:
    """Check the messages of each step after every other extension has changed them."""
    told: set[str] = set()  # a fault that stays in the conversation is told once

    def check(messages: list[Message]) -> list[Message]:
        faults = find_faults(messages)
        if not faults:
            return messages
        if config["onFault"] == "fail":
            raise fail("E_MIDDLEWARE", f"the conversation does not fit together: {_list(faults)}")
        new = [fault for fault in faults if fault not in told]
        told.update(new)
        if new:
            api.logger.warn("the conversation does not fit together; the model is shown a sound one:", _list(new))
        return repaired(messages)

    async def step(ctx: Any) -> Any:
        ctx.view_messages(check)
        return await ctx.next()

    api.pipeline.register("step", step, priority=1_000_000)  # the innermost: what others have made is looked at


def find_faults(messages: list[Message]) -> list[str]:
    """One line for each fault, in the order of the messages."""
    faults: list[str] = []
    owed: dict[str, str] = {}  # calls of the last assistant message that have no result yet
    calls: set[str] = set()  # of all before it
    for message in messages:
        data = message.data
        if isinstance(data, ToolData):
            for part in data.content:
                if owed.pop(part.tool_call_id, None) is None:
                    what = "is no call's" if part.tool_call_id not in calls else "stands apart from its call, or twice"
                    faults.append(f"the result {part.tool_call_id} in message {message.id} {what}")
            if not data.content:
                faults.append(f"message {message.id} is empty")
            continue
        faults += [f"the call {call} in message {place} has no result" for call, place in owed.items()]
        owed = {}
        if isinstance(data, AssistantData):
            owed = {part.tool_call_id: message.id for part in data.calls}
            calls.update(owed)
        if _is_empty(message):
            faults.append(f"message {message.id} is empty")
    return faults + [f"the call {call} in message {place} has no result" for call, place in owed.items()]


def repaired(messages: list[Message]) -> list[Message]:
    """The messages without faults: empty messages are left out, and results follow their calls."""
    return presentable([message for message in messages if not _is_empty(message)])


def _is_empty(message: Message) -> bool:
    data = message.data
    if isinstance(data, AssistantData):
        return not data.calls and not data.text.strip()
    return not data.content or (isinstance(data.content, str) and not data.content.strip())


def _list(faults: list[str]) -> str:
    more = f"; +{len(faults) - MAX_TOLD} more" if len(faults) > MAX_TOLD else ""
    return "; ".join(faults[:MAX_TOLD]) + more
