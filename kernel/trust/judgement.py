"""Judges a bundle that was read, as this user sees it: what was agreed to, who else can write there, and whether it
comes from somebody else.

The bytes that are judged are those that were read: documents are in memory already, and modules of extensions are
compared with their digests again when they are loaded.

Who can write: looked at are the files themselves and every folder above them, up to `/`, because whoever can write to
one of those can put something else in the place of the file. The system and the user count as one; so does a group that
holds only the user.

Where it comes from: a repository's configuration can name programs that git runs, so it is only read, and only for
sections that say where the repository comes from. In doubt it comes from elsewhere: then a person is asked once more.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from glob import escape, glob
from typing import Final

from goondan.kernel.bundle import documents, files
from goondan.kernel.bundle.rules import asked_powers, lookup
from goondan.kernel.bundle.rules.checked import Checked
from goondan.kernel.grants.granting import requested
from goondan.kernel.grants.powers import Consent, Judgement, Owner, Power, Writers, everything_trusted, judge
from goondan.kernel.paths import quickstart_folders
from goondan.kernel.trust import records
from goondan.schemas.system.directories import has_list, is_group_of


def judgement_of(
    bundle: str,
    loaded: documents.Loaded,
    checked: Checked,
    state_root: str | None,
    env: Mapping[str, str],
    *,
    trusted: bool = False,
    agreed: Sequence[Power] = (),
    running: Sequence[Power] | None = None,
) -> Judgement:
    """The judgement about the bundle at `bundle`. `state_root` None: there are no records. `env` is the user's.
    `trusted`, `agreed`, `running`: see Asking in kernel/bundle/loader.py.
    """
    powers: list[Power] = asked_powers.powers_of(checked, loaded.documents, loaded.root, env, os.path.realpath)
    powers += others_who_can_write(_files(loaded, checked))
    reason = "there is no state root" if state_root is None else records.why_not_believed(state_root, bundle)
    record = records.read(state_root, bundle) if state_root is not None and reason is None else None
    consent = Consent(
        agreed=[*(record.powers if record is not None else ()), *agreed],
        known=record is not None or bool(agreed),
        own=record is not None and record.own,
        # A command may have trusted everything at the start. That does not extend to files that a model may have
        # written since.
        everything=running is None and (trusted or everything_trusted(os.environ)),
        shipped=is_shipped(bundle, loaded, checked),
        # From each module's own folder: it can be a clone inside a repository of one's own.
        elsewhere=any(comes_from_elsewhere(folder) for folder in {os.path.dirname(path) for path in _modules(checked)}),
        running=running,
    )
    return judge(powers, consent, reason if record is None else None)


def is_shipped(bundle: str, loaded: documents.Loaded, checked: Checked) -> bool:
    """Whether it is the quickstart of this installation, which nobody can change who cannot change the kernel too."""
    root = loaded.root
    if root not in {os.path.realpath(folder) for folder in quickstart_folders()} or not os.path.exists(bundle):
        return False
    kernel = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    who = set(others_who_can_write(_files(loaded, checked)))
    return who <= set(others_who_can_write([kernel, os.path.abspath(__file__)]))


def _files(loaded: documents.Loaded, checked: Checked) -> Iterable[str]:
    """What is read or run of the bundle. For a tool: its entry and its folder. The rest of it runs in jails. For a tool
    that gets something there, for example a key: all of it. A user who can change one of its modules gets the same.
    """
    yield from (source.path for source in loaded.sources)
    yield loaded.root
    yield from checked.files
    yield from checked.extension_roots
    yield from _modules(checked)
    for tool in checked.runs_in_jails:
        if not tool.bundled and not tool.package:
            yield from (path for path in (tool.root, tool.entry) if path)
            if tool.root and requested(tool.sandbox):
                yield from all_below(tool.root)
            venv = tool.sandbox.python.venv
            if venv is not None:
                yield from (venv, *glob(f"{escape(venv)}/lib/*/site-packages"))


def _modules(checked: Checked) -> Iterable[str]:
    """The modules that run outside of jails: with links, and where those lead."""
    for agent in checked.agents.values():
        for extension in agent.extensions:
            folder = os.path.dirname(extension.entry)
            for name in extension.modules or ():
                path = os.path.join(folder, name)
                yield path
                if os.path.islink(path):
                    yield os.path.realpath(path)


#: Files and folders of one tool that are looked at; a folder with more holds something else as well.
MAX_BELOW: Final = 5_000
#: Owners and groups that are named; where there are more, it is everybody (entries).
MAX_NAMED: Final = 8


def others_who_can_write(paths: Iterable[str]) -> list[Owner | Writers]:
    """Owners first, each once. A file that cannot be looked at is left out: it cannot be loaded either."""
    owners: set[int] = set()
    groups: set[int | None] = set()
    seen: set[str] = set()
    for path in paths:
        if os.path.islink(path):
            _look(path, owners, groups, seen)
            _above(os.path.dirname(path), owners, groups, seen)
        _above(os.path.realpath(path), owners, groups, seen)
    if max(len(owners), len(groups)) > MAX_NAMED or None in groups:
        groups = {None}
    named = [Owner(uid) for uid in sorted(owners)[:MAX_NAMED]]
    return [*named, *(Writers(gid) for gid in sorted(groups, key=lambda gid: -1 if gid is None else gid))]


def all_below(folder: str) -> Iterator[str]:
    """Files and folders below a folder, at most MAX_BELOW of them, without hidden ones; links are not followed."""
    left = MAX_BELOW
    todo = [folder]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue  # a file, or a folder that cannot be read
        for entry in entries[:left]:
            if not entry.name.startswith("."):
                left -= 1
                yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)


def _above(path: str, owners: set[int], groups: set[int | None], seen: set[str]) -> None:
    while path not in seen:
        _look(path, owners, groups, seen)
        path = os.path.dirname(path)


def _look(path: str, owners: set[int], groups: set[int | None], seen: set[str]) -> None:
    seen.add(path)
    try:
        state = os.lstat(path)
    except OSError:
        return
    if state.st_uid not in (0, os.geteuid()):
        owners.add(state.st_uid)
    if stat.S_ISLNK(state.st_mode) or (stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX):
        return  # a link has no mode; in a sticky folder each file is its owner's
    if state.st_mode & stat.S_IWOTH:
        groups.add(None)
    elif state.st_mode & stat.S_IWGRP and (has_list(path) or not is_own_group(state.st_gid, os.geteuid())):
        groups.add(state.st_gid)


@lru_cache(maxsize=64)
def is_own_group(gid: int, uid: int) -> bool:
    """Whether a group holds nobody but the user and root."""
    return is_group_of(gid, (0, uid))


def owner_name(uid: int) -> str:
    """`NAME (uid N)`, or `uid N` where the user has no name here."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_name(gid: int) -> str:
    """`NAME (gid N)`, or `gid N`."""
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


