"""The nodes of the bundled tools' manifests, prepared before: reading their YAML would take 15 ms of every start.

The manifests are the source. The nodes of a manifest are found by the digest of its bytes. So a changed manifest is
read as YAML, which only takes longer. `scripts/prepare_manifests.py` writes the file, and `make check` fails when it is
out of date.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.lookup import Unreadable
from goondan.kernel.bundle.positions import Mapping

#: The file, beside this module.
FILE: Final = "prepared.json"
#: The largest size of this file (bytes). It has some 100 KB; a larger file is not ours.
MAX_PREPARED_BYTES: Final = 4 << 20


class Prepared(Struct, frozen=True):
    """One manifest: `manifest` is its file from the root of the packages, for whoever looks; `node` its document."""

    #: Its file, from the root of the packages.
    manifest: str
    #: Its document.
    node: Mapping


def manifest_digest(data: bytes) -> str:
    """The name of a manifest's bytes: their SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def prepared_nodes(data: bytes) -> Mapping | None:
    """The only document of a manifest with these bytes. None when it is not known and must be read."""
    found = _prepared().get(manifest_digest(data))
    return None if found is None else found.node


@lru_cache(maxsize=1)
def _prepared() -> dict[str, Prepared]:
    try:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), FILE)
        return msgspec.json.decode(read_file(path, MAX_PREPARED_BYTES), type=dict[str, Prepared])
    except (Unreadable, msgspec.DecodeError):
        return {}  # every manifest is read, then
