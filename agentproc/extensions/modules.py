"""Importing extensions. Only files that the kernel recorded at its start are imported from the bundle.

A bundle can be a workdir of tools. Tools cannot write to its existing files. But a tool could add a module of another
name, a library that would be found before a source, or a compiled form in `__pycache__`. So modules of extensions are
always compiled from their sources, and a file with a recorded digest must still have it.

Source: docs/design/turns.md section 8; docs/design/sandbox.md section 2.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, FrameType, ModuleType
from typing import Final

from goondan.schemas.bundle.launch import ExtensionSpec

_PACKAGE: Final = "__init__.py"
#: In the interpreter's own order: machine code first, then sources; never a compiled form.
_SUFFIXES: Final = (*EXTENSION_SUFFIXES, ".py")


class _Source(SourceFileLoader):
    """Compiles a module from the same bytes whose digest it has compared."""

    def __init__(self, name: str, path: str, digest: str | None) -> None:
        super().__init__(name, path)
        self._digest = digest

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        _compare(self.path, data, self._digest)
        code: CodeType = self.source_to_code(data, self.path)
        return code


class _Library(ExtensionFileLoader):
    def __init__(self, name: str, path: str, digest: str | None) -> None:
        super().__init__(name, path)
        self._digest = digest

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        with open(self.path, "rb") as source:
            _compare(self.path, source.read(), self._digest)
        return super().create_module(spec)


def _compare(path: str, data: bytes, digest: str | None) -> None:
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise ImportError(f"{path} has changed since the kernel was started", path=path)


class _Folder:
    """The modules of one folder. With `recorded` None, every file in it may be imported."""

    def __init__(self, path: str, recorded: Mapping[str, str] | None) -> None:
        self.path = path
        self.recorded = recorded

    def spec(self, fullname: str, relative: str) -> ModuleSpec | None:
        """How to load the module or package that would be at `relative` (a path without a suffix); None when there is
        none.
        """
        for suffix in _SUFFIXES:
            if (found := self._file(relative + suffix)) is not None:
                return spec_from_file_location(fullname, found, loader=self.loader(fullname, relative + suffix))
        inner = f"{relative}/{_PACKAGE}"
        if (found := self._file(inner)) is not None:
            places = [os.path.dirname(found)]
            loader = self.loader(fullname, inner)
            return spec_from_file_location(fullname, found, loader=loader, submodule_search_locations=places)
        if self._holds(relative):
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [f"{self.path}/{relative}"]
            return spec
        return None

    def loader(self, fullname: str, relative: str) -> _Source | _Library:
        """The loader for a file of this folder."""
        kind = _Source if relative.endswith(".py") else _Library
        digest = None if self.recorded is None else self.recorded.get(relative, "")
        return kind(fullname, f"{self.path}/{relative}", digest)

    def _file(self, relative: str) -> str | None:
        path = f"{self.path}/{relative}"
        there = os.path.isfile(path) if self.recorded is None else relative in self.recorded
        return path if there else None

    def _holds(self, relative: str) -> bool:
        """Whether there is a folder of modules at `relative`, as for a package without an `__init__` module."""
        if self.recorded is None:
            return os.path.isdir(f"{self.path}/{relative}")
        return any(path.startswith(f"{relative}/") for path in self.recorded)


class _Inner:
    """Finds submodules of modules that were found in a folder of an extension. It comes first of all finders, so no
    other finder is asked.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder. Raises ModuleNotFoundError."""
        ours = False
        for place in () if path is None else path:
            for folder in _folders:
                if place.startswith(folder.path + "/"):
                    relative = f"{place[len(folder.path) + 1 :]}/{name.rpartition('.')[2]}"
                    if (found := folder.spec(name, relative)) is not None:
                        return found
                    ours = True
        if ours:
            raise ModuleNotFoundError(f"No module named {name!r} when the kernel was started", name=name)
        return None


class _Outer:
    """Finds modules beside an entry. It comes last of all finders, so installed modules are preferred."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if path is not None:
            return None
        asking = _asking()
        order = sorted(_folders, key=lambda folder: folder.path != asking)  # stable
        return next((spec for folder in order if (spec := folder.spec(name, name)) is not None), None)


_folders: list[_Folder] = []
#: Folder -> the modules that were imported from it, by their names.
_imported: dict[str, dict[str, ModuleType]] = {}


def _asking() -> str | None:
    """The folder of the code that runs the import. When several folders have the module, the importer's own comes
    first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_globals.get("__file__")
        own = [folder.path for folder in _folders if isinstance(file, str) and file.startswith(folder.path + "/")]
        if own:
            return max(own, key=len)  # one may lie in another
        frame = frame.f_back
    return None


def _from_folder(module: ModuleType | None, path: str) -> bool:
    """Whether a module was found beside an entry in this folder."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    places = [loader.path] if isinstance(loader, _Source | _Library) else list(getattr(module, "__path__", None) or ())
    return any(place.startswith(path + "/") for place in places)


def _make_room(folder: _Folder) -> None:
    """Put aside modules of other extensions whose names this folder also has. So each extension imports its own
    modules.
    """
    for path, known in _imported.items():
        if path != folder.path:
            tops = {name for name in known if "." not in name and folder.spec(name, name) is not None}
            for name in known:
                if name.partition(".")[0] in tops and sys.modules.get(name) is known[name]:
                    del sys.modules[name]
    sys.modules.update(_imported.get(folder.path, {}))


def _remember(folder: _Folder, before: set[str]) -> None:
    """Record the modules that were imported since there were only those in `before`."""
    new = [(name, sys.modules[name]) for name in sys.modules.keys() - before]
    known = _imported.setdefault(folder.path, {})
    known.update((name, module) for name, module in new if _from_folder(module, folder.path))


def _module_of(entry: str) -> str:
    """The name of the module of a bundled extension: agentproc/base/NAME/ENTRY, or features/FEATURE/base/NAME/ENTRY."""
    places = entry.removesuffix(".py").split("/")
    at = -4 if places[-4] == "agentproc" else -5
    return ".".join(["goondan", *places[at:]])


def import_entry(spec: ExtensionSpec, name: str) -> ModuleType:
    """Run the entry module of an extension under a name of its own. The module of a bundled extension is part of the
    product and imported once. Raises the module's own exceptions, or ImportError.
    """
    place, _, entry = spec.entry.rpartition("/")
    if spec.bundled:
        return import_module(_module_of(spec.entry))
    folder = _Folder(place, spec.modules)
    if not _folders:
        sys.meta_path.insert(0, _Inner)
        sys.meta_path.append(_Outer)
    _folders.append(folder)
    _make_room(folder)
    before = set(sys.modules)
    loader = folder.loader(name, entry)
    module_spec = spec_from_file_location(name, spec.entry, loader=loader)
    if module_spec is None:
        raise ImportError(f"{spec.entry} is no Python module", path=spec.entry)
    module = module_from_spec(module_spec)
    sys.modules[name] = module
    sys.dont_write_bytecode = True  # nothing is written into the bundle
    try:
        loader.exec_module(module)
    finally:
        _remember(folder, before)
    return module
