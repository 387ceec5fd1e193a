"""A changeset seen as a change of the bundle: what it may change, and whether the bundle may run with it.

Source: docs/decisions/067.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

from goondan.kernel.bundle.documents import Loaded, load_documents
from goondan.kernel.bundle.files import NOTHING
from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.positions import plain
from goondan.kernel.bundle.problems import Report
from goondan.kernel.changesets.allowed import FileChange, Places, Written, refused_documents, refused_files
from goondan.kernel.changesets.entries import REGULAR, TreeEntry
from goondan.kernel.changesets.paths import twins, within_prefix
from goondan.kernel.changesets.proposed import Proposed, denied
from goondan.kernel.changesets.repository import Repository
from goondan.kernel.restarting.revision import RevisionRefused
from goondan.kernel.supervisor.options import Options
from goondan.kernel.trust.asking import Asking
from goondan.kernel.trust.judge import untrusted
from goondan.kernel.trust.powers import Power
from goondan.schemas.wire.errors import GoondanError, fail

#: Refusals and mistakes that one answer names.
MAX_NAMED: Final = 5


def check(
    options: Options,
    powers: list[Power],
    repository: Repository,
    head: Mapping[str, TreeEntry],
    changes: Mapping[str, Proposed | None],
) -> None:
    """Whether the bundle, as it is checked out (the files of `head`), may become what `changes` make of it. `powers`
    are those that were agreed to.

    Raises GoondanError E_CHANGESET_DENIED and E_CHANGESET_INVALID.
    """
    bundle = options.bundle
    root = bundle if os.path.isdir(bundle) else os.path.dirname(bundle)
    now = inspect_bundle(bundle, state_dir=options.state_dir, handlers=False, policy=options.policy)
    prompts = _prompts(now.loaded)
    places = Places(
        prefix=repository.prefix,
        documents=_below(repository.top, [source.path for source in now.loaded.sources]),
        prompts=_below(repository.top, [os.path.realpath(os.path.join(root, name)) for name in prompts]),
        code=_below(repository.top, _code(now)),
    )
    instead = {
        os.path.join(repository.top, path): None if proposed is None else proposed.data
        for path, proposed in changes.items()
    }
    found = inspect_bundle(
        bundle,
        state_dir=options.state_dir,
        handlers=False,
        policy=options.policy,
        asking=Asking(running=powers),
        instead=instead,
    )
    files = [FileChange(path, _mode(head.get(path)), _mode(proposed)) for path, proposed in changes.items()]
    if found.errors and all(change.after in (None, REGULAR) for change in files):
        raise invalid(found)  # first: whoever may change it, so it is wrong
    _deny(refused_files(files, places))
    _deny(
        f"{path}: it would be the same file as {other} on some systems"
        for path, other in twins([path for path in changes if path not in head], head)
    )
    _deny(refused_documents(_written(now.loaded), _written(found.loaded), prompts))
    if not found.judgement.trusted:
        raise denied(untrusted(found.judgement, bundle, running=True).info.message)


def invalid(found: Inspected) -> GoondanError:
    """E_CHANGESET_INVALID for what is wrong with a bundle."""
    lines = [f"{os.path.relpath(one.file, found.loaded.root)}:{one.line}: {one.message}" for one in found.errors]
    more = f" (and {len(lines) - MAX_NAMED} more)" if len(lines) > MAX_NAMED else ""
    return fail("E_CHANGESET_INVALID", "the bundle would not be valid: " + "; ".join(lines[:MAX_NAMED]) + more)


def refusal(found: RevisionRefused) -> GoondanError:
    """The error of a changeset with which the bundle may not run."""
    if found.error.code == "E_BUNDLE_UNTRUSTED":
        return denied(found.error.message)
    return fail("E_CHANGESET_INVALID", f"the bundle would not run: {found.error.message}")


def bundle_files(options: Options, repository: Repository) -> list[str]:
    """The documents and prompts of the bundle, by their paths in the repository."""
    loaded = load_documents(options.bundle, Report(), NOTHING)
    root = loaded.root
    paths = [source.path for source in loaded.sources]
    paths += [os.path.realpath(os.path.join(root, name)) for name in _prompts(loaded)]
    return sorted(_below(repository.top, paths))


def _deny(refused: Iterable[str]) -> None:
    lines = list(refused)
    if lines:
        more = f" (and {len(lines) - MAX_NAMED} more)" if len(lines) > MAX_NAMED else ""
        raise denied("only the operator may change this: " + "; ".join(lines[:MAX_NAMED]) + more)


def _written(loaded: Loaded) -> list[Written]:
    found = []
    for document in loaded.documents:
        value = plain(document.node)
        metadata = value.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        found.append(Written(document.file, f"{value.get('kind')}/{name}", value))
    return found


def _prompts(loaded: Loaded) -> set[str]:
    """The files that agents have their prompts in, as the documents name them."""
    found = set()
    for document in _written(loaded):
        spec = document.value.get("spec")
        prompt = spec.get("prompt") if isinstance(spec, dict) else None
        named = prompt.get("systemRef") if isinstance(prompt, dict) else None
        if document.resource.startswith("Agent/") and isinstance(named, str):
            found.add(named)
    return found


def _code(now: Inspected) -> list[str]:
    """Files and folders of the bundle's own code."""
    tools = [tool.root for tool in now.checked.runs_in_jails if tool.root and not tool.bundled]
    return [*tools, *now.checked.extension_roots]


def _below(top: str, paths: list[str]) -> set[str]:
    inside = [os.path.relpath(path, top) for path in paths]
    return {path for path in inside if not path.startswith("../") and within_prefix(path, "")}


def _mode(entry: TreeEntry | Proposed | None) -> str | None:
    return None if entry is None else entry.mode
