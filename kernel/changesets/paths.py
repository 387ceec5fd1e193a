"""Which paths a changeset may have. Pure.

A path comes out of a folder that anybody may have written to, or out of a repository. It goes into a tree, and from
there onto other people's machines, where names may mean something else: file systems without upper and lower case, with
short names, or that ignore some characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Final

#: Folders in each other, and bytes of a path.
MAX_DEPTH: Final = 32
MAX_PATH: Final = 1024
#: The characters that some file systems ignore when they compare names.
_IGNORED: Final = frozenset(
    "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
)
#: What Windows takes for a device, with any ending.
_DEVICES: Final = frozenset(
    (
        "con",
        "prn",
        "aux",
        "nul",
        "conin$",
        "conout$",
        *(f"{kind}{digit}" for kind in ("com", "lpt") for digit in range(10)),
    )
)


def why_refused(path: str) -> str | None:
    """Why no changeset may have this path; None when it may."""
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    parts = path.split("/")
    if size > MAX_PATH or len(parts) > MAX_DEPTH:
        return f"its path is longer than {MAX_PATH} bytes or {MAX_DEPTH} folders"
    if not path.isprintable() or any(c in path for c in '\\:"<>|?*'):
        return "its name holds characters that some systems read in another way"
    if any(part in ("", ".", "..") for part in parts):
        return "it is no path in the repository"
    if any(part.endswith((".", " ")) for part in parts):
        return "its name ends with a dot or a space, which some systems leave out"
    if any(fold(part).split(".")[0].rstrip() in _DEVICES for part in parts):
        return "its name means a device on Windows"
    if any(is_git_name(part) for part in parts):
        return "files of this name mean something to git"
    return None


def is_git_name(name: str) -> bool:
    """Whether git, or what hosts repositories, gives a meaning to files of this name, on any system."""
    plain = fold(name)
    return plain.startswith((".git", "git~"))


def fold(name: str) -> str:
    """A name as a file system sees it that knows no upper and lower case and ignores some characters."""
    kept = "".join(c for c in name if c not in _IGNORED)
    return unicodedata.normalize("NFKC", kept).casefold()


def twins(added: Iterable[str], there: Iterable[str]) -> list[tuple[str, str]]:
    """The added paths that would be the same file as another one, or a folder of one, on such a file system."""
    known: dict[str, str] = {}
    for path in there:
        for end in _ends(path):
            known.setdefault(fold(end), end)
    found = []
    for path in added:
        for end in _ends(path):
            other = known.setdefault(fold(end), end)
            if other != end:
                found.append((path, other))
                break
    return found


def within_prefix(path: str, prefix: str) -> bool:
    """Whether a path lies in a folder, "" for the top, or is it."""
    return not prefix or path == prefix or path.startswith(prefix + "/")


def _ends(path: str) -> list[str]:
    """The path and every folder above it."""
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
