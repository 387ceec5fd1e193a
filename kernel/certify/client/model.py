"""A broker that does what it should, for scenarios in which only its life is short. Pure.

Source: schemas/PROTOCOL.md, "Ask", "Repeats".
"""

from __future__ import annotations

from typing import Any

CREATED_AT = "2026-11-24T09:30:08Z"


class Model:
    """It answers each question with its own text, and remembers what it has accepted."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any]] = {}
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
        event, wanted = frame["eventId"], frame.get("replyTo")
        accepted = {"type": "ack", "stage": "accepted", "inReplyTo": frame["id"], "eventId": event}
        if wanted is None:
            return [accepted]
        answer = self._answers.setdefault(
            event, {"turnId": event, "status": "completed", "response": frame["payload"]["input"]}
        )
        self._sent += 1
        payload = {"id": f"{event}:answer", "type": "agent.response", "createdAt": CREATED_AT, "answer": answer}
        payload["metadata"] = {"inReplyTo": event}
        return [
            accepted,
            {
                "type": "event",
                "id": f"b.{self._sent}",
                "inReplyTo": wanted["correlationId"],
                "eventId": f"{event}:answer",
                "payload": payload,
            },
        ]
