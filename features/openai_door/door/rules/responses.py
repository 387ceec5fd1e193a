"""Answers as responses, whole and as a stream of events.

A response has one message for each text of the turn, so the words before tool calls are messages of their own, and
before each the reasoning of its step. After the end of the door that began it, a response has the last message only.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from goondan.features.openai_door.door.rules.chat import encoded, finish_reason
from goondan.features.openai_door.door.rules.faults import Fault
from goondan.features.openai_door.door.rules.pieces import Piece
from goondan.features.openai_door.door.rules.requests import Asked
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.usage import Usage

#: Of a response that is still worked on.
OPEN: Final = ("queued", "in_progress")
#: Why a response is incomplete, by the finish reason of a chat completion.
_INCOMPLETE: Final[Mapping[str, str]] = {"length": "max_output_tokens", "content_filter": "content_filter"}


def begun(name: str, created: int, asked: Asked) -> dict[str, Any]:
    """A response whose turn has begun. `name`: its id; `created`: seconds since 1970."""
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": asked.background,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": None,
        "metadata": dict(asked.metadata),
        "model": asked.agent,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous,
        "reasoning": {"effort": None, "summary": None},
        "store": asked.store,
        "temperature": None,
        "text": {"format": asked.format or {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }


def ended(response: Mapping[str, Any], answer: Answer, now: int, output: list[Any] | None = None) -> dict[str, Any]:
    """The response of a completed turn. `output`: what was streamed of it."""
    reason = _INCOMPLETE.get(finish_reason(answer))
    items = output if output is not None else _items(response["id"], answer, "incomplete" if reason else "completed")
    told = {**response, "status": "incomplete" if reason else "completed", "output": items}
    if reason:
        told["incomplete_details"] = {"reason": reason}
    else:
        told["completed_at"] = now
    return {**told, "usage": usage_of(answer.usage)}


def failed(response: Mapping[str, Any], fault: Fault, *, cancelled: bool = False) -> dict[str, Any]:
    """The response of a turn that has failed, or that was cancelled."""
    if cancelled:
        return {**response, "status": "cancelled"}
    return {**response, "status": "failed", "error": {"code": fault.code or fault.type, "message": fault.message}}


def usage_of(usage: Usage | None) -> dict[str, Any] | None:
    """What all model calls of the turn have used."""
    if usage is None:
        return None
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _items(name: str, answer: Answer, status: str) -> list[Any]:
    found = []
    if answer.reasoning:
        found.append(_reasoning(f"rs_{name[5:]}_0", answer.reasoning))
    found.append(_message(f"msg_{name[5:]}_{len(found)}", answer.response or "", status))
    return found


def _message(name: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_text(text)]
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(name: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": name, "type": "reasoning", "summary": [], "content": content}


class Events:
    """The events of one response, in their order. Each method returns what goes out."""

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = response
        self._number = 0
        #: What was streamed, item by item; the last one may be open.
        self._output: list[Any] = []
        self._open: str | None = None
        self._texts: list[str] = []

    def first(self) -> bytes:
        """What a stream begins with."""
        return self._of_response("response.created") + self._of_response("response.in_progress")

    def piece(self, piece: Piece) -> bytes:
        """A piece of the answer."""
        out = b""
        if self._open is not None and (piece.kind != self._open or piece.begins):
            out += self._close("completed")
        if self._open is None:
            out += self._begin(piece.kind)
        self._texts.append(piece.text)
        where = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        if piece.kind == "reasoning":
            return out + self._event("response.reasoning_text.delta", **where, delta=piece.text)
        return out + self._event("response.output_text.delta", **where, delta=piece.text, logprobs=[])

    def last(self, answer: Answer, now: int) -> bytes:
        """What a stream ends with. Afterwards `response` is whole."""
        out = b""
        if not any(item["type"] == "message" for item in self._output) and self._open != "text":
            if self._open is not None:
                out += self._close("completed")
            out += self._begin("text")  # the answer is empty
        reason = _INCOMPLETE.get(finish_reason(answer))
        if self._open is not None:
            out += self._close("incomplete" if reason else "completed")
        self._response = ended(self._response, answer, now, self._output)
        return out + self._of_response("response.incomplete" if reason else "response.completed")

    def failed(self, fault: Fault, *, cancelled: bool = False) -> bytes:
        """What a stream ends with whose turn has failed, or was cancelled."""
        out = b"" if self._open is None else self._close("incomplete")
        self._response = failed({**self._response, "output": self._output}, fault, cancelled=cancelled)
        return out + self._of_response("response.failed")

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._response

    def _begin(self, kind: str) -> bytes:
        name = f"{self._response['id'][5:]}_{len(self._output)}"
        item = _message(f"msg_{name}", None, "in_progress") if kind == "text" else _reasoning(f"rs_{name}", None)
        self._output.append(item)
        self._open, self._texts = kind, []
        part = _text("") if kind == "text" else {"type": "reasoning_text", "text": ""}
        at = len(self._output) - 1
        out = self._event("response.output_item.added", output_index=at, item=item)
        return out + self._event(
            "response.content_part.added", item_id=item["id"], output_index=at, content_index=0, part=part
        )

    def _close(self, status: str) -> bytes:
        at, text, name = len(self._output) - 1, "".join(self._texts), self._output[-1]["id"]
        where = {"item_id": name, "output_index": at, "content_index": 0}
        if self._open == "text":
            item = _message(name, text, status)
            out = self._event("response.output_text.done", **where, text=text, logprobs=[])
        else:
            item = _reasoning(name, text)
            out = self._event("response.reasoning_text.done", **where, text=text)
        self._output[-1], self._open = item, None
        out += self._event("response.content_part.done", **where, part=item["content"][0])
        return out + self._event("response.output_item.done", output_index=at, item=item)

    def _of_response(self, kind: str) -> bytes:
        return self._event(kind, response=self._response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\n".encode() + b"data: " + encoded(told) + b"\n\n"
