"""What a changeset may change of a bundle, and which paths it may have. Pure.

A changeset may change the following (docs/changesets.md has it as a table). Everything else is the operator's.
- Prompts: `prompt.system` and `prompt.systemRef` of an Agent, and the files that they name.
- Other Markdown files below the bundle's folder, where no code is.
- `tools` of an Agent: Tools of the bundle, within `extensionsMayAdd`. Those of packages and of `@goondan/base` only
  where a pattern names them.
- `extensions` of an Agent: their order and their `config`.
- `config` of an Extension, but not that of a guard (`@goondan/base/approval`, `budget`, `required-tools-guard`) or of
  `@goondan/base/mcp`, and in no extension transports, sandboxes and permissions.

A document stays in its file, and is neither added nor removed. A narrowing of a tool's sandbox stays.

A path comes out of a folder that anybody may have written to, or out of a repository. It goes into a tree, and from
there onto other people's machines, where names may mean something else: file systems without upper and lower case, with
short names, or that ignore some characters.

Source: docs/decisions/067; requirements BUNDLE-07, BUNDLE-08.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from msgspec import Struct

from goondan.features.changesets.bundle.entries import REGULAR, within_prefix

#: Folders in each other, and bytes of a path.
MAX_DEPTH: Final = 32
MAX_PATH: Final = 1024
#: The characters that some file systems ignore when they compare names.
_IGNORED: Final = frozenset(
    "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
)
#: What Windows takes for a device, with any ending.
_DEVICES: Final = frozenset(
    (
        "con",
        "prn",
        "aux",
        "nul",
        "conin$",
        "conout$",
        *(f"{kind}{digit}" for kind in ("com", "lpt") for digit in range(10)),
    )
)


def why_refused(path: str) -> str | None:
    """Why no changeset may have this path; None when it may."""
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    parts = path.split("/")
    if size > MAX_PATH or len(parts) > MAX_DEPTH:
        return f"its path is longer than {MAX_PATH} bytes or {MAX_DEPTH} folders"
    if not path.isprintable() or any(c in path for c in '\\:"<>|?*'):
        return "its name holds characters that some systems read in another way"
    if any(part in ("", ".", "..") for part in parts):
        return "it is no path in the repository"
    if any(part.endswith((".", " ")) for part in parts):
        return "its name ends with a dot or a space, which some systems leave out"
    if any(fold(part).split(".")[0].rstrip() in _DEVICES for part in parts):
        return "its name means a device on Windows"
    if any(is_git_name(part) for part in parts):
        return "files of this name mean something to git"
    return None


def is_git_name(name: str) -> bool:
    """Whether git, or what hosts repositories, gives a meaning to files of this name, on any system."""
    plain = fold(name)
    return plain.startswith((".git", "git~"))


def fold(name: str) -> str:
    """A name as a file system sees it that knows no upper and lower case and ignores some characters."""
    kept = "".join(c for c in name if c not in _IGNORED)
    return unicodedata.normalize("NFKC", kept).casefold()


def twins(added: Iterable[str], there: Iterable[str]) -> list[tuple[str, str]]:
    """The added paths that would be the same file as another one, or a folder of one, on such a file system."""
    known: dict[str, str] = {}
    for path in there:
        for end in _ends(path):
            known.setdefault(fold(end), end)
    found = []
    for path in added:
        for end in _ends(path):
            other = known.setdefault(fold(end), end)
            if other != end:
                found.append((path, other))
                break
    return found


def _ends(path: str) -> list[str]:
    """The path and every folder above it."""
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


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
