"""The modules of an extension and their digests: an agent process may import only these from the bundle.

When an extension has a folder of its own, the whole folder belongs to it. But its entry may lie in the bundle's root,
which tools may write to. Then only the modules count that it imports by name, and those that these modules import.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

import ast
import posixpath
from typing import Final

from goondan.kernel.bundle.lookup import Files, Unreadable

#: The most modules of one extension. A folder with more contains other things as well.
MAX_MODULES: Final = 2000
#: The suffixes of modules: sources, and libraries of machine code.
_SUFFIXES: Final = (".py", ".so")


def modules_of(entry: str, files: Files) -> tuple[dict[str, str], list[str]]:
    """Path from the entry's folder -> SHA-256 in hexadecimal digits, and the files and folders beside the entry that
    these are in: none but for an entry in the bundle's root.

    Raises Unreadable when there are more than MAX_MODULES.
    """
    folder = posixpath.dirname(entry)
    if folder != files.root:
        return _digests(folder, files.list_files(folder, _SUFFIXES, MAX_MODULES), files), []
    wanted, beside = [posixpath.basename(entry)], []
    todo = [entry]
    seen: set[str] = set()
    while todo:
        for name in _imported(todo.pop(), files) - seen:
            seen.add(name)
            found = [f"{name}.py"] if files.is_file(f"{folder}/{name}.py") else []
            if not found:
                inner = files.list_files(f"{folder}/{name}", _SUFFIXES, MAX_MODULES)
                found = [f"{name}/{path}" for path in inner]
            if found:
                beside.append(f"{folder}/{name}" if "/" in found[0] else f"{folder}/{found[0]}")
                wanted += found
                todo += [f"{folder}/{path}" for path in found if path.endswith(".py")]
            if len(wanted) > MAX_MODULES:
                raise Unreadable(f"it imports more than {MAX_MODULES} modules of the bundle")
    return _digests(folder, wanted, files), sorted(set(beside) - {entry})


def _digests(folder: str, paths: list[str], files: Files) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        try:
            found[path] = files.digest(f"{folder}/{path}")
        except Unreadable:
            continue  # it cannot be imported, and the import will report that
    return found


def _imported(path: str, files: Files) -> set[str]:
    """The top-level names that a module imports anywhere in it."""
    try:
        tree = ast.parse(files.read_text(path))
    except (Unreadable, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names
