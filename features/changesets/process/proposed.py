"""A changeset seen as a change of the bundle: the files of its worktree, compared with the commit that it began with;
what it may change; and whether the bundle may run with it.

The worktree is not trusted. It is read through descriptors, from its top, without following any link, and everything
once: what was read is what is judged and committed, whatever happens to the folder meanwhile. Its `.git` is never
looked at.

Source: docs/decisions/067.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from goondan.features.changesets.bundle.entries import EXECUTABLE, LINK, REGULAR, SUBMODULE, TreeEntry
from goondan.features.changesets.bundle.git import Store
from goondan.features.changesets.bundle.repository import Repository
from goondan.features.changesets.process import rules
from goondan.kernel.bundle.documents import Loaded, load_documents
from goondan.kernel.bundle.files import NOTHING
from goondan.kernel.bundle.loader import Asking, Inspected, inspect_bundle
from goondan.kernel.bundle.rules import positions, problems
from goondan.kernel.grants.powers import Power, untrusted
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.reader import RevisionRefused
from goondan.schemas.wire.errors import GoondanError, fail

#: Entries that are looked at.
MAX_ENTRIES: Final = 100_000
#: Files that one changeset may change: nobody can read a larger proposal.
MAX_CHANGED: Final = 200
#: Of a changed file, and of all of them together (bytes). Documents may have 1 MiB.
MAX_FILE_BYTES: Final = 1 << 20
MAX_BYTES: Final = 8 << 20
#: What interpreters leave beside modules, and no changeset consists of.
_LEFT_BEHIND: Final = "__pycache__"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Proposed(Struct, frozen=True):
    """A file that a changeset adds or changes."""

    #: Git's mode of the file.
    mode: str
    #: Its content.
    data: bytes


def denied(message: str, suggestion: str | None = None) -> GoondanError:
    """E_CHANGESET_DENIED."""
    return fail("E_CHANGESET_DENIED", message, suggestion=suggestion)


def read_worktree(folder: str, base: Mapping[str, TreeEntry], store: Store) -> dict[str, Proposed | None]:
    """What the worktree at `folder` changes of `base`, by path; None for a file that is gone.

    Raises GoondanError E_CHANGESET_DENIED for what may be in no changeset, E_CHANGESET_IO.
    """
    return _Reading(folder, base, store).changes


class _Reading:
    def __init__(self, folder: str, base: Mapping[str, TreeEntry], store: Store) -> None:
        self.changes: dict[str, Proposed | None] = {}
        self._base = base
        self._store = store
        self._seen: set[str] = set()
        self._entries = 0
        self._bytes = 0
        try:
            top = os.open(folder, _FOLDER)
            try:
                self._folder(top, "", 0)
            finally:
                os.close(top)
        except OSError as error:
            raise fail("E_CHANGESET_IO", f"the worktree {folder} cannot be read: {error.strerror}") from None
        for path, entry in base.items():
            if path not in self._seen and entry.mode != SUBMODULE and _LEFT_BEHIND not in path.split("/"):
                self._change(path, None)

    def _folder(self, here: int, prefix: str, depth: int) -> None:
        if depth > rules.MAX_DEPTH:
            raise denied(f"{prefix[:100]}… is deeper than {rules.MAX_DEPTH} folders")
        for name in sorted(os.listdir(here)):
            self._entries += 1
            if self._entries > MAX_ENTRIES:
                raise denied(f"the worktree holds more than {MAX_ENTRIES} entries")
            if (not prefix and name == ".git") or name == _LEFT_BEHIND:
                continue
            self._entry(here, name, prefix + name, depth)

    def _entry(self, here: int, name: str, path: str, depth: int) -> None:
        state = os.lstat(name, dir_fd=here)
        known = self._base.get(path)
        if known is not None and known.mode == SUBMODULE:
            if not stat.S_ISDIR(state.st_mode) or not _is_empty(here, name):
                raise denied(f"{_shown(path)} is a submodule, and a changeset may not change it")
        elif stat.S_ISDIR(state.st_mode):
            inside = os.open(name, _FOLDER, dir_fd=here)
            try:
                self._folder(inside, path + "/", depth + 1)
            finally:
                os.close(inside)
        elif stat.S_ISLNK(state.st_mode):
            target = os.fsencode(os.readlink(name, dir_fd=here))
            self._seen.add(path)
            if known is None or known.mode != LINK or self._store.oid_of(target) != known.oid:
                raise denied(f"{_shown(path)} is a link", "Put the file itself there.")
        elif stat.S_ISREG(state.st_mode):
            self._file(here, name, path, known)
        else:
            raise denied(f"{_shown(path)} is neither a file nor a folder")

    def _file(self, here: int, name: str, path: str, known: TreeEntry | None) -> None:
        self._seen.add(path)
        file = os.open(name, _FILE, dir_fd=here)
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode):
                raise denied(f"{_shown(path)} is neither a file nor a folder")
            mode = EXECUTABLE if state.st_mode & stat.S_IXUSR else REGULAR
            if (
                known is not None
                and known.mode == mode
                and known.size == state.st_size
                and self._store.is_content(file, known.size, known.oid)
            ):
                return
            if state.st_nlink > 1:
                raise denied(f"{_shown(path)} has another name (a hard link)", "Put a copy of it in its place.")
            self._change(path, Proposed(mode, self._content(file, path)))
        finally:
            os.close(file)

    def _content(self, file: int, path: str) -> bytes:
        os.lseek(file, 0, os.SEEK_SET)
        parts: list[bytes] = []
        left = MAX_FILE_BYTES + 1
        while left > 0 and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        if left <= 0:
            raise denied(f"{_shown(path)} is larger than {MAX_FILE_BYTES} bytes")
        data = b"".join(parts)
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            raise denied(f"the changed files have more than {MAX_BYTES} bytes together")
        return data

    def _change(self, path: str, proposed: Proposed | None) -> None:
        why = rules.why_refused(path)
        if why is not None:
            raise denied(f"{_shown(path)} may not be in a changeset: {why}")
        self.changes[path] = proposed
        if len(self.changes) > MAX_CHANGED:
            raise denied(f"more than {MAX_CHANGED} files are changed")


def _is_empty(here: int, name: str) -> bool:
    folder = os.open(name, _FOLDER, dir_fd=here)
    try:
        return not os.listdir(folder)
    finally:
        os.close(folder)


def _shown(path: str) -> str:
    return repr(path[:200])


#: Refusals and mistakes that one answer names.
MAX_NAMED: Final = 5


def check(
    options: Options,
    powers: list[Power],
    repository: Repository,
    head: Mapping[str, TreeEntry],
    changes: Mapping[str, Proposed | None],
) -> None:
    """Whether the bundle, as it is checked out (the files of `head`), may become what `changes` make of it. `powers`
    are those that were agreed to.

    Raises GoondanError E_CHANGESET_DENIED and E_CHANGESET_INVALID.
    """
    bundle = options.bundle
    root = bundle if os.path.isdir(bundle) else os.path.dirname(bundle)
    now = inspect_bundle(bundle, state_dir=options.state_dir, handlers=False, policy=options.policy)
    prompts = _prompts(now.loaded)
    places = rules.Places(
        prefix=repository.prefix,
        documents=_below(repository.top, [source.path for source in now.loaded.sources]),
        prompts=_below(repository.top, [os.path.realpath(os.path.join(root, name)) for name in prompts]),
        code=_below(repository.top, _code(now)),
    )
    instead = {
        os.path.join(repository.top, path): None if proposed is None else proposed.data
        for path, proposed in changes.items()
    }
    found = inspect_bundle(
        bundle,
        state_dir=options.state_dir,
        handlers=False,
        policy=options.policy,
        asking=Asking(running=powers),
        instead=instead,
    )
    files = [rules.FileChange(path, _mode(head.get(path)), _mode(proposed)) for path, proposed in changes.items()]
    if found.errors and all(change.after in (None, REGULAR) for change in files):
        raise invalid(found)  # first: whoever may change it, so it is wrong
    _deny(rules.refused_files(files, places))
    _deny(
        f"{path}: it would be the same file as {other} on some systems"
        for path, other in rules.twins([path for path in changes if path not in head], head)
    )
    _deny(rules.refused_documents(_written(now.loaded), _written(found.loaded), prompts))
    if not found.judgement.trusted:
        raise denied(untrusted(found.judgement, bundle, running=True).info.message)


def invalid(found: Inspected) -> GoondanError:
    """E_CHANGESET_INVALID for what is wrong with a bundle."""
    lines = [f"{os.path.relpath(one.file, found.loaded.root)}:{one.line}: {one.message}" for one in found.errors]
    return fail("E_CHANGESET_INVALID", f"the bundle would not be valid: {_first(lines)}")


def refusal(found: RevisionRefused) -> GoondanError:
    """The error of a changeset with which the bundle may not run."""
    if found.error.code == "E_BUNDLE_UNTRUSTED":
        return denied(found.error.message)
    return fail("E_CHANGESET_INVALID", f"the bundle would not run: {found.error.message}")


def bundle_files(options: Options, repository: Repository) -> list[str]:
    """The documents and prompts of the bundle, by their paths in the repository."""
    loaded = load_documents(options.bundle, problems.Report(), NOTHING)
    root = loaded.root
    paths = [source.path for source in loaded.sources]
    paths += [os.path.realpath(os.path.join(root, name)) for name in _prompts(loaded)]
    return sorted(_below(repository.top, paths))


def _deny(refused: Iterable[str]) -> None:
    lines = list(refused)
    if lines:
        raise denied(f"only the operator may change this: {_first(lines)}")


def _first(lines: list[str]) -> str:
    more = f" (and {len(lines) - MAX_NAMED} more)" if len(lines) > MAX_NAMED else ""
    return "; ".join(lines[:MAX_NAMED]) + more


def _written(loaded: Loaded) -> list[rules.Written]:
    found = []
    for document in loaded.documents:
        value = positions.plain(document.node)
        metadata = value.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        found.append(rules.Written(document.file, f"{value.get('kind')}/{name}", value))
    return found


def _prompts(loaded: Loaded) -> set[str]:
    """The files that agents have their prompts in, as the documents name them."""
    found = set()
    for document in _written(loaded):
        spec = document.value.get("spec")
        prompt = spec.get("prompt") if isinstance(spec, dict) else None
        named = prompt.get("systemRef") if isinstance(prompt, dict) else None
        if document.resource.startswith("Agent/") and isinstance(named, str):
            found.add(named)
    return found


def _code(now: Inspected) -> list[str]:
    """Files and folders of the bundle's own code."""
    tools = [tool.root for tool in now.checked.runs_in_jails if tool.root and not tool.bundled]
    return [*tools, *now.checked.extension_roots]


def _below(top: str, paths: list[str]) -> set[str]:
    inside = [os.path.relpath(path, top) for path in paths]
    return {path for path in inside if not path.startswith("../")}


def _mode(entry: TreeEntry | Proposed | None) -> str | None:
    return None if entry is None else entry.mode
