"""The bundled extension `message-window`: the model sees only the last messages of a long conversation.

Nothing is removed from the conversation. A cut never lies between a call and its result. A window begins with a message
of the user. When one turn alone is longer than the window, the user's last message stands before the rest.
"""

from __future__ import annotations

from typing import Any

from agentproc.conversation import Message, ToolData, UserData


def register(api: Any, config: dict[str, Any]) -> None:
    """Limit the messages that the model sees in each step."""
    limit = config["maxMessages"]

    async def step(ctx: Any) -> Any:
        ctx.view_messages(lambda messages: window(messages, limit))
        return await ctx.next()

    api.pipeline.register("step", step)


def window(messages: list[Message], limit: int) -> list[Message]:
    """The last of `messages`, at most `limit` (two at least)."""
    if len(messages) <= limit:
        return messages
    begin = len(messages) - limit
    for index in range(begin, len(messages)):
        if isinstance(messages[index].data, UserData):
            return messages[index:]
    said = next((m for m in reversed(messages[:begin]) if isinstance(m.data, UserData)), None)
    index = begin + 1 if said is not None else begin
    while index < len(messages) and isinstance(messages[index].data, ToolData):
        index += 1
    return messages[index:] if said is None else [said, *messages[index:]]
