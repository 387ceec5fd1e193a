"""What a changeset may change of a bundle. Pure.

A changeset may change the following (docs/changesets.md has it as a table). Everything else is the operator's.
- Prompts: `prompt.system` and `prompt.systemRef` of an Agent, and the files that they name.
- Other Markdown files below the bundle's folder, where no code is.
- `tools` of an Agent: Tools of the bundle, within `extensionsMayAdd`. Those of packages and of `@goondan/base` only
  where a pattern names them.
- `extensions` of an Agent: their order and their `config`.
- `config` of an Extension, but not that of a guard (`@goondan/base/approval`, `budget`, `required-tools-guard`) or of
  `@goondan/base/mcp`, and in no extension transports, sandboxes and permissions.

A document stays in its file, and is neither added nor removed. A narrowing of a tool's sandbox stays.

Source: docs/decisions/067; requirements BUNDLE-07, BUNDLE-08.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from msgspec import Struct

from goondan.kernel.changesets.entries import REGULAR
from goondan.kernel.changesets.paths import why_refused, within_prefix

#: Bundled extensions that keep an agent from something: what they are told, and that they are there, is policy.
GUARDS: Final = frozenset({"approval", "budget", "required-tools-guard"})
#: The bundled extension whose config says which program or server is connected.
TRANSPORTS: Final = frozenset({"mcp"})
#: Keys of an Extension's config, at any depth, that are the operator's in every extension.
OPERATORS_KEYS: Final = frozenset({"transport", "sandbox", "permissions"})
#: The package of what comes along.
BASE: Final = "@goondan/base"


class FileChange(Struct, frozen=True):
    """A change of one file."""

    #: Its path in the repository.
    path: str
    #: Its mode before. None: it did not exist.
    before: str | None
    #: Its mode after. None: it no longer exists.
    after: str | None


class Places(Struct, frozen=True, kw_only=True):
    """Paths in the repository."""

    #: The bundle's folder.
    prefix: str
    #: The bundle's documents.
    documents: Collection[str]
    #: The files with its prompts.
    prompts: Collection[str]
    #: The files and folders of its code. A folder stands for all that is in it.
    code: Collection[str]


class Written(Struct, frozen=True):
    """A document as a file has it."""

    #: The file that it is in.
    file: str
    #: Its `Kind/name`.
    resource: str
    #: All of it as plain values.
    value: Any


def refused_files(changes: Iterable[FileChange], places: Places) -> list[str]:
    """The faults of a changeset's files, apart from their content: one sentence for each."""
    return [f"{change.path}: {why}" for change in changes if (why := _why_file(change, places)) is not None]


def _why_file(change: FileChange, places: Places) -> str | None:
    why = why_refused(change.path)
    if why is not None:
        return why
    if not within_prefix(change.path, places.prefix):
        return "it lies outside of the bundle's folder"
    if any(mode not in (None, REGULAR) for mode in (change.before, change.after)):
        return "only ordinary files that no one can execute are in changesets"
    if change.path in places.documents:
        return "a document's file is not removed by a changeset" if change.after is None else None
    if any(within_prefix(change.path, place) for place in places.code):
        return "it belongs to the code of a tool or an extension, which only the operator changes"
    if change.path in places.prompts or change.path.lower().endswith(".md"):
        return None
    return "besides documents and prompts, changesets have Markdown files (.md) only; the rest is the operator's"


def refused_documents(before: Sequence[Written], after: Sequence[Written], prompts: Collection[str] = ()) -> list[str]:
    """The changes in documents that a changeset may not make: one sentence for each. `prompts`: the files that prompts
    are in now, by their paths from the bundle's folder.
    """
    old, new = _by_name(before), _by_name(after)
    found = [f"{name} is {'added' if name in new else 'removed'}" for name in sorted(old.keys() ^ new.keys())]
    if len(old) != len(before) or len(new) != len(after):
        found.append("a resource stands twice in the bundle")
    judge = _Judge(old, prompts)
    for name in sorted(old.keys() & new.keys()):
        if old[name].file != new[name].file:
            found.append(f"{name} is moved to another file")
        if not _same(old[name].value, new[name].value):
            found += judge.document(name, old[name].value, new[name].value)
    return found


def _by_name(documents: Iterable[Written]) -> dict[str, Written]:
    return {document.resource: document for document in documents}


