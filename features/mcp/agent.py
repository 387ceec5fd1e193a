"""Requests of MCP servers to the agent's own model (sampling), for servers that were granted it.

The worker of a server refuses what was not granted, and so does the agent, by its own config. The model is asked
outside of the conversation, one request at a time, and what it uses is charged to the turn's budget. Text is passed on,
and nothing else: a server gets no tools, no pictures and nothing of the agent's conversation.

Source: docs/mcp.md; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from goondan.agentproc.calls.asks import Asked
from goondan.agentproc.turn.parts import AgentFeature, TurnCore, TurnPart
from goondan.schemas.bundle import address, launch
from goondan.schemas.wire import frames, questions
from goondan.schemas.wire.errors import GoondanError, error_payload, fail

#: What `grants` has to name.
_GRANT: Final = "sampling"
#: Characters of a request. A server that wants more read should read it itself.
MAX_TEXT: Final = 200_000
_SPEAKERS: Final = {"user": "User", "assistant": "Assistant"}

log = logging.getLogger("agentproc")


class SamplingRequest(Struct, rename="camel"):
    """The value of a question of kind `sample`: what of a server's request is passed on."""

    #: `{role, content}`; content is one block or a list of blocks.
    messages: list[dict[str, Any]]
    #: The server's own instructions.
    system_prompt: str | None = None
    #: Tools that the model is to be offered. They are refused.
    tools: list[Any] | None = None


class Sampling(TurnPart):
    """The requests of the calls of one turn."""

    def __init__(self, turn: TurnCore) -> None:
        self._turn = turn
        self._open: set[asyncio.Task[None]] = set()
        self.asks = {questions.SAMPLE: self.take}

    def take(self, asked: Asked) -> None:
        """A server asks. Raises GoondanError E_FORBIDDEN, E_FRAME_INVALID, E_MCP_INPUT."""
        instance = self._turn.instance
        server = (instance.caller.tool_of(asked.call_id) or "").partition(address.SEPARATOR)[0]
        if not is_granted(server, instance.spec.extensions):
            raise fail("E_FORBIDDEN", f"the MCP server {server!r} was not granted {_GRANT!r}")
        request: SamplingRequest = asked.read(SamplingRequest)
        text = text_of(request)
        task = asyncio.get_running_loop().create_task(self._answer(asked, text, request.system_prompt))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def close(self) -> None:
        """The turn is left: nobody waits any more."""
        for task in list(self._open):
            task.cancel()

    async def _answer(self, asked: Asked, text: str, system: str | None) -> None:
        try:
            said = await self._turn.ask_aside(text, system, self._turn.step)
        except GoondanError as error:
            asked.refuse(error.info)
        except Exception as error:  # a bug of ours costs this request, and no turn
            log.exception("a request of the call %s to the model", asked.call_id)
            asked.refuse(error_payload("E_INTERNAL", f"the model was not asked: {type(error).__name__}"))
        else:
            asked.answer(
                {
                    "role": "assistant",
                    "content": {"type": "text", "text": said.text},
                    "model": said.model or self._turn.model.model,
                    "stopReason": "maxTokens" if said.cut_off else "endTurn",
                }
            )


def is_granted(server: str, extensions: Iterable[launch.ExtensionSpec]) -> bool:
    """Whether the config of the server's extension grants it to ask the model."""
    return any(one.server == server and _GRANT in one.config.get("grants", ()) for one in extensions if one.server)


def text_of(request: SamplingRequest) -> str:
    """The request as one text. Raises GoondanError E_MCP_INPUT for what cannot be passed on."""
    if request.tools:
        raise fail("E_MCP_INPUT", "the server wants the model to have tools; only text is passed on")
    parts = [(_SPEAKERS.get(str(one.get("role")), "User"), _words(one.get("content"))) for one in request.messages]
    if not parts:
        raise fail("E_MCP_INPUT", "the server asks the model nothing")
    text = parts[0][1] if len(parts) == 1 else "\n\n".join(f"{speaker}: {words}" for speaker, words in parts)
    if len(text) > MAX_TEXT:
        raise fail("E_MCP_INPUT", f"the server's request has {len(text)} characters, limit {MAX_TEXT}")
    return text


def _words(content: Any) -> str:
    blocks = content if isinstance(content, list) else [content]
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    if len(texts) != len(blocks) or not all(isinstance(text, str) for text in texts):
        raise fail("E_MCP_INPUT", "the server asks with something else than text; only text is passed on")
    return "\n".join(str(text) for text in texts)


class OfServers(AgentFeature):
    """What the servers of an agent ask of it."""

    name = "mcp"

    def applies(self, spec: launch.AgentSpec, event: frames.Frame) -> bool:
        """Whether the agent has servers."""
        return bool(spec.servers)

    def begin(self, turn: TurnCore) -> TurnPart:
        """Answer what they ask in a turn."""
        return Sampling(turn)


FEATURE: Final = OfServers
