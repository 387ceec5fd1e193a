"""The bundled extension `message-compaction`: the model sees a summary of a long conversation and its last messages.

The agent's own model writes the summary. It adds to the summary each time more of the conversation is left out. The
stored conversation does not change: only the messages that the model sees become fewer. What is left out, and when, is
decided by the agent itself (docs/context.md), which also keeps the summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from goondan.agentproc.machine.messages import AssistantData, Message, ToolData
from goondan.schemas.wire import codec, errors

INSTRUCTIONS: Final = (
    "You summarise a conversation between a user and an assistant that uses tools, so that the assistant can go on "
    "with your summary in the place of the conversation. Keep: what the user wants and has decided, facts and names, "
    "paths and numbers that may be needed again, what was done and what came of it, and what is still to be done. "
    "Leave out greetings and what has been replaced by something later. Write plain text, in the language of the "
    "conversation."
)
#: The longest summary that is kept (bytes), in any context.
MAX_SUMMARY_BYTES: Final = 100_000
#: How much of one tool's result, or of one call's arguments, goes into the text to summarise (characters). Longer ones
#: are files and listings, and their content can be read again.
MAX_VALUE_CHARS: Final = 4000
#: The parts of a question: the summary so far and the piece of the conversation. The rest is for the instructions.
SUMMARY_PART: Final = 1 / 5
PIECE_PART: Final = 3 / 5


def register(api: Any, config: dict[str, Any]) -> None:
    """Compact when a step needs it. Raises GoondanError E_USAGE."""
    if config["keepTokens"] >= config["maxTokens"]:
        raise errors.fail("E_USAGE", "message-compaction: keepTokens is not less than maxTokens")
    instructions: str = config.get("instructions") or INSTRUCTIONS

    async def summarise(ask: Any, summary: str, messages: list[Message], most: int) -> str:
        """Ask for a summary of `summary` and of `messages`, in pieces that fit into `most` bytes."""
        size = len(messages)
        for piece in pieces(messages, int(most * PIECE_PART)):
            before = f"The summary so far:\n{summary}\n\nWhat came then:\n" if summary else ""
            text = f"{before}{piece}\n\nWrite the summary of all of it."
            summary = within((await ask(text, instructions)).strip(), min(MAX_SUMMARY_BYTES, int(most * SUMMARY_PART)))
            if not summary:
                raise errors.fail("E_MODEL_FAILED", "the model's summary is empty")
        api.logger.info(size, "messages are shown as a summary of", len(summary), "characters")
        return summary

    async def step(ctx: Any) -> Any:
        ctx.limit_context(max_tokens=config["maxTokens"], keep_tokens=config["keepTokens"], summarise=summarise)
        return await ctx.next()

    api.pipeline.register("step", step)


# --- the conversation as text -----------------------------------------------------------------------------------------


def pieces(messages: list[Message], most: int) -> Iterator[str]:
    """The conversation as texts of at most `most` bytes each. A message that is longer than that is cut."""
    piece, size = "", 0
    for message in messages:
        text = within(render(message), most)
        length = len(text.encode("utf-8", "replace")) + 1
        if piece and size + length > most:
            yield piece
            piece, size = "", 0
        piece, size = f"{piece}\n{text}" if piece else text, size + length
    if piece:
        yield piece


def within(text: str, most: int) -> str:
    """The beginning of a text, in at most `most` bytes."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def render(message: Message) -> str:
    """One message as lines: first the speaker, then the content."""
    data = message.data
    if isinstance(data, ToolData):
        lines = []
        for part in data.content:
            result = part.result
            said = "" if result.output is None else _json(codec.from_raw(result.output, object))
            if result.error is not None:
                said = f"{result.error.code}: {result.error.message}"
            lines.append(f"{part.tool_name} gave ({result.status}): {_cut(said, MAX_VALUE_CHARS)}")
        return "\n".join(lines)
    if isinstance(data, AssistantData):
        calls = [f"Assistant calls {call.tool_name} {_cut(_json(call.args), MAX_VALUE_CHARS)}" for call in data.calls]
        return "\n".join([*([f"Assistant: {data.text}"] if data.text else []), *calls])
    return f"{data.__class__.__name__.removesuffix('Data')}: {data.content}"


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