class _Judge:
    """Compares documents. `bundle` is the bundle as it is."""

    def __init__(self, bundle: Mapping[str, Written], prompts: Collection[str]) -> None:
        self._bundle = bundle
        self._prompts = prompts

    def document(self, name: str, old: Any, new: Any) -> Iterator[str]:
        """What is refused in one that has changed."""
        allowed: dict[str, Callable[[Any, Any, Any], Iterator[str]]]
        if name.startswith("Agent/"):
            allowed = {"prompt": self._prompt, "tools": self._tools, "extensions": self._extensions}
        elif name.startswith("Extension/"):
            allowed = {"config": self._config}
        else:
            yield f"{name} is changed"
            return
        for key in sorted(_keys(old) | _keys(new)):
            if key != "spec" and not _same(_get(old, key), _get(new, key)):
                yield f"{name}: {key} is changed"
        was, now = _get(old, "spec"), _get(new, "spec")
        for key in sorted(_keys(was) | _keys(now)):
            if _same(_get(was, key), _get(now, key)):
                continue
            if key in allowed:
                yield from (f"{name}: spec.{key}: {why}" for why in allowed[key](_get(was, key), _get(now, key), old))
            else:
                yield f"{name}: spec.{key} is changed"

    def _prompt(self, old: Any, new: Any, agent: Any) -> Iterator[str]:
        for key in sorted((_keys(old) | _keys(new)) - {"system", "systemRef"}):
            if not _same(_get(old, key), _get(new, key)):
                yield f"{key} is changed"
        named = _get(new, "systemRef")
        if not isinstance(named, str) or _same(named, _get(old, "systemRef")):
            return
        if named not in self._prompts and not named.lower().endswith(".md"):
            yield "systemRef names a file that is no prompt yet and no Markdown file"

    def _tools(self, old: Any, new: Any, agent: Any) -> Iterator[str]:
        was, now = _uses(old), _uses(new)
        patterns = _get(_get(_get(_get(agent, "spec"), "policy"), "toolCalls"), "extensionsMayAdd")
        for ref, use in now.items():
            if ref not in was:
                if self._has_own(agent):
                    yield from self._added_tool(ref, use, patterns)
                else:
                    yield f"{ref} is added to an agent that has no extension of the bundle's own"
            elif not _same(_get(was[ref], "sandbox"), _get(use, "sandbox")):
                yield f"the sandbox of {ref} is changed"
        yield from (f"{ref} is removed, and with it what narrows its sandbox" for ref, use in was.items()
                    if ref not in now and _get(use, "sandbox") is not None)  # fmt: skip

    def _added_tool(self, ref: str, use: Any, patterns: Any) -> Iterator[str]:
        package, _, name = ref.rpartition(" ")
        if _get(use, "sandbox") is not None:
            yield f"{ref} is added with a sandbox of its own"
        declared = self._bundle.get(name) if not package else None
        if declared is None:
            exports = [f"{name.partition('/')[2]}__*"]
        else:
            tool = _get(_get(declared.value, "metadata"), "name")
            exports = [
                f"{tool}__{_get(export, 'name')}" for export in _items(_get(_get(declared.value, "spec"), "exports"))
            ]
        if not isinstance(patterns, list):
            if declared is None:
                yield f"{ref} is no Tool of the bundle, and no pattern of policy.toolCalls.extensionsMayAdd names it"
            return
        for export in exports:
            if not any(isinstance(pattern, str) and fnmatchcase(export, pattern) for pattern in patterns):
                yield f"no pattern of policy.toolCalls.extensionsMayAdd names {export}"
                return

    def _has_own(self, agent: Any) -> bool:
        """Whether an agent has an extension of the bundle's own: bundled ones widen nothing."""
        for ref in _uses(_get(_get(agent, "spec"), "extensions")):
            declared = self._bundle.get(ref)
            entry = None if declared is None else _get(_get(declared.value, "spec"), "entry")
            if isinstance(entry, str) and not entry.startswith(f"{BASE}/"):
                return True
        return False

    def _extensions(self, old: Any, new: Any, agent: Any) -> Iterator[str]:
        was, now = _uses(old), _uses(new)
        yield from (f"{ref} is {'added' if ref in now else 'removed'}" for ref in sorted(was.keys() ^ now.keys()))
        for ref in was.keys() & now.keys():
            declared = self._bundle.get(ref)
            why = _why_config(declared, _get(was[ref], "config"), _get(now[ref], "config"))
            if why is not None:
                yield f"{ref}: {why}"

    def _config(self, old: Any, new: Any, extension: Any) -> Iterator[str]:
        name = f"Extension/{_get(_get(extension, 'metadata'), 'name')}"
        why = _why_config(self._bundle.get(name), old, new)
        if why is not None:
            yield why


def _why_config(extension: Written | None, old: Any, new: Any) -> str | None:
    """Why the config of an extension may not change so."""
    if _same(old, new):
        return None
    entry = None if extension is None else _get(_get(extension.value, "spec"), "entry")
    bundled = entry.removeprefix(f"{BASE}/") if isinstance(entry, str) and entry.startswith(f"{BASE}/") else None
    if extension is None or bundled in GUARDS:
        return "it guards what the agent does, and its config is the operator's"
    if bundled in TRANSPORTS:
        return "its config says what is connected, and is the operator's"
    was, now = dict(_operators(old, "")), dict(_operators(new, ""))
    changed = sorted(path for path in was.keys() | now.keys() if not _same(was.get(path), now.get(path)))
    return f"{changed[0]} of its config is the operator's" if changed else None


def _operators(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every part of a config that is the operator's, by its path."""
    todo = [(path, value)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if str(key).lower() in OPERATORS_KEYS:
                    yield f"{path}/{key}", inner
                else:
                    todo.append((f"{path}/{key}", inner))
        elif isinstance(value, list):
            todo += [(f"{path}/{at}", inner) for at, inner in enumerate(value)]


def _uses(given: Any) -> dict[str, Any]:
    """References of an agent's list, by what they name: `Kind/name`, with the package before it if one is given."""
    found: dict[str, Any] = {}
    for use in _items(given):
        ref = use if isinstance(use, str) else _get(use, "ref")
        if isinstance(ref, dict):
            use, ref = {**ref, **{key: value for key, value in use.items() if key != "ref"}}, None
        if not isinstance(ref, str):
            ref = f"{_get(use, 'kind')}/{_get(use, 'name')}"
        package = _get(use, "package")
        found[f"{package} {ref}" if package else ref] = use
    return found


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _keys(value: Any) -> set[str]:
    return set(value) if isinstance(value, dict) else set()


def _same(one: Any, other: Any) -> bool:
    """Whether two values are written as the same JSON: 1, 1.0 and true are three."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
