"""Opening and committing the changesets of one bundle, and taking commits back. One process works here at a time: it
holds the lock of the changesets' folder.

Everything that it does can be killed at any point. The next process completes or undoes what is half done
(`Engine.recover`). A question that is asked again is answered from the record.

Source: docs/decisions/067; requirements BUNDLE-02 to BUNDLE-08.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from goondan.features.changesets import wire
from goondan.features.changesets.bundle.applying import Application, Intent, Step
from goondan.features.changesets.bundle.entries import (
    FOLDER,
    LINK,
    REGULAR,
    SUBMODULE,
    TreeEntry,
    is_same,
    within_prefix,
)
from goondan.features.changesets.bundle.git import Author, Store, io_error
from goondan.features.changesets.bundle.recovery import PRIVATE, WORKTREES, Record, Records, finish, note_committed
from goondan.features.changesets.bundle.repository import Head, Repository, conflict, named
from goondan.features.changesets.process.proposed import Proposed, bundle_files, check, denied, invalid, read_worktree
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.grants.powers import Power
from goondan.kernel.paths import root_of
from goondan.kernel.supervisor.options import Options
from goondan.schemas.system.directories import remove_tree
from goondan.schemas.text import times, visible
from goondan.schemas.wire import errors, frames

#: Worktrees of one instance, and in all: each is a copy of the repository.
MAX_OPEN_OF_ONE: Final = 8
MAX_OPEN: Final = 64
#: The largest size of a worktree (bytes). A larger repository holds data, which would be copied for each changeset.
MAX_WORKTREE_BYTES: Final = 256 << 20
#: The space that a worktree leaves free on its disk (bytes): a kernel whose disk is full takes no messages.
KEPT_FREE_BYTES: Final = 256 << 20
#: Files that the hint names.
MAX_HINTED: Final = 100

log = logging.getLogger("changesets")

#: Looks at the bundle as it stands in the checkout; raises GoondanError when it may not run.
Look = Callable[[], None]


class Engine:
    """The changesets of the bundle that `options` name. `powers` are those that were agreed to."""

    def __init__(self, options: Options, powers: list[Power]) -> None:
        self._options = options
        self._powers = powers
        self.folder = os.path.join(options.state_dir, FOLDER)
        self.records = Records(self.folder)

    # --- what is asked

    def open(self, wish: wire.ChangesetWish, reason: str) -> wire.OpenedChangeset:
        """A new worktree of the commit that is checked out. Raises GoondanError E_CHANGESET_IO, E_CHANGESET_CONFLICT.

        The same request is answered with the same worktree.
        """
        known = self.records.all()
        for record in known:
            if record.request == wish.request and record.state == "open":
                return self._opened(record)
        held = [record for record in known if record.state == "open"]
        own = [record for record in held if (record.agent, record.instance_key) == (wish.agent, wish.instance_key)]
        if len(own) >= MAX_OPEN_OF_ONE or len(held) >= MAX_OPEN:
            message = f"{len(own)} changesets of this instance are open, {len(held)} in all"
            raise io_error(message, "Commit one of them, or end the turn.")
        repository = self._repository()
        head = repository.head()
        changeset_id = os.urandom(wire.ID_DIGITS // 2).hex()
        record = Record(
            changeset_id=changeset_id,
            state="open",
            agent=wish.agent,
            instance_key=wish.instance_key,
            event_id=wish.event_id,
            request=wish.request,
            reason=visible.visible_line(reason[: wire.MAX_REASON]),
            base=head.commit,
            opened_at=times.rfc3339(time.time()),
            admin_dir=repository.admin_dir(changeset_id),
        )
        files = repository.store.files(head.commit)
        size = sum(entry.size for entry in files.values() if entry.size > 0)
        if size > MAX_WORKTREE_BYTES:
            raise io_error(f"the repository has over {MAX_WORKTREE_BYTES >> 20} MiB; a bundle needs one of its own")
        _check_room(self.folder, size)
        # First, so that what follows is found and removed if this is killed.
        self.records.put(replace(record, request=""))
        try:
            self._make_worktree(repository, record, files)
            self.records.put(record)
        except BaseException:
            self.remove([changeset_id])
            raise
        return self._opened(record, repository)

    def commit(
        self, changeset_id: str, message: str, *, agent: str, instance_key: str, look: Look
    ) -> wire.CommittedChangeset:
        """Make a commit of a worktree's files, and check it out. The answer says what went wrong."""
        record = self.records.get(changeset_id)
        if record is None or (record.agent, record.instance_key) != (agent, instance_key):
            error = wire.ChangesetError("E_CHANGESET_IO", f"this instance has no changeset {changeset_id[:40]!r}")
            return wire.CommittedChangeset(status="failed", changeset_id=changeset_id[:40], base_ref="", error=error)
        if record.result is not None:
            return record.result
        base_ref = f"git:{record.base}"
        try:
            return self._commit(record, message, look)
        except errors.GoondanError as error:
            log.info("changeset %s of %s: %s", changeset_id, agent, visible.visible_line(str(error)))
            return not_committed(changeset_id, base_ref, error.info)
        except OSError as error:
            message = f"{error.filename or 'the worktree'}: {error.strerror}"
            return not_committed(changeset_id, base_ref, io_error(message).info)

    def revert(self, changeset_id: str, look: Look) -> wire.CommittedChangeset:
        """Take back what a changeset has changed, as a new commit. Only the operator does this, so the rules for
        changesets are not checked again. Raises GoondanError.
        """
        record = self.records.get(changeset_id)
        if record is None or record.state != "committed" or not record.commit:
            raise errors.fail("E_USAGE", f"there is no committed changeset {changeset_id[:40]!r}")
        repository = self._repository()
        head = repository.head()
        files = repository.store.files(head.commit)
        before, after = repository.store.files(record.parent), repository.store.files(record.commit)
        wanted: dict[str, TreeEntry | None] = {}
        for path in before.keys() | after.keys():
            if before.get(path) != after.get(path):
                wanted[path] = before.get(path)
        changes = self._merged(repository.store, after, files, self._contents(repository.store, wanted))
        self._committed_only(repository, head, files)
        if not changes:
            raise conflict(f"nothing of changeset {changeset_id} is left to be taken back")
        made = Record(
            changeset_id=os.urandom(wire.ID_DIGITS // 2).hex(),
            state="open",
            agent="",
            instance_key="",
            event_id="",
            request="",
            reason=f"revert of changeset {changeset_id}",
            base=head.commit,
            opened_at=times.rfc3339(time.time()),
            reverts=changeset_id,
        )
        text = f"Revert changeset {changeset_id}\n\nThis takes back commit {record.commit}."
        return self._make_commit(repository, made, head, files, changes, text, look)

    def look(self) -> None:
        """Check the bundle as it is in the checkout. Raises GoondanError E_CHANGESET_INVALID."""
        found = inspect_bundle(self._options.bundle, state_dir=self._options.state_dir, handlers=False)
        if found.errors:
            raise invalid(found)

    def remove(self, changeset_ids: Iterable[str]) -> None:
        """Remove these worktrees, and forget what was not committed."""
        for changeset_id in changeset_ids:
            record = self.records.get(changeset_id)
            if record is None or record.state != "open":
                continue
            self._remove_worktree(record)
            self.records.remove(changeset_id)

    def held(self) -> list[wire.HeldChangeset]:
        """The worktrees that are there, with the events whose turns have them."""
        return [wire.HeldChangeset(one.changeset_id, one.event_id) for one in self.records.all() if one.state == "open"]

    def difference(self, changeset_id: str) -> bytes:
        """What a changeset has changed, or would, as a patch. Raises GoondanError."""
        record = self.records.get(changeset_id)
        if record is None:
            raise errors.fail(
                "E_USAGE", f"there is no changeset {changeset_id[:40]!r}", suggestion="gdn changeset list"
            )
        store = self._repository().store
        if record.state == "committed":
            return store.diff(record.parent, record.commit) if record.commit else b""
        files = store.files(record.base)
        changes = read_worktree(self._worktree(record), files, store)
        return store.diff(record.base, self._tree(store, record.base, changes))

    # --- after a kill

    def recover(self) -> None:
        """Complete or undo the work of a program that was killed, and remove worktrees that have no record.

        Raises GoondanError E_CHANGESET_IO.
        """
        finish(self._options.state_dir)
        known = {record.changeset_id: record for record in self.records.all() if record.state == "open"}
        for record in known.values():
            if not record.request:  # its opening was never answered, or it was to take another one back
                self.remove([record.changeset_id])
        for record in self.records.all():
            if record.state == "committed" and os.path.isdir(record.admin_dir):
                self._remove_worktree(record)
        worktrees = os.path.join(self.folder, WORKTREES)
        for name in os.listdir(worktrees) if os.path.isdir(worktrees) else []:
            if name not in known:
                remove_tree(os.path.join(worktrees, name))

    # --- inside

    def _repository(self) -> Repository:
        bundle = self._options.bundle
        repository = Repository(bundle if os.path.isdir(bundle) else os.path.dirname(bundle), self._private())
        if within_prefix(os.path.realpath(self._options.state_dir), repository.top):
            message = f"the state directory {self._options.state_dir} lies in the bundle's repository"
            raise io_error(message, "Set GOONDAN_STATE_ROOT to a folder outside of it.")
        return repository

    def _private(self) -> str:
        """Where our own repository is, which has nothing but a configuration."""
        os.makedirs(self.folder, 0o700, exist_ok=True)
        return os.path.join(self.folder, PRIVATE)

    def _worktree(self, record: Record) -> str:
        return os.path.join(self.folder, WORKTREES, record.changeset_id)

    def _opened(self, record: Record, repository: Repository | None = None) -> wire.OpenedChangeset:
        repository = repository or self._repository()
        hinted = bundle_files(self._options, repository)[:MAX_HINTED]
        hint = wire.ChangesetHint(repository.prefix or ".", hinted)
        return wire.OpenedChangeset(record.changeset_id, f"git:{record.base}", self._worktree(record), hint)

    def _make_worktree(self, repository: Repository, record: Record, files: Mapping[str, TreeEntry]) -> None:
        """Register it, and write its files ourselves: git would run the filters of the repository."""
        worktree = self._worktree(record)
        os.makedirs(os.path.dirname(worktree), 0o700, exist_ok=True)
        repository.refs.add_worktree(worktree, record.base)
        if not os.path.isdir(record.admin_dir):
            raise io_error(f"the worktree is not known as {record.admin_dir}")
        repository.store.fill_index(os.path.join(record.admin_dir, "index"), record.base)
        os.chmod(worktree, 0o700)
        places: dict[str, list[str]] = {}
        for path, entry in files.items():
            place = os.path.join(worktree, path)
            if entry.mode == SUBMODULE:
                os.makedirs(place, 0o700, exist_ok=True)
                continue
            if any(part in ("", ".", "..", ".git") for part in path.split("/")):
                raise io_error(f"the repository has a file of a name that is none: {path!r}")
            places.setdefault(entry.oid, []).append(path)

        def write(oid: str, data: bytes) -> None:
            for path in places[oid]:
                place = os.path.join(worktree, path)
                os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
                mode = files[path].mode
                if mode == LINK:
                    os.symlink(os.fsdecode(data), place)
                    continue
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(place, flags, 0o600 if mode == REGULAR else 0o700), "wb") as out:
                    out.write(data)

        repository.store.blobs(places, write)

    def _remove_worktree(self, record: Record) -> None:
        remove_tree(self._worktree(record))
        admin = record.admin_dir
        # The repository's own record of it: only where it is still about this worktree.
        if os.path.basename(admin) == record.changeset_id and os.path.basename(os.path.dirname(admin)) == "worktrees":
            remove_tree(admin)
            with suppress(OSError):  # as git does with its last one
                os.rmdir(os.path.dirname(admin))

    def _commit(self, record: Record, message: str, look: Look) -> wire.CommittedChangeset:
        repository = self._repository()
        store, head = repository.store, repository.head()
        base = store.files(record.base)
        changes = read_worktree(self._worktree(record), base, store)
        files = base
        if head.commit != record.base:
            files = store.files(head.commit)
            changes = self._merged(store, base, files, changes)
        if not changes:
            return self._committed(record, head.commit, head.commit, [])
        self._committed_only(repository, head, files)
        check(self._options, self._powers, repository, files, changes)
        about = f"Changeset-Id: {record.changeset_id}\nChangeset-By: {record.agent} {record.instance_key}"
        text = f"{_message(message) or record.reason or 'Change the bundle'}\n\n{about}\n"
        return self._make_commit(repository, record, head, files, changes, text, look)

    def _committed_only(self, repository: Repository, head: Head, files: Mapping[str, TreeEntry]) -> None:
        """Raises GoondanError E_CHANGESET_CONFLICT while a person's own work is in the checkout."""
        dirty = repository.uncommitted(head.commit, files)
        if dirty:
            raise conflict(f"tracked files have changes that are not committed: {named(dirty)}")

    def _merged(
        self,
        store: Store,
        base: Mapping[str, TreeEntry],
        head: Mapping[str, TreeEntry],
        changes: Mapping[str, Proposed | None],
    ) -> dict[str, Proposed | None]:
        """The changes to make to `head`, when `changes` were made from `base`. Raises E_CHANGESET_CONFLICT."""
        merged: dict[str, Proposed | None] = {}
        odd = []
        for path, ours in changes.items():
            was, now = base.get(path), head.get(path)
            if is_same(was, now):
                merged[path] = ours
            elif _is(store, ours, now):
                continue  # somebody else has made the same change
            elif ours is None or was is None or now is None or {was.mode, now.mode, ours.mode} != {REGULAR}:
                odd.append(path)
            else:
                text = store.merge_file(ours.data, store.blob(was.oid), store.blob(now.oid), self.folder)
                if text is None:
                    odd.append(path)
                elif store.oid_of(text) != now.oid:
                    merged[path] = Proposed(REGULAR, text)
        if odd:
            message = f"the bundle has changed since the changeset was opened, in the same places: {named(odd)}"
            raise conflict(message, "Open a new changeset and make the change there.")
        return merged

    def _make_commit(
        self,
        repository: Repository,
        record: Record,
        head: Head,
        files: Mapping[str, TreeEntry],
        changes: Mapping[str, Proposed | None],
        text: str,
        look: Look,
    ) -> wire.CommittedChangeset:
        store = repository.store
        entries = self._stored(store, changes)
        tree = store.write_tree(head.commit, entries, os.path.join(self.folder, "tree"))
        name = f"Agent/{record.agent}" if record.agent else "Goondan operator"
        commit = store.commit(tree, head.commit, text, Author(name, f"{record.agent or 'operator'}@goondan.invalid"))
        intent = Intent(
            changeset=record.changeset_id,
            top=repository.top,
            git_dir=repository.git_dir,
            index=repository.index,
            ref=head.ref,
            old=head.commit,
            new=commit,
            steps=[Step(path, files.get(path), entry) for path, entry in sorted(entries.items())],
            lock=(0, 0),
            umask=self._options.umask,
        )
        if record.reverts:
            self.records.put(record)
        try:
            root = root_of(self._options.state_dir)
            Application(self.folder, root, store, repository.refs).apply(
                repository,
                intent,
                look,
                lambda: note_committed(self.records, record, intent.old, intent.new, intent.steps),
            )
        except errors.GoondanError:
            if record.reverts:
                self.records.remove(record.changeset_id)
            raise
        return self._committed(record, head.commit, commit, intent.steps)

    def _committed(self, record: Record, parent: str, commit: str, steps: list[Step]) -> wire.CommittedChangeset:
        """It is done: its answer."""
        result = note_committed(self.records, record, parent, commit, steps)
        self._remove_worktree(record)
        return result

    def _stored(self, store: Store, changes: Mapping[str, Proposed | None]) -> dict[str, TreeEntry | None]:
        return {
            path: None
            if proposed is None
            else TreeEntry(proposed.mode, store.write_blob(proposed.data), len(proposed.data))
            for path, proposed in changes.items()
        }

    def _tree(self, store: Store, base: str, changes: Mapping[str, Proposed | None]) -> str:
        return store.write_tree(base, self._stored(store, changes), os.path.join(self.folder, "tree"))

    def _contents(self, store: Store, entries: Mapping[str, TreeEntry | None]) -> dict[str, Proposed | None]:
        odd = [path for path, entry in entries.items() if entry is not None and entry.mode in (LINK, SUBMODULE)]
        if odd:
            raise denied(f"no ordinary files: {named(odd)}")
        return {
            path: None if entry is None else Proposed(entry.mode, store.blob(entry.oid))
            for path, entry in entries.items()
        }


