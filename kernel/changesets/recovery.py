"""Completing or undoing a commit in whose middle a program was killed; also before a bundle is looked at, since its
files may be half of one.

Source: docs/decisions/067.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from msgspec.structs import replace

from goondan.kernel.changesets.applying import INTENT, Application, Step, begun
from goondan.kernel.changesets.git import References, Store, lent_lock
from goondan.kernel.changesets.records import FOLDER, Record, Records
from goondan.kernel.paths import root_of
from goondan.schemas.changesets import ChangesetSummary, CommittedChangeset
from goondan.schemas.text.times import rfc3339

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
    folder = os.path.join(state_dir, FOLDER)
    give_up = time.monotonic() + PATIENCE_S
    while os.path.lexists(os.path.join(folder, INTENT)):
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
    folder = os.path.join(state_dir, FOLDER)
    intent = begun(folder)
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

    done = Application(folder, root_of(state_dir), store, refs).recover(intent, note)
    log.warning("changeset %s was interrupted: %s", intent.changeset, "completed" if done else "undone")


def note_committed(records: Records, record: Record, parent: str, commit: str, steps: list[Step]) -> CommittedChangeset:
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
