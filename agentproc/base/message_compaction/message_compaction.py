"""The bundled extension `message-compaction`: the model sees a summary of a long conversation and its last messages.

The agent's own model writes the summary. It adds to the summary each time the conversation grows beyond the budget
again. The stored conversation does not change: only the messages that the model sees become fewer. A cut never lies
between a call and its result. The message that began the turn is always shown word by word.

The state of the extension in this instance holds the summary and the id of the last message in it.
"""

from __future__ import annotations

from typing import Any, Final

from agentproc.base.message_compaction.rendering import pieces, tokens_of
from agentproc.conversation import Message, ToolData, UserData
from schemas.errors import GoondanError, fail

INSTRUCTIONS: Final = (
    "You summarise a conversation between a user and an assistant that uses tools, so that the assistant can go on "
    "with your summary in the place of the conversation. Keep: what the user wants and has decided, facts and names, "
    "paths and numbers that may be needed again, what was done and what came of it, and what is still to be done. "
    "Leave out greetings and what has been replaced by something later. Write plain text, in the language of the "
    "conversation."
)
#: The line before the summary, in the message that the model sees.
TITLE: Final = "Summary of the conversation so far, which is no longer shown word by word:\n\n"
#: The longest summary that is kept (characters): the extension's state has 1 MiB.
MAX_SUMMARY_CHARS: Final = 100_000


def register(api: Any, config: dict[str, Any]) -> None:
    """Compact in front of each step that needs it. Raises GoondanError E_USAGE."""
    if config["keepTokens"] >= config["maxTokens"]:
        raise fail("E_USAGE", "message-compaction: keepTokens is not less than maxTokens")
    compaction = _Compaction(api, config)
    api.pipeline.register("step", compaction.step)


class _Compaction:
    """The summary of one instance."""

    def __init__(self, api: Any, config: dict[str, Any]) -> None:
        self._api = api
        self._budget: int = config["maxTokens"]
        self._kept: int = config["keepTokens"]
        self._instructions: str = config.get("instructions") or INSTRUCTIONS

    async def step(self, ctx: Any) -> Any:
        messages = ctx.conversation_state.next_messages
        state = self._api.state.get()
        summary, through = state.get("summary", ""), state.get("through", "")
        begin = next((index + 1 for index, message in enumerate(messages) if message.id == through), 0)
        if begin == 0:
            summary = ""  # none was made, or what it was made of is gone
        if tokens_of(summary) + sum(map(tokens_of, messages[begin:])) > self._budget:
            cut = find_cut(messages, begin, self._kept)
            if cut > begin:
                try:
                    summary = await self._summarise(ctx, summary, messages[begin:cut])
                except GoondanError as error:
                    self._api.logger.warning("the conversation could not be summarised:", error.info.message)
                else:
                    begin, through = cut, messages[cut - 1].id
                    self._api.state.set({"summary": summary, "through": through})
                    self._api.logger.info(cut, "messages are shown as a summary of", len(summary), "characters")
        if begin:
            ctx.view_messages(lambda now: shown(now, summary, through))
        return await ctx.next()

    async def _summarise(self, ctx: Any, summary: str, messages: list[Message]) -> str:
        """Ask for a summary of `summary` and of `messages`, in pieces that fit into the budget."""
        for piece in pieces(messages, self._budget):
            before = f"The summary so far:\n{summary}\n\nWhat came then:\n" if summary else ""
            text = f"{before}{piece}\n\nWrite the summary of all of it."
            summary = (await ctx.ask_model(text, system=self._instructions)).strip()[:MAX_SUMMARY_CHARS]
            if not summary:
                raise fail("E_MODEL_FAILED", "the model's summary is empty")
        return summary


def find_cut(messages: list[Message], begin: int, keep: int) -> int:
    """The index of the first message that stays as it is. At most `keep` tokens stay, but always the last message, and
    no result stays without its call. Returns `begin` when nothing can be cut off.
    """
    cut, size = len(messages) - 1, tokens_of(messages[-1]) if messages else 0
    while cut > begin and size + tokens_of(messages[cut - 1]) <= keep:
        cut -= 1
        size += tokens_of(messages[cut])
    while cut > begin and isinstance(messages[cut].data, ToolData):
        cut -= 1  # with its call, even if that is more than should stay
    return max(cut, begin)


def shown(messages: list[Message], summary: str, through: str) -> list[Any]:
    """The messages that the model sees: the summary, the user's last message if the summary covers it, and all later
    ones.
    """
    begin = next((index + 1 for index, message in enumerate(messages) if message.id == through), 0)
    if begin == 0:
        return messages
    told = {"id": "summary", "data": {"role": "user", "content": TITLE + summary}}
    last = next((m for m in reversed(messages) if isinstance(m.data, UserData)), None)
    said = [last] if last is not None and last in messages[:begin] else []
    return [told, *said, *messages[begin:]]
