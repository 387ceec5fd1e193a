"""The check of the state root before anything in it is used: its owner, who could write to it, and which of its files
are believed.

Every level is opened by the checked walk (schemas/system/directories.py): it belongs to us and is closed to others. A
level that is ours and too open is closed, and a line says so. A level that cannot be closed, or that belongs to
somebody else, is refused. The error names the GOONDAN_STATE_ROOT line to use instead.

Some files decide about powers: policy.yaml, accepted files, records of trust. They are believed only from a root that
nobody else could have filled. A root in a bundle or a checkout is not believed, because the author of that may have
written the state as well. A root that others could write to is not believed until its owner has looked and confirmed
it. A file in the root marks this. It is there as long as nothing in the root is to be believed.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

from msgspec import Struct

from goondan.kernel import paths
from goondan.schemas.system import directories, users
from goondan.schemas.wire.errors import GoondanError, fail

#: Its presence in the root says that others could write there. Its text says how.
MARK: Final = "unconfirmed"
#: Its presence says that the root was open, and that not all that is in it has been looked at since.
UNCHECKED: Final = "unchecked"
#: What ends the first.
CONFIRM: Final = "gdn trust --state-root"
#: What makes a folder somebody's project: what lies below came with it.
PROJECT_SIGNS: Final = (".git", paths.BUNDLE_FILE)
#: Levels below the root that are looked at each time, beside those of the workspace.
LEVELS: Final = ("workspaces", "packages", "extensions", "trust")
#: Levels of a workspace.
WORKSPACE_LEVELS: Final = ("instances", "logs", "toolhosts", "blobs", "kernel")
#: Files whose content decides about powers.
FILES: Final = ("policy.yaml", "accepted-files.json")
#: People keep these elsewhere and put a link here; only whether others can change them matters.
_SHARED: Final = ("packages", "extensions")
#: Levels of a workspace that belong to the user of tool hosts under root, or hold what does.
_TOOLHOSTS: Final = frozenset(("toolhosts", "blobs", "run"))
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: Of a mark (bytes): one sentence.
_MAX_MARK: Final = 4096


class StateRoot(Struct, frozen=True, kw_only=True):
    """A state root that may be used."""

    #: Where it is.
    path: str
    #: Policies, accepted files and records of trust may be read from it.
    believable: bool
    #: Why it is not believable, and what helps, in one sentence.
    why: str | None = None
    #: One line for each folder or file that was closed to others just now.
    mended: list[str] = []


class Level(NamedTuple):
    """One folder or file that was looked at."""

    #: Where it is.
    path: str
    #: Its owner.
    uid: int
    #: Its mode.
    mode: int
    #: What is wrong with it. '': nothing.
    problem: str = ""
    #: The next command mends it.
    mendable: bool = False


def open_state_root(root: str, *, workspace: str | None = None, make: bool = False) -> StateRoot:
    """Check and mend the root and, with the state directory `workspace`, that one's levels.

    `make`: make both, with mode 0700. Without it nothing is made, and what is missing is in order.
    Raises GoondanError E_STATE for what must not be used.
    """
    mending = _Mending(root)
    try:
        with mending.open(root, make=make) as top:
            if mending.mended:
                mending.mended[0] += ", and so is what is in it"
                _note(top, UNCHECKED, "")
            try:
                _look_through(top, root, workspace, mending, make=make)
            finally:  # also when something is refused: by the next command it may be gone
                if mending.exposed:
                    _note(top, MARK, mending.exposed[0])
            why = judge(top.path, project=project_above(top.path), marked=_read_mark(top))
    except FileNotFoundError:
        why = doubt(root)
    except directories.DirectoryRefused as refused:
        _refuse(root, refused)
    except OSError as error:
        raise fail("E_STATE", f"{error.filename or root}: {error.strerror}") from None
    return StateRoot(path=root, believable=why is None, why=why, mended=mending.mended)


def doubt(root: str) -> str | None:
    """Why nothing is believed from this root, in one sentence; None when it is. Changes nothing."""
    try:
        with directories.open_directory(root) as top:
            return judge(top.path, project=project_above(top.path), marked=_read_mark(top))
    except FileNotFoundError:
        return judge(root, project_above(root))
    except directories.DirectoryRefused as refused:
        return f"{refused.path} {refused.problem}"
    except OSError as error:
        return f"{error.filename or root}: {error.strerror}"


def confirm(root: str) -> None:
    """The owner has looked: what is in the root is believed again, unless it lies in a project.

    Raises GoondanError E_STATE.
    """
    open_state_root(root)
    try:
        with directories.open_directory(root, private_from=root) as top, suppress(FileNotFoundError):
            os.unlink(MARK, dir_fd=top.fd)
    except FileNotFoundError:
        return
    except (directories.DirectoryRefused, OSError) as error:
        raise fail("E_STATE", str(error)) from None


def judge(root: str, project: str | None, marked: str | None = None) -> str | None:
    """Why nothing is believed from a root that is closed now; None when it is (pure).

    `project` is the folder of a bundle or a checkout that it lies in, `marked` what its mark says.
    """
    if project is not None:
        return (
            f"the state root {root} lies in {project}, a bundle or a checkout: what decides about powers is not read "
            "from there; set GOONDAN_STATE_ROOT to a folder outside of it"
        )
    if marked is not None:
        return f"{marked}; look at what is in {root}, then run `{CONFIRM}`"
    return None


def project_above(root: str, home: str | None = None) -> str | None:
    """The nearest folder above the root, or itself, that is a bundle's or a checkout's.

    `~/.goondan` is in none, whatever the home directory holds: nobody clones that. `home` is the user's home directory
    (default: by the system's list of users).
    """
    here = os.path.realpath(root)
    if is_homes_own(here, home):
        return None
    while True:
        try:
            state = os.stat(here)
        except OSError:  # still to be made
            here = os.path.dirname(here)
            continue
        everybodys = state.st_mode & 0o002 and state.st_mode & stat.S_ISVTX  # what lies there is no project's sign
        if not everybodys and any(os.path.lexists(os.path.join(here, sign)) for sign in PROJECT_SIGNS):
            return here
        if here == "/":
            return None
        here = os.path.dirname(here)


def is_homes_own(root: str, home: str | None = None) -> bool:
    """Whether the root is `~/.goondan`, of the home directory that the system's list of users names (or `home`): HOME
    may be a checkout, as in a build.
    """
    home = _home() if home is None else home
    return bool(home) and os.path.realpath(root) == os.path.join(os.path.realpath(home), ".goondan")


def look(root: str, workspace: str | None = None) -> Iterator[Level]:
    """Every level that is there, as it is now; nothing is changed. For `gdn doctor`."""
    places = [root, *(os.path.join(root, name) for name in (*LEVELS, *FILES))]
    if workspace is not None:
        places += [workspace, *(os.path.join(workspace, name) for name in WORKSPACE_LEVELS)]
    for path in places:
        try:
            state = os.stat(path) if os.path.basename(path) in _SHARED else os.lstat(path)
        except OSError:
            continue
        yield _judged(path, root, state)


def why_refused(root: str) -> GoondanError | None:
    """Why a command would refuse the root, without changing anything; None when it would use it, perhaps mended."""
    try:
        directories.open_directory(root).close()
    except directories.DirectoryRefused as refused:
        with suppress(OSError):
            state = os.lstat(refused.path)
            mendable = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
            if mendable and refused.path == os.path.realpath(root):
                return None
        return refusal(root, refused, elsewhere(root))
    except OSError:
        return None  # whether it can be made is for others to say
    return None


def elsewhere(refused: str) -> str:
    """A state root that this user can have instead of one that was refused."""
    places = [os.path.join(_home(), ".goondan")] if _home() else []
    for place in (*places, *paths.homeless_roots()):
        with (
            suppress(directories.DirectoryRefused, OSError),
            directories.open_directory(os.path.dirname(place)) as above,
        ):
            usable = os.access(above.path, os.W_OK | os.X_OK, effective_ids=True) or os.path.lexists(place)
            if usable and place != refused and not place.startswith(f"{refused}/") and doubt(place) is None:
                return place
    return "DIR"


# --- inside ---------------------------------------------------------------------------------------------------------


class _Mending:
    """What was mended, in lines, and how others could write, in sentences."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._groups: dict[int, bool] = {}
        self.mended: list[str] = []
        self.exposed: list[str] = []

    def open(self, path: str, *, make: bool) -> directories.Directory:
        """A level, closed by now. Raises DirectoryRefused, OSError."""
        return directories.open_directory(
            path, make=make, private_from=self.root, mend=self.note, owners=owners(path, self.root)
        )

    def look(self, path: str, *, make: bool = False) -> None:
        """A level that need not be there, or is made."""
        with suppress(FileNotFoundError):
            if os.path.basename(path) in _SHARED and os.path.islink(path):
                directories.open_directory(path).close()
            else:
                self.open(path, make=make).close()

    def note(self, path: str, mode: int, gid: int | None = None) -> None:
        """A level was too open. The walk does not tell the group: it is looked at, and nobody else changes it now."""
        self.mended.append(f"{path} was open to others (mode {mode:04o}); it is closed now")
        if others_could_write(mode, lambda: self.is_ours(path, os.stat(path).st_gid if gid is None else gid)):
            self.exposed.append(f"others could write to {path} (mode {mode:04o})")

    def is_ours(self, path: str, gid: int) -> bool:
        """Whether what the group may do with `path` is for nobody but this user: a list can name others."""
        if directories.has_list(path):
            return False
        if gid not in self._groups:
            self._groups[gid] = directories.is_group_of(gid, (0, os.geteuid()))
        return self._groups[gid]


def others_could_write(mode: int, group_is_ours: Callable[[], bool]) -> bool:
    """Whether somebody else could write to what has this mode (pure)."""
    return bool(mode & 0o002) or (bool(mode & 0o020) and not group_is_ours())


def owners(path: str, root: str) -> tuple[int, ...]:
    """The users that may own a level of `root`: we; and under root, for the levels of tool hosts, their user."""
    user = os.geteuid()
    handed = not _TOOLHOSTS.isdisjoint(os.path.relpath(path, root).split("/"))
    return (user, users.TOOLHOST_UID) if user == 0 and handed else (user,)


def _look_through(
    top: directories.Directory, root: str, workspace: str | None, mending: _Mending, *, make: bool
) -> None:
    """Everything below a root that is closed by now. Raises DirectoryRefused, OSError."""
    if _has(top, UNCHECKED):  # also when an earlier look at it has met what it refused
        _close_below(top, mending)
        with suppress(FileNotFoundError):  # another command was as fast
            os.unlink(UNCHECKED, dir_fd=top.fd)
    for level in LEVELS:
        mending.look(os.path.join(root, level))
    if workspace is not None and workspace != root:
        mending.look(workspace, make=make)
        for level in WORKSPACE_LEVELS:
            mending.look(os.path.join(workspace, level))
    for name in FILES:
        _mend_file(top, name, mending)


def _close_below(top: directories.Directory, mending: _Mending) -> None:
    """Close all that is in a root that was open. Raises DirectoryRefused for what somebody else has put there."""
    for folder, folders, files, fd in os.fwalk(".", dir_fd=top.fd, follow_symlinks=False):
        parts = [] if folder == "." else folder.split("/")[1:]
        shared = bool(parts) and parts[0] in _SHARED
        if len(parts) == 5 and (parts[0], parts[2]) == ("workspaces", "instances"):
            folders[:] = [name for name in folders if name != "workspace"]  # a workdir is its jails' and its person's
        for name in (*folders, *files):
            path = os.path.normpath(os.path.join(top.path, folder, name))
            with suppress(FileNotFoundError):
                _close(fd, name, path, top.path, mending, keep=0o755 if shared else 0o700)


def _close(folder: int, name: str, path: str, root: str, mending: _Mending, *, keep: int) -> None:
    """Close one entry of a root: of its mode only what is in `keep` stays."""
    fd = os.open(name, _LOOK, dir_fd=folder)
    try:
        state = os.fstat(fd)
        if state.st_uid not in owners(path, root):
            problem = f"belongs to uid {state.st_uid}: somebody else has put it there"
            raise directories.DirectoryRefused(
                path, problem, f"Look at it, then remove it: rm -r {directories.quoted(path)}"
            )
        mode = stat.S_IMODE(state.st_mode)
        if stat.S_ISLNK(state.st_mode) or not mode & 0o777 & ~keep or _has_other_names(state):
            return
        os.chmod(f"/proc/self/fd/{fd}", mode & ~(0o777 & ~keep))
        if others_could_write(mode, lambda: mending.is_ours(path, state.st_gid)):
            mending.exposed.append(f"others could write to {path} (mode {mode:04o})")
    finally:
        os.close(fd)


def _has_other_names(state: os.stat_result) -> bool:
    """Its mode is then not this folder's affair alone."""
    return stat.S_ISREG(state.st_mode) and state.st_nlink > 1


def _mend_file(top: directories.Directory, name: str, mending: _Mending) -> None:
    """A file that decides: nobody else may write to it. A link is judged by whoever follows it."""
    try:
        fd = os.open(name, _LOOK, dir_fd=top.fd)
    except FileNotFoundError:
        return
    path = os.path.join(top.path, name)
    try:
        state = os.fstat(fd)
        mode = stat.S_IMODE(state.st_mode)
        if state.st_uid not in (0, os.geteuid()):
            raise directories.DirectoryRefused(
                path, f"belongs to uid {state.st_uid}", f"Look at it, then: rm {directories.quoted(path)}"
            )
        if stat.S_ISREG(state.st_mode) and mode & 0o022 and state.st_uid == os.geteuid():
            os.chmod(f"/proc/self/fd/{fd}", mode & ~0o022)
            mending.note(path, mode, state.st_gid)
    finally:
        os.close(fd)


def _has(top: directories.Directory, name: str) -> bool:
    try:
        os.stat(name, dir_fd=top.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _note(top: directories.Directory, name: str, text: str) -> None:
    """Keep a note in the root; an earlier one stays."""
    with suppress(FileExistsError):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=top.fd)
        with open(fd, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.write(text)


def _read_mark(top: directories.Directory) -> str | None:
    """What the mark says; None without one. One that cannot be read counts."""
    try:
        fd = os.open(MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=top.fd)
        with open(fd, "rb") as source:
            return source.read(_MAX_MARK).decode("utf-8", "replace") or "others could write to it"
    except FileNotFoundError:
        return None
    except OSError:
        return "others could write to it"


def _judged(path: str, root: str, state: os.stat_result) -> Level:
    mode = stat.S_IMODE(state.st_mode)
    shared = os.path.basename(path) in (*_SHARED, *FILES)
    ours = state.st_uid in (*owners(path, root), *((0,) if shared else ()))
    if not ours:
        return Level(path, state.st_uid, mode, f"belongs to uid {state.st_uid}")
    if stat.S_ISLNK(state.st_mode):
        return Level(path, state.st_uid, mode)
    if mode & (0o022 if shared else 0o077):
        return Level(path, state.st_uid, mode, f"is open to others (mode {mode:04o})", state.st_uid == os.geteuid())
    return Level(path, state.st_uid, mode)


def _refuse(root: str, refused: directories.DirectoryRefused) -> NoReturn:
    """Raise E_STATE with the line that helps."""
    raise GoondanError(refusal(root, refused, elsewhere(root)).info) from None


def refusal(root: str, refused: directories.DirectoryRefused, instead: str) -> GoondanError:
    """The error for a root that cannot be used; `instead` is one that can."""
    inside = refused.path == root or refused.path.startswith(f"{root}/")
    problem = refused.problem
    if inside and "is open to others" in problem:
        problem += ", and its file system does not let us close it"
    what = "the state root cannot be used: " if inside else f"the state root {root} cannot be used: "
    return fail(
        "E_STATE",
        f"{what}{refused.path} {problem}",
        suggestion=f"Use another one: export GOONDAN_STATE_ROOT={directories.quoted(instead)}"
        + ("" if inside and "belongs" not in problem else f"  # or: {refused.fix}"),
    )


def _home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""