#: Larger is no configuration that a person or git has written (bytes).
MAX_CONFIG: Final = 1 << 20
#: Of `.git` files, which hold one line with a path (bytes).
MAX_LINK: Final = 8192
#: A remote by itself, a branch that comes from an address, or a further file that can name one. Git reads several
#: sections in one line, so they are looked for anywhere.
_REMOTE: Final = re.compile(
    rb"\[\s*(?:remote|include|includeif|svn-remote)\b|\bremote[ \t]*=(?![ \t]*\.[ \t]*$)", re.IGNORECASE | re.MULTILINE
)


def comes_from_elsewhere(folder: str) -> bool:
    """Whether `folder` lies in a work tree with a remote: of git, also a worktree or a submodule, Mercurial,
    Subversion or Jujutsu. `folder` is absolute, with links resolved.
    """
    here = folder
    while True:
        if os.path.lexists(f"{here}/.git") and _has_remote(here):
            return True
        if os.path.lexists(f"{here}/.svn") or os.path.lexists(f"{here}/.hg/hgrc") or os.path.lexists(f"{here}/.jj"):
            return True
        if here == "/":
            return False
        here = os.path.dirname(here)


def _has_remote(top: str) -> bool:
    folder = f"{top}/.git"
    try:
        if not os.path.isdir(folder):
            text = files.read_file(folder, MAX_LINK)
            if not text.startswith(b"gitdir:"):
                return True
            named = os.fsdecode(text.partition(b":")[2].strip())
            folder = os.path.join(top, named)
        if os.path.lexists(f"{folder}/commondir"):  # a worktree: the configuration is the main one's
            folder = os.path.join(folder, os.fsdecode(files.read_file(f"{folder}/commondir", MAX_LINK).strip()))
        if not os.path.lexists(f"{folder}/config"):
            return True  # every repository has one, so this is something else
        for name in ("config", "config.worktree"):
            if os.path.lexists(f"{folder}/{name}") and _REMOTE.search(files.read_file(f"{folder}/{name}", MAX_CONFIG)):
                return True
        return os.path.lexists(f"{folder}/remotes") and bool(os.listdir(f"{folder}/remotes"))
    except (lookup.Unreadable, OSError, ValueError):
        return True
