"""Checks a commit out: files, branch and index, or none of them.

This is the order. The index is locked, so that no git command of the user comes between. The intent is written to
`intent.json`. The files are changed, each as a whole, without following a link on the way to it. The bundle is checked
as it is then. The branch is moved, which is the decision. The index follows. A process that finds an intent whose own
process is gone completes it when the branch was moved, and else undoes it. A file that is neither as before nor as
after is somebody's own work, and stays.

Source: docs/decisions/067.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec
from msgspec import Struct

from goondan.features.changesets.bundle.entries import EXECUTABLE, INTENT, REGULAR, TreeEntry, is_same
from goondan.features.changesets.bundle.git import References, Store, clear_index, io_error
from goondan.features.changesets.bundle.repository import Repository, conflict, named
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.trust.written import find_written, pin
from goondan.schemas.system.directories import replace_file
from goondan.schemas.wire.errors import GoondanError

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: The largest file that is compared (bytes): no changeset writes a larger one.
_MAX_FILE: Final = 2 << 20
#: An entry that no changeset has put there: no file of a changeset could have its mode.
NO_FILE: Final = ("", b"")
_NO_FILE_ERRORS: Final = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class Checkout:
    """The files below `top`. `mark` is in the names of what is left when this is killed; `umask` is the user's."""

    def __init__(self, top: str, mark: str, umask: int = 0o022) -> None:
        self._top = top
        self._temporary = f".goondan-{mark}.new"
        self._umask = umask

    def read(self, path: str) -> tuple[str, bytes] | None:
        """Mode and content of a file; None where none is, NO_FILE where a person has something else: a folder, a link,
        a file on the way. Raises GoondanError E_CHANGESET_IO.
        """
        with self._named(path):
            try:
                with self._folder(path) as (folder, name):
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno in _NO_FILE_ERRORS:
                    return NO_FILE
                raise
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode) or state.st_size > _MAX_FILE:
                os.close(file)
                return NO_FILE
            with open(file, "rb") as source:
                return EXECUTABLE if state.st_mode & stat.S_IXUSR else REGULAR, source.read(_MAX_FILE + 1)

    def write(self, path: str, data: bytes) -> None:
        """Put a content in the place of a file, durably; folders on the way are made. Raises E_CHANGESET_IO."""
        with self._named(path), self._folder(path, make=True) as (folder, name):
            permissions = 0o666 & ~self._umask
            with suppress(FileNotFoundError):
                permissions = stat.S_IMODE(os.lstat(name, dir_fd=folder).st_mode) & 0o777
            with suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(self._temporary, flags, 0o600, dir_fd=folder), "wb") as out:
                out.write(data)
                out.flush()
                os.fchmod(out.fileno(), permissions)
                os.fsync(out.fileno())
            os.rename(self._temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def remove(self, path: str) -> None:
        """Remove a file, and the folders that are empty then. Raises GoondanError E_CHANGESET_IO."""
        with self._named(path):
            try:
                with self._folder(path) as (folder, name):
                    os.unlink(name, dir_fd=folder)
                    os.fsync(folder)
            except FileNotFoundError:
                return
            here = os.path.dirname(path)
            while here:
                try:
                    with self._folder(here) as (folder, name):
                        os.rmdir(name, dir_fd=folder)
                except OSError:
                    return
                here = os.path.dirname(here)

    def clean(self, path: str) -> None:
        """Remove what was left beside a file by a program that was killed."""
        with suppress(OSError), self._folder(path) as (folder, _):
            os.unlink(self._temporary, dir_fd=folder)

    @contextmanager
    def _folder(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of a path, opened step by step, and the path's name in it. Raises OSError."""
        *parts, name = path.split("/")
        here = os.open(self._top, _FOLDER)
        try:
            for part in parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o777 & ~self._umask, dir_fd=here)
                inside = os.open(part, _FOLDER, dir_fd=here)
                os.close(here)
                here = inside
            yield here, name
        finally:
            os.close(here)

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise io_error(f"{self._top}/{path}: {error.strerror}") from None


#: Of an intent (bytes).
_MAX_INTENT: Final = 4 << 20


class Step(Struct, frozen=True):
    """The change of one file."""

    #: Its path in the repository.
    path: str
    #: The file before. None: it did not exist.
    before: TreeEntry | None
    #: The file after. None: it no longer exists.
    after: TreeEntry | None


class Intent(Struct, frozen=True, kw_only=True):
    """A change that is going to be made."""

    #: The changeset.
    changeset: str
    #: The folder of the checkout.
    top: str
    #: The folder of its repository.
    git_dir: str
    #: The index of the checkout.
    index: str
    #: The reference that moves.
    ref: str
    #: The commit that it moves from.
    old: str
    #: The commit that it moves to.
    new: str
    #: The changes of files.
    steps: list[Step]
    #: Device and inode of our lock of the index.
    lock: tuple[int, int]
    #: The umask with which files are made.
    umask: int


class Application:
    """Applies commits of one repository. `folder` is the changesets' own, `state_root` the state root."""

    def __init__(self, folder: str, state_root: str, store: Store, refs: References) -> None:
        self._intent = os.path.join(folder, INTENT)
        self._index = os.path.join(folder, "index")
        self._state_root = state_root
        self._store = store
        self._refs = refs

    def apply(
        self,
        repository: Repository,
        intent: Intent,
        check: Callable[[], None],
        note: Callable[[], object],
    ) -> None:
        """Carry it out. `check` checks the bundle when its files are in place. An error from it undoes everything.
        `note` records that it is done.

        Raises GoondanError E_CHANGESET_CONFLICT, E_CHANGESET_IO, and what `check` raises.
        """
        self._remember(intent)  # so that a lock without a number is found and removed
        try:
            with self._new_lock(intent) as (intent, lock):
                self._remember(intent)
                try:
                    _take(intent)
                    self._still(repository, intent)
                    self._new_index(intent, all_steps=True)
                    self._write(intent)
                    check()
                    self._refs.move(intent.ref, intent.new, intent.old, f"changeset {intent.changeset}")
                except GoondanError:
                    # A branch that did move is not told from the error alone.
                    if self._refs.commit_of(intent.ref) != intent.new:
                        self.undo(intent)
                        raise
                self._put_index(intent, lock)
                note()
                self._forget()
        except OSError as error:
            raise io_error(f"{error.filename or intent.top}: {error.strerror}") from None

    def recover(self, intent: Intent, note: Callable[[], object]) -> bool:
        """Undo or complete it; whether it was completed, and `note` called. Raises GoondanError E_CHANGESET_IO."""
        now = self._refs.commit_of(intent.ref)
        self._unlock(intent)
        if now is None or not self._store.has_ancestor(now, intent.new):
            self.undo(intent)
            return False
        self._write(intent)
        try:
            with self._new_lock(intent) as (intent, lock):
                _take(intent)
                self._new_index(intent, all_steps=False)
                self._put_index(intent, lock)
        except GoondanError as error:
            if error.info.code != "E_CHANGESET_CONFLICT":
                raise
            # Somebody works in the repository: its status shows them what the index lacks.
        note()
        self._forget()
        return True

    def undo(self, intent: Intent) -> None:
        """Put the files back."""
        checkout = Checkout(intent.top, intent.changeset, intent.umask)
        pins: dict[str, str | None] = {}
        for step in intent.steps:
            checkout.clean(step.path)
            if self._is(checkout, step.path, step.after):
                if step.before is None:
                    checkout.remove(step.path)
                    pins[os.path.join(intent.top, step.path)] = None
                else:
                    data = self._store.blob(step.before.oid)
                    checkout.write(step.path, data)
                    pins[os.path.join(intent.top, step.path)] = hashlib.sha256(data).hexdigest()
        self._pin(pins)
        self._forget()

    # --- inside

    def _still(self, repository: Repository, intent: Intent) -> None:
        """Raises GoondanError E_CHANGESET_CONFLICT unless everything is as it was when the commit was made."""
        head = repository.head()
        if (head.ref, head.commit) != (intent.ref, intent.old):
            raise conflict("the branch has moved while the changeset was committed", "Commit it again.")
        checkout = Checkout(intent.top, intent.changeset)
        odd = [step.path for step in intent.steps if not self._is(checkout, step.path, step.before)]
        if odd:
            raise conflict(f"the checkout does not have these as they are in the commit: {named(odd)}")

    def _is(self, checkout: Checkout, path: str, entry: TreeEntry | None) -> bool:
        found = checkout.read(path)
        if found is None or entry is None:
            return found is None and entry is None
        return found[0] == entry.mode and self._store.oid_of(found[1]) == entry.oid

    def _write(self, intent: Intent) -> None:
        """Bring the files that are as before to what they become."""
        checkout = Checkout(intent.top, intent.changeset, intent.umask)
        pins: dict[str, str | None] = {}
        for step in intent.steps:
            checkout.clean(step.path)
            place = os.path.join(intent.top, step.path)
            if self._is(checkout, step.path, step.before):
                if step.after is None:
                    checkout.remove(step.path)
                else:
                    checkout.write(step.path, self._store.blob(step.after.oid))
            elif not self._is(checkout, step.path, step.after):
                continue
            pins[place] = None if step.after is None else hashlib.sha256(self._store.blob(step.after.oid)).hexdigest()
        self._pin(pins)

    def _pin(self, digests: dict[str, str | None]) -> None:
        """Files that we have written where jails can write are ours with just these bytes.

        Source: docs/design/sandbox.md section 2.
        """
        doubted = {file.path for file in find_written(digests, self._state_root, accepted=True)}
        wanted = {path: digest for path, digest in digests.items() if digest is None or path in doubted}
        if wanted:
            pin(wanted, self._state_root)

    def _new_index(self, intent: Intent, *, all_steps: bool) -> None:
        """The index that follows, in a file of our own; without `all_steps` only what is as before is changed."""
        clear_index(self._index)
        if os.path.exists(intent.index):
            with open(intent.index, "rb") as source, open(self._index, "wb") as out:
                out.write(source.read())
        else:
            self._store.fill_index(self._index, intent.old)
        steps = intent.steps
        if not all_steps:
            now = self._store.index_entries(self._index)
            steps = [step for step in steps if is_same(now.get(step.path), step.before)]
        self._store.change_index(self._index, {step.path: step.after for step in steps})

    def _put_index(self, intent: Intent, lock: int) -> None:
        with open(self._index, "rb") as source:
            data = source.read()
        os.ftruncate(lock, 0)
        at = 0
        while at < len(data):
            at += os.pwrite(lock, data[at:], at)
        os.fchmod(lock, 0o644 if not os.path.exists(intent.index) else os.stat(intent.index).st_mode & 0o777)
        os.fsync(lock)
        os.rename(intent.index + ".lock", intent.index)
        os.unlink(self._index)

    @contextmanager
    def _new_lock(self, intent: Intent) -> Iterator[tuple[Intent, int]]:
        """Make the file that becomes the lock of the index: the intent with its number, and its descriptor. Both are
        removed afterwards. A file that a killed program has left there is removed first.
        """
        path = _beside(intent)
        with suppress(OSError):
            os.unlink(path)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise io_error(f"{path}: {error.strerror}") from None
        try:
            state = os.fstat(lock)
            intent = msgspec.structs.replace(intent, lock=(state.st_dev, state.st_ino))
            yield intent, lock
        finally:
            os.close(lock)
            self._unlock(intent)

    def _unlock(self, intent: Intent) -> None:
        """Remove the lock of the index, if it is ours."""
        with suppress(OSError):
            os.unlink(_beside(intent))
        with suppress(OSError):
            state = os.lstat(intent.index + ".lock")
            if (state.st_dev, state.st_ino) == tuple(intent.lock):
                os.unlink(intent.index + ".lock")

    def _remember(self, intent: Intent) -> None:
        try:
            replace_file(self._intent, msgspec.json.encode(intent), sync=True)
        except OSError as error:
            raise io_error(f"{self._intent}: {error.strerror}") from None

    def _forget(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._intent)


def begun(folder: str) -> Intent | None:
    """The intent of a program that was killed. Raises GoondanError E_CHANGESET_IO for what cannot be read."""
    path = os.path.join(folder, INTENT)
    if not os.path.lexists(path):
        return None
    try:
        return msgspec.json.decode(read_file(path, _MAX_INTENT), type=Intent)
    except (Unreadable, msgspec.DecodeError) as error:
        raise io_error(f"{path} cannot be read: {error}") from None


def _beside(intent: Intent) -> str:
    return f"{intent.index}.goondan-{intent.changeset}"


def _take(intent: Intent) -> None:
    """Lock the index as git does, with a file whose inode number is known already. Raises E_CHANGESET_CONFLICT."""
    beside, index = _beside(intent), intent.index
    try:
        os.link(beside, index + ".lock")
    except FileExistsError:
        message = f"another git command works in the repository ({index}.lock)"
        raise conflict(message, "Wait for it, and commit the changeset again; remove the file if none runs.") from None
    except OSError as error:
        raise io_error(f"{index}.lock: {error.strerror}") from None
    os.unlink(beside)
