"""Tells extensions about the repository in which the agent works, and about the worktrees of changesets.

The metadata of a repository is read without running git in it. Tools can write to the workdir, so each file in it may
be a link, a pipe, or large. `.git` and the files in it are opened relative to the workdir, without following links.
Only small regular files are read.

Source: requirements EVENTS-07, EVENTS-08, BUNDLE-10, PIPELINE-12, PIPELINE-24.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import stat
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from goondan.agentproc.extensions.engine import Watch, run
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.extensions.points.contexts import WorkspaceScope, binding
from goondan.agentproc.extensions.points.pipeline import Layer, Pipeline
from goondan.agentproc.extensions.points.results import trace_of
from goondan.schemas.text.visible import visible_line

#: The largest `config` or `HEAD` (bytes). A larger one is not read, and the repository then has no metadata.
MAX_FILE: Final = 64 * 1024
#: The longest address of a remote or name of a branch (characters).
MAX_TEXT: Final = 500

_SECTION: Final = re.compile(r"""\s*\[\s*([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\s*\]\s*(?:[#;].*)?""")
_URL: Final = re.compile(r"\s*url\s*=\s*(.*?)\s*", re.IGNORECASE)
_BRANCH: Final = re.compile(r"ref: refs/heads/(\S.*)")


class Repository(Struct, frozen=True):
    """A repository."""

    #: The path of the working tree.
    path: str
    #: The address of `origin`, else of the first remote, without user and password. None: there is none, or it is
    #: unknown.
    remote: str | None = None
    #: The branch that is checked out. None: there is none, or it is unknown.
    branch: str | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata in the event."""
        known = {"remote": self.remote, "branch": self.branch}
        return {name: value for name, value in known.items() if value is not None}


def repository_at(workdir: str) -> Repository | None:
    """The repository with the working tree `workdir`; None when it is not a working tree."""
    try:
        top = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.stat(".git", dir_fd=top, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            return Repository(workdir)  # a worktree or a submodule; its repository is somewhere else
        if not stat.S_ISDIR(found.st_mode):
            return None
        inside = os.open(".git", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    except OSError:
        return None
    finally:
        os.close(top)
    try:
        head, config = _text(inside, "HEAD"), _text(inside, "config")
    finally:
        os.close(inside)
    if head is None:
        return None  # a folder of that name, and no repository
    return Repository(workdir, remote_of(config or ""), branch_of(head))


def branch_of(head: str) -> str | None:
    """The branch that `HEAD` names; None when it names a commit."""
    found = _BRANCH.fullmatch(head.strip())
    return None if found is None else _bounded(found[1])


def remote_of(config: str) -> str | None:
    """The address of a repository's remote."""
    remotes: dict[str, str] = {}
    current: str | None = None
    for line in config.splitlines():
        section = _SECTION.fullmatch(line)
        if section is not None:
            current = section[2] if section[1].lower() == "remote" else None
        elif current is not None and (url := _URL.fullmatch(line)) is not None and url[1]:
            remotes.setdefault(current, url[1].strip('"'))
    address = remotes.get("origin") or next(iter(remotes.values()), None)
    return None if address is None else _bounded(without_user(address))


def without_user(address: str) -> str:
    """An address without user and password: every subscriber would get a token that is in it."""
    with suppress(ValueError):
        parts = urlsplit(address)
        if parts.scheme and parts.netloc:
            return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return address


def _bounded(text: str) -> str:
    return visible_line(text[:MAX_TEXT])


def _text(folder: int, name: str) -> str | None:
    """The text of a small file of the repository; None when it does not exist or must not be read."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE:
            return None
        try:
            return file.read(MAX_FILE).decode("utf-8", "replace")
        except OSError:
            return None


REPO_AVAILABLE: Final = "workspace.repoAvailable"
WORKTREE_MOUNTED: Final = "workspace.worktreeMounted"

log = logging.getLogger("agentproc")


class Workspaces:
    """Remembers the workdir that the extensions of an instance were told about."""

    def __init__(self, pipeline: Pipeline, events: EventBus, watch: Watch) -> None:
        self._watch = watch
        self._pipeline = pipeline
        self._events = events
        self._told = ""
        #: The workdir of the running turn, or of the last one; "" before the first turn.
        self.workdir = ""

    async def enter(self, workdir: str) -> None:
        """The next turn works in this workdir. A repository is announced once for as long as the workdir stays the
        same: first to the mutators of `workspace.repoAvailable`, then as an event with the metadata that they return.
        """
        self.workdir = workdir
        if workdir == self._told or (self._pipeline.empty and self._events.empty):
            return
        self._told = workdir
        repository = repository_at(workdir)
        if repository is None:
            return
        scope = WorkspaceScope(repository.path, "repo", dict(repository.metadata) or None)
        told = await self._mutated(REPO_AVAILABLE, scope)
        payload: dict[str, Any] = {"path": told.path}
        if told.metadata is not None:
            payload["metadata"] = told.metadata
        self._events.emit(REPO_AVAILABLE, payload, emitter="the kernel")

    async def mounted(self, path: str, whose: dict[str, Any]) -> None:
        """There is a worktree. `whose` says for what it is made, and no mutator changes that. It is announced to the
        mutators of `workspace.worktreeMounted`, then as an event.
        """
        scope = WorkspaceScope(path, "worktree", dict(whose))
        told = await self._mutated(WORKTREE_MOUNTED, scope)
        payload: dict[str, Any] = {"path": told.path, **whose}
        added = {key: value for key, value in (told.metadata or {}).items() if key not in whose}
        if added:
            payload["metadata"] = added
        self._events.emit(WORKTREE_MOUNTED, payload, emitter="the kernel")

    async def _mutated(self, point: str, given: WorkspaceScope) -> WorkspaceScope:
        """What the mutators of a point make of it. When one of them fails, that is logged, and nothing is changed."""

        async def core(_: Any) -> WorkspaceScope:
            return changed

        def failed(layer: Layer, error: BaseException) -> WorkspaceScope:
            log.warning("the %s handler of extension %s failed\n%s", point, layer.extension, trace_of(error))
            return given

        changed = copy.copy(given)
        return await run(self._pipeline.at(point), binding(changed), core, self._watch, failed=failed)
