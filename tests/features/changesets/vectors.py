"""Recorded frames of changesets."""

from __future__ import annotations

from goondan.features.changesets.wire import (
    ChangesetError,
    ChangesetHint,
    ChangesetSummary,
    CommitChangeset,
    CommittedChangeset,
    OpenChangeset,
    OpenedChangeset,
)
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame

KINDS = (OpenChangeset, OpenedChangeset, CommitChangeset, CommittedChangeset)


def frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame, and what its payload is."""
    base, new = "git:140f487f94865269b646935e71265ad254f459ee", "git:b0288f0a878bfa130fa8a76b42fc2c38270d1b62"
    opened = OpenedChangeset(
        "ca5825531453998a",
        base,
        "/home/you/.goondan/workspaces/0123456789abcdef/changesets/worktrees/ca5825531453998a",
        ChangesetHint(".", ["goondan.yaml", "prompts/system.md"]),
    )
    committed = CommittedChangeset(
        status="ok",
        changeset_id="ca5825531453998a",
        base_ref=base,
        new_ref=new,
        summary=ChangesetSummary(["prompts/system.md"], ["notes/more.md"], []),
    )
    rejected = CommittedChangeset(
        status="rejected",
        changeset_id="ca5825531453998a",
        base_ref=base,
        error=ChangesetError("E_CHANGESET_DENIED", "only the operator may change this: Makefile"),
    )
    asked = CommitChangeset("ca5825531453998a", "chore: update system prompt")
    return [
        (
            "changeset.open",
            Frame("changeset.open", id="x.31", call_id="t1/c4.1", payload=to_raw(OpenChangeset("a better prompt"))),
            "OpenChangeset",
        ),
        (
            "reply to changeset.open",
            Frame("reply", id="b.31", in_reply_to="x.31", payload=to_raw(opened)),
            "OpenedChangeset",
        ),
        (
            "changeset.commit",
            Frame("changeset.commit", id="x.32", call_id="t1/c4.2", payload=to_raw(asked)),
            "CommitChangeset",
        ),
        (
            "reply to changeset.commit",
            Frame("reply", id="b.32", in_reply_to="x.32", payload=to_raw(committed)),
            "CommittedChangeset",
        ),
        (
            "reply to changeset.commit that was refused",
            Frame("reply", id="b.33", in_reply_to="x.32", payload=to_raw(rejected)),
            "CommittedChangeset",
        ),
    ]
