"""A document that a command adds to a goondan.yaml: whether the resource can have its name, and what is appended.

It is appended as text, so the rest of the file keeps its comments and its form.

Source: docs/design/tools.md section 10.
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Final

from goondan.kernel.bundle.problems import BundleError, Report, shown
from goondan.schemas.wire.errors import CODES, fail

_END_HINT: Final = "End the file with a complete document, without --- behind it."


def check_name(name: str, kind: str, bundled: Container[str], *, fits: bool = True) -> None:
    """Check a name: a resource of this kind can have it, and no bundled one has it. `fits`: the names that are made of
    it are short enough.

    Raises GoondanError E_USAGE, E_INIT.
    """
    from goondan.schemas.bundle.address import is_resource_name

    if not is_resource_name(name) or not fits:
        message = f"{shown(name)} cannot be the name of a new {kind}"
        raise fail("E_USAGE", message, suggestion=CODES["E_CONFIG_INVALID_NAME"])
    if name in bundled:
        raise fail("E_INIT", f"there is a bundled {kind} {name!r}", suggestion="Choose another name.")


def read_bundle(path: str, name: str, kind: str) -> bytes | None:
    """Read the goondan.yaml to which a resource of a kind can be added. None when there is none.

    Raises BundleError for a file that is no YAML. Raises GoondanError E_INIT for a link, and for a bundle that has the
    resource already.
    """
    from goondan.kernel.bundle.documents import load_documents
    from goondan.kernel.bundle.positions import Scalar, node_at

    if not os.path.lexists(path):
        return None
    if os.path.islink(path):  # a tool could have made it, in a folder that was its workdir
        raise fail("E_INIT", f"{path} is a link", suggestion="Name the folder that has the file itself.")
    report = Report()
    loaded = load_documents(os.path.realpath(path), report)
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    for document in loaded.documents:
        found, named = (node_at(document.node, at)[0] for at in (("kind",), ("metadata", "name")))
        if isinstance(found, Scalar) and isinstance(named, Scalar) and (found.text, named.text) == (kind, name):
            where = document.place("metadata", "name")
            message = f"{kind}/{name} is there already: {where.file}:{where.line}"
            raise fail("E_INIT", message, suggestion="Choose another name.")
    return loaded.sources[0].data


def addition(path: str, before: bytes, document: bytes) -> bytes:
    """The text to append to a file in order to add a document. Raises GoondanError E_INIT."""
    from goondan.kernel.bundle.positions import Allowance, Composed, Fault, compose, decode

    def documents(data: bytes) -> int:
        text = decode(data)
        composed = Composed([], [text], complete=False) if isinstance(text, Fault) else compose(text, Allowance())
        return len(composed.documents) if not composed.faults else -1

    added = (b"" if before.endswith(b"\n") else b"\n") + b"---\n" + document
    if documents(before + added) != documents(before) + 1:
        raise fail("E_INIT", f"{path}: a document cannot be added behind the last one", suggestion=_END_HINT)
    return added
