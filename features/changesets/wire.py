"""Payloads about changesets: between agents and the broker, and between the broker and the supervisor
(control.ForFeature).

Source: requirements BUNDLE-02 to BUNDLE-07; docs/changesets.md; docs/decisions/067.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final, Literal

from msgspec import Struct
from msgspec.msgpack import Decoder

from goondan.schemas.wire.errors import ErrorCode, add_codes
from goondan.schemas.wire.frames import ErrorPayload

DENIED: Final = "E_CHANGESET_DENIED"
_CONFLICT: Final = "Commit or undo the changes in the checkout, or open a new changeset from what it has now."
_DENIED: Final = "Leave out what only the operator may change; changesets.md and live-config.md say what."
ERRORS: Final = add_codes(
    {
        "E_CHANGESET_CONFLICT": ErrorCode(_CONFLICT),
        DENIED: ErrorCode(_DENIED, refuser="grant"),
        "E_CHANGESET_INVALID": ErrorCode("Correct the files in the worktree, and commit the changeset again."),
        "E_CHANGESET_IO": ErrorCode("Read the message: it names what git or the disk refused.", environment=True),
    }
)

#: The name of this feature.
FEATURE: Final = "changesets"
#: The types of its frames.
FRAMES: Final = ("changeset.open", "changeset.commit")
#: Of a reason and of a message (characters); more is cut.
MAX_REASON: Final = 500
MAX_MESSAGE: Final = 10_000
#: Hexadecimal digits of a changeset's id.
ID_DIGITS: Final = 16


class OpenChangeset(Struct, frozen=True, omit_defaults=True):
    """Payload of `changeset.open`. `reason`: for whoever reads the list of changesets."""

    #: For whoever reads the list of changesets.
    reason: str = ""


class ChangesetHint(Struct, frozen=True, rename="camel"):
    """Where to look in a worktree: the bundle's folder in it ("." for its top), and the files that the bundle consists
    of, by their paths in the worktree.
    """

    #: The folder of the bundle in the worktree; "." for its top.
    bundle_root_in_workdir: str
    #: The files of the bundle, by their paths in the worktree.
    recommended_files: list[str]


class OpenedChangeset(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `reply` to `changeset.open` (BUNDLE-03)."""

    #: Names the changeset.
    changeset_id: str
    #: The commit that it began with: `git:` and its id.
    base_ref: str
    #: Absolute path of the worktree.
    workdir: str
    #: Where to look in the worktree.
    hint: ChangesetHint | None = None


class CommitChangeset(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `changeset.commit`. Without a `message` the commit's is the changeset's reason."""

    #: The changeset.
    changeset_id: str
    #: The message of the commit. "": the reason of the changeset.
    message: str = ""


class ChangesetSummary(Struct, frozen=True, rename="camel"):
    """The files of a commit (BUNDLE-06), by their paths in the repository, in order."""

    #: Files that existed before and after.
    files_changed: list[str]
    #: Files that did not exist before.
    files_added: list[str]
    #: Files that no longer exist.
    files_deleted: list[str]


class ChangesetError(Struct, frozen=True):
    """Why a changeset did not become a commit (BUNDLE-07)."""

    #: The code of the error.
    code: str
    #: What went wrong.
    message: str


class CommittedChangeset(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `changeset.commit` (BUNDLE-05)."""

    #: Whether the commit was made.
    status: Literal["ok", "rejected", "failed"]
    #: The changeset.
    changeset_id: str
    #: The commit that it began with.
    base_ref: str
    #: The new commit. Only with `ok`.
    new_ref: str | None = None
    #: The files of the commit.
    summary: ChangesetSummary | None = None
    #: Why there is no commit. Only without `ok`.
    error: ChangesetError | None = None


class ChangesetWish(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """An agent's request, as the broker knows it. Either `open` or `commit` is there."""

    #: Names the question. The same question asked again has the same name.
    request: str
    #: The agent that asks.
    agent: str
    #: Its instance.
    instance_key: str
    #: The event whose turn asks.
    event_id: str
    #: A changeset is to be opened.
    open: OpenChangeset | None = None
    #: A changeset is to be committed.
    commit: CommitChangeset | None = None


class ChangesetDone(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The answer to a ChangesetWish. One of `opened`, `committed` and `error` is there."""

    #: The name of the question.
    request: str
    #: The changeset that was opened.
    opened: OpenedChangeset | None = None
    #: How the commit ended.
    committed: CommittedChangeset | None = None
    #: Why neither was done.
    error: ErrorPayload | None = None


class HeldChangeset(Struct, frozen=True, rename="camel"):
    """A worktree that is there, and the event whose turn may go on with it."""

    #: The changeset.
    changeset_id: str
    #: The event whose turn may go on with it.
    event_id: str


class ChangesetAsked(Struct, frozen=True, tag="changeset_asked", tag_field="kind", rename="camel"):
    """A turn wants a changeset, or a commit of one. The same request may come again: it is the same wish."""

    #: What is wanted.
    wish: ChangesetWish


class ChangesetsOver(Struct, frozen=True, tag="changesets_over", tag_field="kind", rename="camel"):
    """Nobody can go on with these changesets: their events have ended."""

    #: The changesets.
    changeset_ids: list[str]


class WhichChangesets(Struct, frozen=True, tag="which_changesets", tag_field="kind", rename="camel"):
    """Say which changesets are open (ChangesetsHeld)."""


class ChangesetAnswered(Struct, frozen=True, tag="changeset_answered", tag_field="kind", rename="camel"):
    """The answer to ChangesetAsked. What it says is in force is so already."""

    #: What was done.
    done: ChangesetDone


class ChangesetsHeld(Struct, frozen=True, tag="changesets_held", tag_field="kind", rename="camel"):
    """The answer to WhichChangesets: every changeset that is open."""

    #: The open changesets.
    held: list[HeldChangeset]


ToSupervisor = ChangesetAsked | ChangesetsOver | WhichChangesets
ToBroker = ChangesetAnswered | ChangesetsHeld

decode_to_supervisor: Final = Decoder(ToSupervisor).decode
decode_to_broker: Final = Decoder(ToBroker).decode
#: What agents see, for the exported schema.
EXPORTED: Final = (OpenChangeset, OpenedChangeset, CommitChangeset, CommittedChangeset)
