"""Frames about the gates before model servers."""

from __future__ import annotations

from goondan.features.gates.wire import (
    GateChanged,
    HeldPermit,
    PermitAsk,
    PermitGranted,
    PermitOver,
    PlaceInLine,
    Refused,
)
from goondan.schemas.models.server_answers import RateLimits
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame

KINDS = (GateChanged, HeldPermit, PermitAsk, PermitGranted, PermitOver, PlaceInLine)


def frames() -> list[tuple[str, Frame, str | None]]:
    """What it shows, the frame, the struct of its payload."""
    ask = PermitAsk("0f3a9c", "main", 1200, 86_400_000, 60_000)
    again = PermitAsk("0f3a9c", "main", 1200, 86_400_000, 60_000, Refused(2500))
    over = PermitOver("0f3a9c", "main", True, 1490, RateLimits(59, 1000, 148_800, 480))
    return [
        ("model.permit", Frame("model.permit", id="x.40", event_id="e-1", epoch=7, payload=to_raw(ask)), "PermitAsk"),
        (
            "model.permit of a request that was refused",
            Frame("model.permit", id="x.41", event_id="e-1", epoch=7, payload=to_raw(again)),
            "PermitAsk",
        ),
        (
            "reply to model.permit",
            Frame("reply", id="b.40", in_reply_to="x.40", payload=to_raw(PermitGranted(state="bGVzc29u"))),
            "PermitGranted",
        ),
        ("model.over", Frame("model.over", id="x.42", event_id="e-1", epoch=7, payload=to_raw(over)), "PermitOver"),
        (
            "model.out",
            Frame("model.out", id="x.43", event_id="e-1", epoch=7, payload=to_raw(HeldPermit("0f3a9c", "main", 40))),
            "HeldPermit",
        ),
        ("model.gate", Frame("model.gate", id="b.41", payload=to_raw(GateChanged("main", True))), "GateChanged"),
        (
            "model.line",
            Frame("model.line", id="b.42", event_id="e-1", payload=to_raw(PlaceInLine("0f3a9c", 12, 3500))),
            "PlaceInLine",
        ),
    ]
