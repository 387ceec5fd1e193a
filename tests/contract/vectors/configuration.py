"""Recorded frames about the configuration that is in force."""

from __future__ import annotations

from goondan.schemas.bundle.effective_config import Change, ConfigChange, ListChange, LiveChanges, Prompt
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame, Welcome


def configuration_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame, and what its payload is."""
    changes = [
        Change(tools=ListChange(added=["notes"], removed=["bash"]), prompt=Prompt("Be brief.")),
        Change(extensions=ListChange(order=["guard", "log"])),
        Change(configs=[ConfigChange("guard", ["limit"], 3), ConfigChange("guard", ["a", "b"], removed=True)]),
    ]
    in_force = LiveChanges(revision=3, base="00112233445566ff", changes=changes)
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
        ("config.changed", Frame("config.changed", id="b.21", payload=to_raw(in_force)), "LiveChanges"),
        (
            "config.changed with a specification",
            Frame("config.changed", id="b.23", payload=to_raw(LiveChanges(spec=to_raw(spec)))),
            "LiveChanges",
        ),
        ("welcome with changes", Frame("welcome", id="b.22", in_reply_to="x.1", payload=to_raw(welcome)), "Welcome"),
    ]
