"""What `gdn config list` prints of the broker's answer."""

from __future__ import annotations

from typing import Any

from goondan.features.live_config.command import render


def patch(**changes: Any) -> dict[str, Any]:
    return {
        "patchId": "cfg-1",
        "revision": 3,
        "agent": "coder",
        "instanceKey": "k",
        "status": "accepted",
        "by": "agent",
        "byInstance": "k",
        "extension": "guard",
        "eventId": "e1",
        "reason": "notes are\nneeded",
        "atMs": 0,
        "asked": ["add /tools/-"],
        "change": {"tools": {"added": ["notes"]}},
        "idle": [],
        "error": None,
        **changes,
    }


def test_a_patch_says_who_when_what_and_why() -> None:
    operator = patch(by="operator", reason="", instanceKey=None, idle=["Tool/notes is not in the bundle any more"])
    refused = patch(status="rejected", error={"code": "E_CHANGESET_DENIED", "message": "no \x1b[31m"}, revision=12)
    assert render({"patches": [patch(), operator, refused], "more": 2}) == [
        "   3  cfg-1  coder (k)  1970-01-01T00:00:00Z  accepted",
        "      by extension guard of coder/k, event e1",
        '      add /tools/- → {"tools":{"added":["notes"]}}',
        "      because: notes are needed",
        "   3  cfg-1  coder (every instance)  1970-01-01T00:00:00Z  accepted",
        "      by operator",
        '      add /tools/- → {"tools":{"added":["notes"]}}',
        "      without effect: Tool/notes is not in the bundle any more",
        "  12  cfg-1  coder (k)  1970-01-01T00:00:00Z  rejected",
        "      by extension guard of coder/k, event e1",
        "      add /tools/-",
        "      because: notes are needed",
        "      no \\x1b[31m [E_CHANGESET_DENIED]",
        "and 2 older ones",
    ]


def test_nothing_is_said_as_well() -> None:
    assert render({"patches": [], "more": 0}) == ["no patch was proposed"]
