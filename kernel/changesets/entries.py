"""What trees of git hold. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

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
