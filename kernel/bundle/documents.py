"""From a path to documents: finds the files of a bundle, and reads their YAML.

One file can be a bundle. If the bundle is a directory, all YAML files in it belong to it. A file that is not named
goondan.yaml and has no document of ours (a compose file, a CI workflow) is skipped with a warning.

Source: docs/design/bundle.md section 1.
"""

from __future__ import annotations

import os
from typing import Final

from msgspec import Struct

from goondan.kernel.bundle.files import NOTHING, Overlay, list_documents, read_instead
from goondan.kernel.bundle.lookup import MAX_FILE_BYTES, Unreadable
from goondan.kernel.bundle.positions import Allowance, Composed, Fault, Mapping, Node, Scalar, compose, decode
from goondan.kernel.bundle.problems import Position, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.paths import BUNDLE_FILE
from goondan.schemas.bundle.resources import API_V1, API_V1ALPHA1, KINDS

#: The beginnings of the apiVersion of documents for us.
_GROUPS: Final = (API_V1.partition("/")[0] + "/", API_V1ALPHA1.partition("/")[0] + "/")


class Source(Struct, frozen=True):
    """One file of a bundle: its absolute path and its content."""

    #: Its absolute path.
    path: str
    #: Its content.
    data: bytes


class Loaded(Struct):
    """The documents of a bundle."""

    #: The folder of the bundle.
    root: str
    #: The files that were read.
    sources: list[Source]
    #: Their documents.
    documents: list[Document]
    #: False: a part could not be read, and may contain anything.
    complete: bool


def load_documents(path: str, report: Report, instead: Overlay = NOTHING) -> Loaded:
    """Read the bundle at `path` (absolute, links resolved). All problems go into `report`. `instead` has contents that
    are used in place of those of files.
    """
    folder = os.path.isdir(path)
    loaded = Loaded(path if folder else os.path.dirname(path), [], [], True)
    allowance = Allowance()
    try:
        files = list(list_documents(path)) if folder else [path]
    except Unreadable as error:
        report.error("E_CONFIG_NOT_FOUND", str(error), Position(path))
        loaded.complete = False
        return loaded
    for file in files:
        _load_file(file, not folder or os.path.basename(file) == BUNDLE_FILE, loaded, allowance, report, instead)
    if not loaded.documents and not report.errors:
        message = "there is no document in it" if not folder else "there is no YAML file with a Goondan document in it"
        report.error("E_CONFIG_NOT_FOUND", message, Position(path))
    return loaded


def _load_file(file: str, strict: bool, loaded: Loaded, allowance: Allowance, report: Report, instead: Overlay) -> None:
    """Read one file. `strict`: every document in it must be ours."""
    try:
        data = read_instead(file, MAX_FILE_BYTES, instead)
    except Unreadable as error:
        if strict:
            report.error("E_CONFIG_NOT_FOUND", f"the file cannot be read: {error}", Position(file))
            loaded.complete = False
        else:
            report.warn("W_CONFIG_SKIPPED", f"skipped: {error}", Position(file))
        return
    strict = strict or any(group.encode() in data for group in _GROUPS)
    text = decode(data)
    # A foreign file may have any size, because its content does not count for the bundle.
    allowed = allowance if strict else Allowance()
    composed = Composed([], [text], complete=False) if isinstance(text, Fault) else compose(text, allowed)
    if not strict and (composed.faults or not any(_is_ours(node) for node in composed.documents)):
        report.warn("W_CONFIG_SKIPPED", "skipped: there is no Goondan document in it", Position(file))
        return
    loaded.sources.append(Source(file, data))
    loaded.complete = loaded.complete and composed.complete
    for fault in composed.faults:
        report.error(fault.code, fault.message, Position(file, fault.line, fault.column, fault.path), fault.suggestion)
    for index, node in enumerate(composed.documents):
        if isinstance(node, Mapping):
            loaded.documents.append(Document(file, node, index, from_file=True))
        else:
            message = "a document is a mapping with apiVersion, kind, metadata and spec"
            report.error("E_CONFIG_INVALID_VALUE", message, Position(file, node.line, node.column))


def _is_ours(node: Node) -> bool:
    if not isinstance(node, Mapping):
        return False
    version, kind = node.get("apiVersion"), node.get("kind")
    if isinstance(version, Scalar):
        return version.text.startswith(_GROUPS)
    return isinstance(kind, Scalar) and kind.text in KINDS
