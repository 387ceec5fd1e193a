"""Reads the metadata of the repository in an instance's workdir, without running git in it.

Tools can write to the workdir, so each file in it may be a link, a pipe, or large. `.git` and the files in it are
opened relative to the workdir, without following links. Only small regular files are read.

Source: requirements EVENTS-07, PIPELINE-12, PIPELINE-24.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from goondan.schemas.visible import visible_line

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
