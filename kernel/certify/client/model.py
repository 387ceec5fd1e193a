"""A broker that does what it should, for scenarios in which only its life is short. Pure.

Source: schemas/PROTOCOL.md, "Ask", "Repeats".
"""

from __future__ import annotations

from typing import Any


def too_early(frame: dict[str, Any]) -> list[dict[str, Any]]:
    """What a broker says to a frame that comes before its hello, if the frame has a name to say it by."""
    payload = {"code": "E_HELLO_REQUIRED", "message": "too early"}
    return [{"type": "error", "inReplyTo": frame["id"], "payload": payload}] if "id" in frame else []


class Model:
    """It answers each question with its own text."""

    def __init__(self) -> None:
        self._sent = 0

    def hello_required(self) -> dict[str, Any]:
        """What it says to a connection that it does not know."""
        return {"type": "error", "payload": {"code": "E_HELLO_REQUIRED", "message": "say hello"}}

    def hear(self, frame: dict[str, Any]) -> list[dict[str, Any]]:
        """What it says to a frame."""
        if frame["type"] == "hello":
            welcome = {"version": 1, "principal": "client/7", "broker": "b", "credit": 8, "maxFrame": 1 << 20}
            return [{"type": "welcome", "inReplyTo": frame.get("id"), "payload": welcome}]
        if frame["type"] == "ping":
            return [{"type": "pong"} | ({"inReplyTo": frame["id"]} if "id" in frame else {})]
        if frame["type"] != "event":
            return []
        event, reply, asked = frame.get("eventId"), frame.get("replyTo") or {}, frame.get("payload")
        self._sent += 1
        text = asked.get("input") if isinstance(asked, dict) else None
        answer = {"turnId": event, "status": "completed", "response": text}
        payload: dict[str, Any] = {
            "id": f"{event}:answer",
            "type": "agent.response",
            "createdAt": "2026-11-24T09:30:08Z",
        }
        payload |= {"metadata": {"inReplyTo": event}, "answer": answer}
        header = {"id": f"b.{self._sent}", "inReplyTo": reply.get("correlationId"), "eventId": f"{event}:answer"}
        accepted = {"type": "ack", "stage": "accepted", "inReplyTo": frame.get("id"), "eventId": event}
        return [accepted, {"type": "event", **header, "payload": payload}]
