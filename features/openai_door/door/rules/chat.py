"""Answers as chat completions, whole and in chunks.

`content` of a whole answer is the model's last message. A stream has the words before tool calls, too: which message is
the last one is not known while it comes. Reasoning is `reasoning_content`, as other servers have it.

Source: https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from goondan.features.openai_door.door.rules.faults import Fault
from goondan.features.openai_door.door.rules.pieces import BETWEEN, Piece
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.usage import Usage

#: What ends a stream.
DONE: Final = b"data: [DONE]\n\n"
#: A comment, which clients pass over: somebody between us may end a connection on which nothing comes.
ALIVE: Final = b": the turn goes on\n\n"
#: Reasons of vendors that say that a filter has ended the answer.
_FILTERED: Final = frozenset({"content_filter", "content-filter", "refusal", "safety", "SAFETY"})


def encoded(value: Any) -> bytes:
    """JSON for a stream of events. Some clients take other ends of lines for the end of one."""
    data = msgspec.json.encode(value)
    if b"\xc2\x85" in data or b"\xe2\x80" in data:
        for line_end, escape in (
            (b"\xc2\x85", b"\\u0085"),
            (b"\xe2\x80\xa8", b"\\u2028"),
            (b"\xe2\x80\xa9", b"\\u2029"),
        ):
            data = data.replace(line_end, escape)
    return data


def finish_reason(answer: Answer) -> str:
    """Why the answer ends: `stop`, `length` or `content_filter`."""
    if answer.cut_off:
        return "length"
    return "content_filter" if answer.finish_reason in _FILTERED else "stop"


def usage_of(usage: Usage | None) -> dict[str, Any]:
    """What all model calls of the turn have used."""
    used = usage or Usage(input_tokens=0, output_tokens=0, model_calls=0)
    return {
        "prompt_tokens": used.input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.input_tokens + used.output_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": used.cache_write_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }


class Completion:
    """One chat completion. `name`: its id; `created`: seconds since 1970; `model`: the agent."""

    def __init__(self, name: str, created: int, model: str, *, usage: bool = False) -> None:
        self._head: dict[str, Any] = {"id": name, "created": created, "model": model}
        self._usage = usage

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer of a completed turn."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.response or "", "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(answer)}
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": usage_of(answer.usage)}

    def first(self) -> bytes:
        """What a stream begins with."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        """A piece of the answer."""
        if piece.kind == "reasoning":
            return self._chunk({"reasoning_content": piece.text})
        return self._chunk({"content": BETWEEN + piece.text if piece.begins else piece.text})

    def last(self, answer: Answer) -> bytes:
        """What a stream ends with."""
        ended = self._chunk({}, finish_reason(answer))
        if self._usage:
            told = {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage_of(answer.usage)}
            ended += _event(told)
        return ended + DONE

    def failed(self, fault: Fault) -> bytes:
        """What a stream ends with whose turn has failed."""
        return _event({"error": fault.body})

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        told = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        if self._usage:
            told["usage"] = None
        return _event(told)


def _event(value: Any) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"
