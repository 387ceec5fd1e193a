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
    """One file of a commit. `size` in bytes; -1 where it is not known, and of a submodule."""

    mode: str
    oid: str
    size: int = -1
