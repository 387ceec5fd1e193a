"""Recorded frames of live configuration."""

from __future__ import annotations

from goondan.schemas.bundle.effective_config import Change, Edit, ListChange, LiveChanges, Prompt
from goondan.schemas.live_config import ConfigOutcome, ConfigProposal, Operation
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import Frame, Welcome


def live_config_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame, and what its payload is."""
    proposal = ConfigProposal(
        id="cfg-00ff",
        patches=[Operation("add", "/tools/-", "Tool/notes"), Operation("remove", "/extensions/0/config/limit")],
        revision=2,
        base="00112233445566ff",
        reason="notes are needed",
        extension="guard",
    )
    changes = [
        Change(tools=ListChange(added=["notes"], removed=["bash"]), prompt=Prompt("Be brief.")),
        Change(extensions=ListChange(order=["guard", "log"])),
        Change(edits=[Edit("guard", ["limit"], 3), Edit("guard", ["a", "b"], removed=True)]),
    ]
    in_force = LiveChanges(revision=3, base="00112233445566ff", changes=changes)
    accepted = ConfigOutcome(status="accepted", patch_id="cfg-00ff", revision=3)
    conflict = error_payload("E_CONFIG_CONFLICT", "the patch was made from revision 2")
    rejected = ConfigOutcome(status="rejected", patch_id="cfg-00ff", error=conflict)
    welcome = Welcome(
        version=1,
        principal="agent/coder/u1",
        broker="b1",
        credit=256,
        max_frame=1 << 20,
        instance_key="u1",
        config=to_raw(in_force),
    )
    spec = {
        "name": "coder",
        "model": {"provider": "embedded"},
        "registry": [],
        "catalog": [],
        "stateDir": "/srv/state",
        "revision": "00ff",
        "system": "Be brief.",
    }
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
        ("config.changed", Frame("config.changed", id="b.21", payload=to_raw(in_force)), "LiveChanges"),
        (
            "config.changed with a specification",
            Frame("config.changed", id="b.23", payload=to_raw(LiveChanges(spec=to_raw(spec)))),
            "LiveChanges",
        ),
        ("welcome with changes", Frame("welcome", id="b.22", in_reply_to="x.1", payload=to_raw(welcome)), "Welcome"),
    ]
