"""Frames about approvals."""

from __future__ import annotations

from goondan.features.approvals.wire import ApprovalAsk, ApprovalState
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame

KINDS = (ApprovalAsk, ApprovalState)


def frames() -> list[tuple[str, Frame, str | None]]:
    """What it shows, the frame, the struct of its payload."""
    return [
        (
            "approval.ask",
            Frame(
                "approval.ask",
                id="x.19",
                tool="deploy",
                call_id="t1/c3",
                event_id="e-1",
                epoch=7,
                payload=to_raw(ApprovalAsk(args=to_raw({"where": "test"}))),
            ),
            "ApprovalAsk",
        ),
        (
            "reply to approval.ask",
            Frame("reply", id="b.19", in_reply_to="x.19", payload=to_raw(ApprovalState(state="waits"))),
            "ApprovalState",
        ),
        ("approval.news", Frame("approval.news", id="b.20", event_id="e-1", epoch=7, calls=["t1/c3"]), None),
    ]