def not_committed(changeset_id: str, base_ref: str, error: frames.ErrorPayload) -> wire.CommittedChangeset:
    """The answer for what did not become a commit."""
    failed = error.code not in ("E_CHANGESET_INVALID", "E_CHANGESET_DENIED", "E_CHANGESET_CONFLICT")
    text = error.message if not error.suggestion else f"{error.message} {error.suggestion}"
    code = "E_CHANGESET_IO" if failed else error.code
    return wire.CommittedChangeset(
        status="failed" if failed else "rejected",
        changeset_id=changeset_id,
        base_ref=base_ref,
        error=wire.ChangesetError(code, text),
    )


def _check_room(folder: str, size: int) -> None:
    """Raises GoondanError E_CHANGESET_IO when a disk has no room for so many bytes."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < size + KEPT_FREE_BYTES:
        raise io_error(f"the disk of {folder} has no room for a worktree of {size >> 20} MiB")


def _message(text: str) -> str:
    kept = "".join(c for c in text[: wire.MAX_MESSAGE] if c in "\n\t" or c.isprintable())
    return kept.encode("utf-8", "replace").decode().strip()


def _is(store: Store, proposed: Proposed | None, entry: TreeEntry | None) -> bool:
    if proposed is None or entry is None:
        return proposed is None and entry is None
    return proposed.mode == entry.mode and store.oid_of(proposed.data) == entry.oid
