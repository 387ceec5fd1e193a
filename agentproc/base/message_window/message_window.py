"""The bundled extension `message-window`: the model sees only the last messages of a long conversation.

Nothing is removed from the conversation. What is shown is cut by the agent itself (docs/context.md); this extension
says when.
"""

from __future__ import annotations

from typing import Any


def register(api: Any, config: dict[str, Any]) -> None:
    """Limit the messages that the model sees in each step."""

    async def step(ctx: Any) -> Any:
        ctx.limit_context(max_messages=config["maxMessages"], result_share=config["resultShare"])
        return await ctx.next()

    api.pipeline.register("step", step)
