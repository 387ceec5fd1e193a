"""The bundled extension `required-tools-guard`: a turn does not end before its required tools were called.

The extension reads from the conversation which tools were called and how often the model was reminded. So it goes on
correctly when another process takes the turn up after a crash.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final

from goondan.agentproc.machine.messages import Append, Message, ToolData
from goondan.schemas.wire.errors import fail

#: The key in the metadata of a reminder.
REMINDER: Final = "requiredToolsGuard"


def register(api: Any, config: dict[str, Any]) -> None:
    """Check each step that would end its turn."""

    async def step(ctx: Any) -> Any:
        result = await ctx.next()
        if result.should_continue or result.error is not None:
            return result
        events = ctx.conversation_state.events
        own = [event.message for event in events if isinstance(event, Append)]
        missing = missing_tools(config["tools"], own)
        if not missing:
            return result
        names = [item.name for item in ctx.tool_catalog]
        lost = [pattern for pattern in missing if not any(fnmatchcase(name, pattern) for name in names)]
        reminded = sum(1 for message in own if REMINDER in message.metadata)
        if not lost and reminded < config["reminders"]:
            said = {"role": "user", "content": f"{config['message']} {', '.join(missing)}"}
            message = {"data": said, "metadata": {REMINDER: reminded + 1}}
            ctx.emit_message_event({"type": "append", "message": message})
            result.should_continue = True
            return result
        why = f"required tools were not called with success: {', '.join(missing)}"
        if lost:
            why += f" (not in the catalog: {', '.join(lost)})"
        if config["onMissing"] == "pass":
            api.logger.warning(f"turn {ctx.turn_id}:", why)
        else:
            result.error = fail("E_MIDDLEWARE", f"required-tools-guard: {why}").info
        return result

    api.pipeline.register("step", step)


def missing_tools(patterns: list[str], own: list[Message]) -> list[str]:
    """The patterns without a matching call in the turn's own messages that ended well or still runs."""
    parts = [part for message in own if isinstance(message.data, ToolData) for part in message.data.content]
    done = [part.tool_name for part in parts if part.result.status != "error"]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in done)]
