"""Recorded frames of live configuration: what is proposed, and what comes of it."""

from __future__ import annotations

from goondan.features.live_config.wire import CONFLICT, ConfigOutcome, ConfigProposal, Operation
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import Frame

KINDS = (ConfigProposal, ConfigOutcome)


def frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame, and what its payload is."""
    proposal = ConfigProposal(
        id="cfg-00ff",
        patches=[Operation("add", "/tools/-", "Tool/notes"), Operation("remove", "/extensions/0/config/limit")],
        revision=2,
        base="00112233445566ff",
        reason="notes are needed",
        extension="guard",
    )
    accepted = ConfigOutcome(status="accepted", patch_id="cfg-00ff", revision=3)
    conflict = error_payload(CONFLICT, "the patch was made from revision 2")
    rejected = ConfigOutcome(status="rejected", patch_id="cfg-00ff", error=conflict)
    return [
        ("config.propose", Frame("config.propose", id="x.19", payload=to_raw(proposal)), "ConfigProposal"),
        (
            "a patch is accepted",
            Frame("reply", id="b.19", in_reply_to="x.19", payload=to_raw(accepted)),
            "ConfigOutcome",
        ),
        (
            "a patch is rejected",
            Frame("reply", id="b.20", in_reply_to="x.20", payload=to_raw(rejected)),
            "ConfigOutcome",
        ),
    ]
