"""What is remembered of changesets, one file each; and a commit in whose middle a program was killed: it is completed
or undone, also before a bundle is looked at, since its files may be half of one.

Source: docs/decisions/067; docs/changesets.md.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.features.changesets.bundle import applying, entries
from goondan.features.changesets.bundle.git import References, Store, io_error, lent_lock
from goondan.features.changesets.wire import ID_DIGITS, ChangesetSummary, CommittedChangeset
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.paths import root_of
from goondan.schemas.system.directories import replace_file
from goondan.schemas.text.times import rfc3339

RECORDS: Final = "records"
WORKTREES: Final = "worktrees"
#: Of a record (bytes).
_MAX_RECORD: Final = 1 << 20
#: Commits that are remembered; the repository has all of them.
MAX_COMMITTED: Final = 1000


class Record(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """One changeset."""

    #: Names it.
    changeset_id: str
    #: Whether it can still be committed.
    state: Literal["open", "committed"]
    #: The agent that opened it.
    agent: str
    #: Its instance.
    instance_key: str
    #: The event whose turn has it. "": it is an operator's.
    event_id: str
    #: The question that it answers. "": it is an operator's.
    request: str
    #: Why it was opened, in the words of whoever opened it.
    reason: str
    #: The commit that it began with.
    base: str
    #: When it was opened: RFC 3339.
    opened_at: str
    #: Where the repository keeps what it knows of the worktree.
    admin_dir: str = ""
    #: The commit that its own commit was made on.
    parent: str = ""
    #: Its own commit.
    commit: str = ""
    #: When it ended: RFC 3339.
    ended_at: str = ""
    #: How the commit ended.
    result: CommittedChangeset | None = None
    #: The changeset that this one takes back.
    reverts: str = ""


class Records:
    """The records in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, RECORDS)

    def all(self) -> list[Record]:
        """All of them, the latest first. What cannot be read is left out."""
        found = []
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                record = self.get(name.removesuffix(".json")) if name.endswith(".json") else None
                if record is not None:
                    found.append(record)
        return sorted(
            found, key=lambda record: (record.ended_at or record.opened_at, record.changeset_id), reverse=True
        )

    def get(self, changeset_id: str) -> Record | None:
        """One of them; None when there is none."""
        if not is_id(changeset_id):
            return None
        try:
            return msgspec.json.decode(read_file(self._path(changeset_id), _MAX_RECORD), type=Record)
        except (Unreadable, msgspec.DecodeError):
            return None

    def put(self, record: Record) -> None:
        """Remember it, durably. Raises GoondanError E_CHANGESET_IO."""
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            replace_file(self._path(record.changeset_id), msgspec.json.encode(record), sync=True)
        except OSError as error:
            raise io_error(f"{self._folder}: {error.strerror}") from None
        if record.state == "committed":
            for old in [one for one in self.all() if one.state == "committed"][MAX_COMMITTED:]:
                self.remove(old.changeset_id)

    def remove(self, changeset_id: str) -> None:
        """Forget it."""
        with suppress(OSError):
            os.unlink(self._path(changeset_id))

    def _path(self, changeset_id: str) -> str:
        return os.path.join(self._folder, f"{changeset_id}.json")


def is_id(text: str) -> bool:
    """Whether it is the form of a changeset's id."""
    return len(text) == ID_DIGITS and all(c in "0123456789abcdef" for c in text)


LOCK: Final = "lock"
#: Where our own repository is, in the changesets' folder.
PRIVATE: Final = "private"
#: How long to wait for another process that is in a commit, before the bundle is read as it is (seconds). A commit
#: takes a fifth of a second. A kernel never reads the bundle between the steps of its own commits.
PATIENCE_S: Final = 2.0
#: Between two tries for the lock (seconds).
_PAUSE_S: Final = 0.02

log = logging.getLogger("changesets")


def settle(state_dir: str) -> None:
    """Complete or undo what a program that is gone had begun. Raises GoondanError E_CHANGESET_IO."""
    folder = os.path.join(state_dir, entries.FOLDER)
    give_up = time.monotonic() + PATIENCE_S
    while os.path.lexists(os.path.join(folder, entries.INTENT)):
        with locked(folder, wait=False) as alone:
            if alone:
                finish(state_dir)
                return
        if _holder(folder) == os.getpid():  # we are in the middle of it, and look at what will be
            return
        if time.monotonic() > give_up:
            return
        time.sleep(_PAUSE_S)


def finish(state_dir: str) -> None:
    """The same, for whoever has the lock."""
    folder = os.path.join(state_dir, entries.FOLDER)
    intent = applying.begun(folder)
    if intent is None:
        return
    records = Records(folder)
    refs = References(intent.git_dir)
    layout = refs.layout()
    store = Store(os.path.join(folder, PRIVATE), layout.objects, layout.object_format)

    def note() -> None:
        record = records.get(intent.changeset)
        if record is not None and record.state == "open":
            note_committed(records, record, intent.old, intent.new, intent.steps)

    done = applying.Application(folder, root_of(state_dir), store, refs).recover(intent, note)
    log.warning("changeset %s was interrupted: %s", intent.changeset, "completed" if done else "undone")


def note_committed(
    records: Records, record: Record, parent: str, commit: str, steps: list[applying.Step]
) -> CommittedChangeset:
    """Remember that a changeset is committed; its answer. One that is known as committed keeps its answer."""
    known = records.get(record.changeset_id)
    if known is not None and known.result is not None:
        return known.result
    summary = ChangesetSummary(
        files_changed=[step.path for step in steps if step.before is not None and step.after is not None],
        files_added=[step.path for step in steps if step.before is None],
        files_deleted=[step.path for step in steps if step.after is None],
    )
    result = CommittedChangeset(
        status="ok",
        changeset_id=record.changeset_id,
        base_ref=f"git:{record.base}",
        new_ref=f"git:{commit}",
        summary=summary,
    )
    ended = rfc3339(time.time())
    records.put(replace(record, state="committed", parent=parent, commit=commit, result=result, ended_at=ended))
    return result


def _holder(folder: str) -> int:
    """The process that took the lock last."""
    try:
        with open(os.path.join(folder, LOCK), "rb") as source:
            return int(source.read(20) or b"0")
    except (OSError, ValueError):
        return 0


@contextmanager
def locked(folder: str, *, wait: bool) -> Iterator[bool]:
    """Alone with the changesets in `folder`; without `wait`, whether nobody else is."""
    os.makedirs(folder, 0o700, exist_ok=True)
    lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        os.pwrite(lock, b"%-20d" % os.getpid(), 0)
        lent = lent_lock.set(lock)
        try:
            yield True
        finally:
            lent_lock.reset(lent)
    finally:
        os.close(lock)
