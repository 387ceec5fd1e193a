"""Payloads about changesets, between agents and the kernel, and between the broker and its supervisor.

Source: requirements BUNDLE-02 to BUNDLE-07; docs/changesets.md.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final, Literal

from msgspec import Struct

from schemas.frames import ErrorPayload

#: Of a reason and of a message (characters); more is cut.
MAX_REASON: Final = 500
MAX_MESSAGE: Final = 10_000
#: Hexadecimal digits of a changeset's id.
ID_DIGITS: Final = 16


class OpenChangeset(Struct, frozen=True, omit_defaults=True):
    """Payload of `changeset.open`. `reason`: for whoever reads the list of changesets."""

    reason: str = ""


class ChangesetHint(Struct, frozen=True, rename="camel"):
    """Where to look in a worktree: the bundle's folder in it ("." for its top), and the files that the bundle consists
    of, by their paths in the worktree.
    """

    bundle_root_in_workdir: str
    recommended_files: list[str]


class OpenedChangeset(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `reply` to `changeset.open` (BUNDLE-03). `base_ref` is `git:` and the commit that it began with, `workdir`
    the worktree's absolute path.
    """

    changeset_id: str
    base_ref: str
    workdir: str
    hint: ChangesetHint | None = None


class CommitChangeset(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `changeset.commit`. Without a `message` the commit's is the changeset's reason."""

    changeset_id: str
    message: str = ""


class ChangesetSummary(Struct, frozen=True, rename="camel"):
    """The files of a commit, by their paths in the repository, in order (BUNDLE-06)."""

    files_changed: list[str]
    files_added: list[str]
    files_deleted: list[str]


class ChangesetError(Struct, frozen=True):
    """Why a changeset did not become a commit (BUNDLE-07)."""

    code: str
    message: str


class CommittedChangeset(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `changeset.commit` (BUNDLE-05). `new_ref` only with `ok`, `error` only without."""

    status: Literal["ok", "rejected", "failed"]
    changeset_id: str
    base_ref: str
    new_ref: str | None = None
    summary: ChangesetSummary | None = None
    error: ChangesetError | None = None


class ChangesetWish(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What an agent asks for, as the broker knows it: who asks, in which event, and one of the two. `request` names the
    question: asked again, it is the same one.
    """

    request: str
    agent: str
    instance_key: str
    event_id: str
    open: OpenChangeset | None = None
    commit: CommitChangeset | None = None


class ChangesetDone(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The answer to a ChangesetWish: one of the three."""

    request: str
    opened: OpenedChangeset | None = None
    committed: CommittedChangeset | None = None
    error: ErrorPayload | None = None


class HeldChangeset(Struct, frozen=True, rename="camel"):
    """A worktree that is there, and the event whose turn may go on with it."""

    changeset_id: str
    event_id: str
