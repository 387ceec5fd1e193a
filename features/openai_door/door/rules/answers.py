"""Answers as chat completions and as responses, whole and as streams.

A whole answer is the model's last message. A stream has the words before tool calls, too: which message is the last one
is not known while it comes. Reasoning is `reasoning_content` of a chat completion, as other servers have it; a response
does not show it.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from goondan.features.openai_door.door.rules.faults import Fault
from goondan.features.openai_door.door.rules.pieces import Piece
from goondan.features.openai_door.door.rules.requests import Asked
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.usage import Usage

#: A comment, which clients pass over: somebody between us may end a connection on which nothing comes.
ALIVE: Final = b": the turn goes on\n\n"
#: The status of a response that is worked on.
OPEN: Final = "in_progress"
#: Reasons of vendors that say that a filter has ended the answer.
_FILTERED: Final = frozenset({"content_filter", "content-filter", "refusal", "safety", "SAFETY"})
#: Why a response is incomplete, by the finish reason of a chat completion.
_INCOMPLETE: Final[Mapping[str, str]] = {"length": "max_output_tokens", "content_filter": "content_filter"}


def encoded(value: Any) -> bytes:
    """JSON in one line, whatever a client takes for the end of one."""
    data = msgspec.json.encode(value)
    for mark in ("\x85", "\u2028", "\u2029"):
        data = data.replace(mark.encode(), f"\\u{ord(mark):04x}".encode())
    return data


def finish_reason(answer: Answer) -> str:
    """Why the answer ends: `stop`, `length` or `content_filter`."""
    return "length" if answer.cut_off else "content_filter" if answer.finish_reason in _FILTERED else "stop"


def usage_of(usage: Usage | None, read: str, written: str) -> dict[str, Any]:
    """What all model calls of the turn have used. `read`, `written`: what a door calls these tokens."""
    used = usage or Usage(input_tokens=0, output_tokens=0, model_calls=0)
    cached = {"cached_tokens": used.cached_tokens, "cache_write_tokens": used.cache_write_tokens}
    return {
        f"{read}_tokens": used.input_tokens,
        f"{read}_tokens_details": cached,
        f"{written}_tokens": used.output_tokens,
        f"{written}_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.input_tokens + used.output_tokens,
    }


class Completion:
    """One chat completion. `name`: its id; `created`: seconds since 1970."""

    def __init__(self, name: str, created: int, asked: Asked) -> None:
        self._head: dict[str, Any] = {"id": name, "created": created, "model": asked.agent}
        self._usage = bool((asked.given.get("stream_options") or {}).get("include_usage"))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer of a completed turn."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.response or "", "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(answer)}
        used = usage_of(answer.usage, "prompt", "completion")
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": used}

    def first(self) -> bytes:
        """What a stream begins with."""
        return self._choice({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        """A piece of the answer."""
        return self._choice({"reasoning_content" if piece.kind == "reasoning" else "content": piece.text})

    def last(self, answer: Answer) -> bytes:
        """What a stream ends with."""
        used = self._chunk([], usage_of(answer.usage, "prompt", "completion")) if self._usage else b""
        return self._choice({}, finish_reason(answer)) + used + b"data: [DONE]\n\n"

    def failed(self, fault: Fault) -> bytes:
        """What a stream ends with whose turn has failed."""
        return b"data: " + encoded({"error": fault.body}) + b"\n\n"

    def _choice(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}], None)

    def _chunk(self, choices: list[Any], used: Any) -> bytes:
        usage = {"usage": used} if self._usage else {}
        told = {"object": "chat.completion.chunk", **self._head, "choices": choices, **usage}
        return b"data: " + encoded(told) + b"\n\n"


# --- responses --------------------------------------------------------------------------------------------------------


def begun(name: str, created: int, asked: Asked) -> dict[str, Any]:
    """A response whose turn has begun. `name`: its id; `created`: seconds since 1970."""
    given = {key: asked.given.get(key) for key in ("instructions", "metadata", "previous_response_id", "user")}
    same: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled"}
    nothing: dict[str, Any] = {"output": [], "error": None, "incomplete_details": None, "usage": None}
    flags = {"background": bool(asked.given.get("background")), "store": asked.given.get("store") is not False}
    about = {"id": name, "object": "response", "created_at": created, "status": OPEN, "model": asked.agent}
    return about | given | flags | same | nothing | {"text": {"format": asked.format or {"type": "text"}}}


def ended(response: Mapping[str, Any], how: Answer | Fault, text: str | None = None) -> dict[str, Any]:
    """The response of a turn that is over. `text`: what was streamed of it."""
    if isinstance(how, Fault):
        if how.code == "E_CANCELLED":
            return {**response, "status": "cancelled"}
        return {**response, "status": "failed", "error": {"code": how.code, "message": how.message}}
    reason = _INCOMPLETE.get(finish_reason(how))
    status = "incomplete" if reason else "completed"
    item = _message(response["id"], status, how.response or "" if text is None else text)
    told = {"status": status, "output": [item], "usage": usage_of(how.usage, "input", "output")}
    return {**response, **told, "incomplete_details": {"reason": reason} if reason else None}


def _message(response: str, status: str, text: str | None) -> dict[str, Any]:
    """The message of a response. `text` None: it begins."""
    content = [] if text is None else [_part(text)]
    name = f"msg_{response.removeprefix('resp_')}"
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Events:
    """The events of one response, in their order. Each method returns what goes out."""

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = response
        self._item = _message(response["id"], OPEN, None)
        self._number = 0
        self._texts: list[str] = []

    def first(self) -> bytes:
        """What a stream begins with."""
        out = self._event("created", response=self._response) + self._event(OPEN, response=self._response)
        out += self._event("output_item.added", output_index=0, item=self._item)
        return out + self._in_text("content_part.added", part=_part(""))

    def piece(self, piece: Piece) -> bytes:
        """A piece of the answer."""
        if piece.kind == "reasoning":
            return b""
        self._texts.append(piece.text)
        return self._in_text("output_text.delta", delta=piece.text, logprobs=[])

    def last(self, answer: Answer) -> bytes:
        """What a stream ends with."""
        whole = ended(self._response, answer, "".join(self._texts))
        return self._closed(whole["status"]) + self._event(whole["status"], response=whole)

    def failed(self, fault: Fault) -> bytes:
        """What a stream ends with whose turn has failed, or was cancelled."""
        item = _message(self._response["id"], "incomplete", "".join(self._texts))
        whole = {**ended(self._response, fault), "output": [item]}
        return self._closed("incomplete") + self._event("failed", response=whole)

    def _closed(self, status: str) -> bytes:
        text = "".join(self._texts)
        out = self._in_text("output_text.done", text=text, logprobs=[])
        out += self._in_text("content_part.done", part=_part(text))
        item = _message(self._response["id"], status, text)
        return out + self._event("output_item.done", output_index=0, item=item)

    def _in_text(self, what: str, **fields: Any) -> bytes:
        return self._event(what, item_id=self._item["id"], output_index=0, content_index=0, **fields)

    def _event(self, what: str, **fields: Any) -> bytes:
        told = {"type": f"response.{what}", "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: response.{what}\n".encode() + b"data: " + encoded(told) + b"\n\n"
