"""The extensions of one agent instance: importing and loading them in order, exchanging them, and letting them go.

Rules.
- Extensions are loaded in the order of the list. Each `register` is awaited before the next begins. When one fails,
  every turn of the agent fails with the reason; the agent does not run without that extension.
- An extension is known by its key, `Extension/<name>`. While its key stays in the list, it keeps its `ext_state`, its
  registrations and its connections in memory. Another order changes nothing. When its `config` or its document changes,
  that extension is unloaded and registered again with the same `ext_state`.
- Before an extension is unloaded, it gets `extension.cleanup`, and its handlers are awaited for at most five seconds.
- Modules are imported under names of their own, so two extensions may have files of the same name. An entry can import
  the modules beside it.

Source: docs/design/turns.md section 8; docs/design/sandbox.md section 2; requirements EXT-06 to EXT-08, LOAD-01 to
LOAD-05, RECONCILE-01 to RECONCILE-05, STATE-01 to STATE-04.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

from msgspec import Struct, structs

from goondan.agentproc.calls.servers import Servers
from goondan.agentproc.extensions import dynamic_tools, engine
from goondan.agentproc.extensions.api import ExtensionApi
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.extensions.points.pipeline import Pipeline
from goondan.agentproc.extensions.points.results import trace_of
from goondan.agentproc.extensions.state import ExtState, StoredState
from goondan.agentproc.turn.configuration import Configuration
from goondan.schemas.bundle import address, extensions
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.servers import holds_server

#: How long `register` may take (seconds).
REGISTER_S: Final = 30.0

log = logging.getLogger("agentproc")


class InstancePaths(Struct, frozen=True):
    """Where the extensions run. The paths are absolute."""

    #: The name of the agent.
    agent: str
    #: The instance key.
    instance_key: str
    #: The folder of the instance's files.
    instance_dir: str
    #: The folder of the workspace's state.
    state_dir: str


class _Loaded(Struct):
    #: Its specification.
    spec: ExtensionSpec
    #: Its module.
    module: ModuleType
    #: Its state in memory.
    state: ExtState


class Extensions:
    """The extensions of one agent instance."""

    def __init__(
        self,
        pipeline: Pipeline,
        tools: dynamic_tools.DynamicTools,
        events: EventBus,
        place: InstancePaths,
        config: Configuration,
        *,
        workdir: Callable[[], str],
        servers: Servers | None = None,
    ) -> None:
        """`workdir` gives the folder that the running turn works in. `servers` None: there are no MCP servers."""
        #: What makes the members of an `api` that features bring, by their names; it gets the name of the extension.
        self.brought: Mapping[str, Callable[[str], object]] = {}
        self._servers = servers
        self._workdir = workdir
        self.pipeline = pipeline
        self.tools = tools
        self._events = events
        self._place = place
        self._config = config
        self._shared: dict[str, Any] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._imported = 0
        self._settled: Sequence[ExtensionSpec] = config.current.extensions  # what `start` loads
        self._fitted: Sequence[ExtensionSpec] = self._settled  # the list that the loaded ones were made to fit last

    @property
    def names(self) -> list[str]:
        """The names of the loaded extensions, in the order of loading."""
        return list(self._loaded)

    async def start(self) -> None:
        """Load the extensions of the configuration in force. Raises GoondanError E_EXTENSION_FAILED."""
        self._settled = self._fitted = ()
        await self.settle(self._config.current.extensions)

    async def settle(self, specs: Sequence[ExtensionSpec]) -> None:
        """A configuration with these extensions is in force. Load, change and unload extensions to match it, unless
        that was done for this same list. `step.config` is applied afterwards. Raises GoondanError E_EXTENSION_FAILED.
        """
        if specs is not self._settled:
            await self.reconcile(specs)
            self._settled = specs

    def fit(self, wanted: Sequence[ExtensionSpec]) -> bool:
        """Whether the loaded extensions match this same list already."""
        return wanted is self._fitted

    async def reconcile(self, wanted: Sequence[ExtensionSpec]) -> None:
        """Make the loaded extensions match `wanted`: unload those that are not in the list, register again those with
        another config, load the new ones. Raises GoondanError E_EXTENSION_FAILED.
        """
        if self.fit(wanted):
            return
        new = [spec for spec in wanted if spec.name not in self._loaded]
        # Several new extensions hold servers: the servers start beside each other, not one after another.
        held = [spec.server for spec in new if spec.server and holds_server(spec.config)]
        if self._servers is not None and len(held) > 1:
            self._servers.begin(held, REGISTER_S)
        try:
            give_state(new, self._place.state_dir)
            await self._fit(wanted)
        finally:
            if self._servers is not None:
                await self._servers.leave_begun()

    async def close(self) -> None:
        """The instance ends. All extensions clean up at the same time."""
        names, self._loaded = list(self._loaded), {}
        await asyncio.gather(*(self._events.clean_up(name) for name in names))
        self._events.close()

    # --- inside

    async def _fit(self, wanted: Sequence[ExtensionSpec]) -> None:
        self._fitted = ()
        names = {spec.name for spec in wanted}
        for name in [name for name in self._loaded if name not in names]:
            await self._let_go(name)
        for spec in wanted:
            known = self._loaded.get(spec.name)
            if known is None:
                await self._load(spec, ExtState())
            elif _differs(known.spec, spec) or self.tools.clashes(spec.name):
                await self._let_go(spec.name)
                await self._load(spec, known.state, known.module)
        self._fitted = wanted

    async def _let_go(self, name: str) -> None:
        await self._events.clean_up(name)
        self._forget(name)
        del self._loaded[name]

    async def _load(self, spec: ExtensionSpec, state: ExtState, module: ModuleType | None = None) -> None:
        try:
            if module is None:
                self._imported += 1
                module = import_entry(spec, f"goondan_extension_{self._imported}")
            register = getattr(module, "register", None)
            if not callable(register):
                raise fail("E_EXTENSION_FAILED", f"extension {spec.name}: {spec.entry} has no function register(api)")
            place = self._place
            api = ExtensionApi(
                spec,
                self.pipeline,
                self.tools,
                self._events,
                state,
                StoredState(spec.name, place.instance_dir, place.state_dir),
                self._shared,
                agent=place.agent,
                instance_key=place.instance_key,
                brought={name: make(spec.name) for name, make in self.brought.items()},
                workdir=self._workdir,
                servers=self._servers,
            )
            await _call(register, api, spec)
        except GoondanError as error:
            self._forget(spec.name)
            log.error("extension %s (%s): %s", spec.name, spec.entry, error)
            if error.info.code == "E_EXTENSION_FAILED":
                raise
            message = f"extension {spec.name} could not be loaded: {error.info.message}"
            raise fail("E_EXTENSION_FAILED", message, suggestion=error.info.suggestion) from None
        except BaseException as error:
            self._forget(spec.name)
            if isinstance(error, asyncio.CancelledError | GeneratorExit) and engine.is_ending():
                raise
            log.error("extension %s (%s) could not be loaded\n%s", spec.name, spec.entry, trace_of(error))
            message = f"extension {spec.name} could not be loaded: {type(error).__name__}: {error}"
            raise fail("E_EXTENSION_FAILED", message[:1000]) from None
        self._loaded[spec.name] = _Loaded(spec, module, state)

    def _forget(self, name: str) -> None:
        """Remove everything of an extension that could not be loaded."""
        self.pipeline.unregister(name)
        self.tools.unregister_all(name)
        self._events.unsubscribe_all(name)


def give_state(specs: Sequence[ExtensionSpec], state_dir: str) -> None:
    """Show extensions the state of their workspace: each may write to `$GOONDAN_STATE_ROOT/extensions/<name>/`.

    They do not see the state of other bundles' kernels, which share the state root itself. Without extensions the
    variable is not changed.
    """
    if not specs:
        return
    os.environ["GOONDAN_STATE_ROOT"] = state_dir
    for spec in specs:
        try:
            os.makedirs(f"{state_dir}/extensions/{address.path_segment(spec.name)}", 0o700, exist_ok=True)
        except OSError as error:
            log.warning("extension %s has no folder for its state: %s", spec.name, error)


def _differs(one: ExtensionSpec, other: ExtensionSpec) -> bool:
    """Whether an extension has to be registered again. The place of its code does not matter: it is the same code."""
    return structs.replace(one, entry="", modules=None) != structs.replace(other, entry="", modules=None)


async def _call(register: Any, api: ExtensionApi, spec: ExtensionSpec) -> None:
    issues = extensions.check_config(spec.config_schema, spec.config)  # a handler of step.config may have given it
    if issues:
        raise fail("E_EXTENSION_FAILED", f"extension {spec.name}: its config does not fit: {'; '.join(issues[:5])}")
    given = (api, extensions.with_defaults(spec.config_schema, spec.config)) if _takes_config(register) else (api,)
    limit = asyncio.timeout(REGISTER_S)
    try:
        async with limit:
            returned = register(*given)
            if inspect.isawaitable(returned):
                await returned
    except TimeoutError:
        if not limit.expired():
            raise
        raise fail("E_EXTENSION_FAILED", f"extension {spec.name}: register took longer than {REGISTER_S:g} s") from None


def _takes_config(register: Any) -> bool:
    """Whether `register` takes `(api, config)`."""
    try:
        parameters = list(inspect.signature(register).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


# --- importing --------------------------------------------------------------------------------------------------------

# Only files that the kernel recorded at its start are imported from the bundle. A bundle can be a workdir of tools.
# Tools cannot write to its existing files. But a tool could add a module of another name, a library that would be found
# before a source, or a compiled form in `__pycache__`. So modules of extensions are always compiled from their sources,
# and a file with a recorded digest must still have it.

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


class _Folder(Struct, eq=False):
    """The modules of one folder. With `recorded` None, every file in it may be imported."""

    #: The folder.
    path: str
    #: The digests of its modules, by their paths in it.
    recorded: Mapping[str, str] | None

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


def _put_others_aside(folder: _Folder) -> None:
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
    _put_others_aside(folder)
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
