"""A bundle from its path to its plan: the order of the steps, and the one place that calls them.

`inspect_bundle` never raises for anything in the bundle and says everything that is wrong with it (`gdn validate`);
`load_plan` gives the plan or raises BundleError with the same problems (everything that starts a kernel).

Source: design section 8 ("The whole bundle is validated before anything starts").
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kernel.bundle.files import read_file, tree_digest
from kernel.bundle.inspector import Inspector
from kernel.bundle.lookup import MAX_FILE_BYTES, MAX_PROMPT_BYTES, Unreadable
from kernel.bundle.problems import BundleError, Problem, Report
from schemas.launch import KernelPlan

if TYPE_CHECKING:
    from kernel.bundle.check import Checked
    from kernel.bundle.load import Loaded

#: Hexadecimal digits of a revision.
REVISION_CHARS: Final = 32


class Inspected(Struct):
    """A bundle that was looked at. `checked` is complete only without errors."""

    path: str
    loaded: Loaded
    checked: Checked
    errors: list[Problem]
    warnings: list[Problem]
    dropped: int = 0


def inspect_bundle(
    path: str, *, state_dir: str | None, env: Mapping[str, str] | None = None, handlers: bool = True
) -> Inspected:
    """Validate the bundle at `path` (absolute, from kernel.paths.find_bundle).

    `state_dir` keeps what is known about handlers; None: nothing is kept. `env` defaults to the process's.
    `handlers` False: modules are not looked at.
    Raises BundleError only when a manifest of the bundled package is broken.
    """
    report = Report()
    with Inspector(state_dir) as inspector:
        if handlers and _may_hold_tools(path):
            inspector.start_early()
        # The rest is imported and done while that program starts: on two processors the time of one.
        from kernel.bundle.base import base_tools
        from kernel.bundle.check import Checker
        from kernel.bundle.files import BundleFiles
        from kernel.bundle.load import load_documents

        loaded = load_documents(path, report)
        sources = [source.path for source in loaded.sources]
        files, variables = BundleFiles(loaded.root), os.environ if env is None else env
        checker = Checker(loaded.documents, base_tools(), files, variables, report, complete=loaded.complete)
        checked = checker.check()
        if handlers:
            from kernel.bundle.handlers import check_handlers

            check_handlers(checked.tools.values(), sources, inspector, report)
    report.sort(sources)
    return Inspected(path, loaded, checked, report.errors, report.warnings, report.dropped)


def _may_hold_tools(path: str) -> bool:
    """A guess, without reading YAML, that is right for every bundle with a Tool."""
    try:
        return os.path.isdir(path) or b"Tool" in read_file(path, MAX_FILE_BYTES)
    except Unreadable:
        return False


def load_plan(path: str, *, state_dir: str, env: Mapping[str, str] | None = None, handlers: bool = True) -> KernelPlan:
    """The plan of the bundle at `path`. Raises BundleError with every problem when it cannot run."""
    inspected = inspect_bundle(path, state_dir=state_dir, env=env, handlers=handlers)
    if inspected.errors:
        raise BundleError(inspected.errors, inspected.dropped)
    from kernel.plan import build_plan

    loaded, checked = inspected.loaded, inspected.checked
    return build_plan(
        checked,
        bundle=path,
        state_dir=state_dir,
        revision=revision(loaded, checked),
        documents=[source.path for source in loaded.sources],
    )


def revision(loaded: Loaded, checked: Checked) -> str:
    """Names the content of a bundle: its documents, the files they point at, and the code of tools and extensions.

    Made from what stands in the files, so it says nothing about the environment's values.
    """
    total = hashlib.sha256()

    def add(name: str, data: bytes) -> None:
        total.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        total.update(data)

    for source in loaded.sources:
        add(os.path.relpath(source.path, loaded.root), source.data)
    for path in sorted(set(checked.files)):
        try:
            data = read_file(path, MAX_PROMPT_BYTES)
        except Unreadable:
            data = b""  # a connector's entry can be larger; none is run yet
        add(os.path.relpath(path, loaded.root), data)
    for root in sorted({*(tool.root for tool in checked.tools.values()), *checked.extension_roots}):
        add(root, tree_digest(root)[0].encode())
    return total.hexdigest()[:REVISION_CHARS]
