"""What trees of git hold, and the names of what is in the folder of changesets. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: The folder of changesets in the state directory.
FOLDER: Final = "changesets"
#: In that folder. It is there while a changeset is being committed: the bundle's files are half of it.
INTENT: Final = "intent.json"

#: Modes of tree entries.
REGULAR: Final = "100644"
EXECUTABLE: Final = "100755"
LINK: Final = "120000"
SUBMODULE: Final = "160000"


class TreeEntry(Struct, frozen=True):
    """One file of a commit."""

    #: Its mode, as git writes it.
    mode: str
    #: The id of its object.
    oid: str
    #: Its size (bytes). -1: it is not known, or the entry is a submodule.
    size: int = -1


def is_same(one: TreeEntry | None, other: TreeEntry | None) -> bool:
    """Whether both are the same file, or none."""
    if one is None or other is None:
        return one is other
    return (one.mode, one.oid) == (other.mode, other.oid)


def within_prefix(path: str, prefix: str) -> bool:
    """Whether a path lies in a folder, "" for the top, or is it."""
    return not prefix or path == prefix or path.startswith(prefix + "/")
