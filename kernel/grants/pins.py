"""The digest that a grant is pinned to: every file of a package, or of a skill.

Unlike the digest of a revision it leaves nothing out: neither hidden nor compiled nor large files, because a module
could import any of them.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

from typing import Final

from goondan.kernel.bundle.lookup import Unreadable
from goondan.schemas.system.digests import NoDigest, folder_digest

#: Nobody could have looked at a package with more.
MAX_FILES: Final = 20_000
MAX_BYTES: Final = 1 << 30


def pin(root: str, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> str:
    """`sha256:` and the digest of everything below `root`. Raises Unreadable for what cannot be pinned."""
    try:
        return folder_digest(root, max_files=max_files, max_bytes=max_bytes)
    except NoDigest as error:
        raise Unreadable(str(error)) from None
