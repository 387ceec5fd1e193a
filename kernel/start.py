"""`python -I goondan/kernel/start.py [--packages FOLDER]… MODULE ARG…`: run that module of this installation, no
other one.

`python -m` would put the current directory first on the module path, where a user's `json.py` waits, and PYTHONPATH can
do the same. Isolated (-I) neither happens, but a package that runs from a source tree is not found. So ours is found
by name, before all others, in the folder that `goondan` lies in. That folder itself is never on the path, because
it may be a workdir of tools. The standard library tries to import modules that may not exist, such as `org`. A file of
that name, put there by a tool, must not be imported.

`--packages` names a folder in which our parent has found packages of others that we need (import_path.py). It is
searched last.

The program keeps the descriptors that it was given for itself: the processes that it starts do not inherit them. When
it ends it is not taken apart (`leave`).
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

SUPERVISOR = "goondan.kernel.supervisor"
TOOL_HOST = "goondan.toolhost"
#: What looks into the modules of tools when a workspace is new.
INSPECTION = "goondan.toolhost.inspection"
#: Everything waits for these when a kernel starts, and they speak with this machine alone. See `asyncio_without_tls`.
WITHOUT_TLS = frozenset((SUPERVISOR, TOOL_HOST, INSPECTION))
PACKAGE = "goondan"


class OurPackage:
    """Finds our package in one folder, and nothing else that lies there."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        return PathFinder.find_spec(name, [self._root], target) if name == PACKAGE else None


#: The signals that end a command.
ENDING = frozenset((signal.SIGINT, signal.SIGTERM))


def import_whole(name: str, first: Callable[[], object] | None = None) -> ModuleType:
    """Call `first`, and import a module. A signal that ends commands and comes meanwhile is handled when the import is
    over. Python raises KeyboardInterrupt wherever it is when the signal comes. In the middle of an import that can be a
    callback of the import system, which swallows the exception, or the initialisation of an extension module, which
    crashes: one Ctrl-C in a hundred while `gdn run` imported asyncio and ZeroMQ, and msgspec crashed later.

    Raises what the import raises, and what the handler of the signal raises.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        if first is not None:
            first()
        return import_module(name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def import_without(module: str, instead: Mapping[str, Any]) -> None:
    """Import `module` without the modules that `instead` names. It has for each what `module` takes of it; None: as
    where it is not installed. Whoever asks for one later gets it. One that was imported already stays there.
    """
    left_out = instead.keys() - sys.modules.keys()
    sys.modules.update((name, instead[name]) for name in left_out)  # None makes an import fail
    try:
        import_module(module)
    finally:
        for name in left_out:
            del sys.modules[name]


def asyncio_without_tls() -> None:
    """Import asyncio as in a Python that was built without TLS: it takes a seventh less, and OpenSSL is not loaded.

    That is a way to build Python which asyncio supports.
    """
    import_without("asyncio", {"ssl": None})


class NoTLS:
    """What uvloop takes of ssl when it is imported: each number is 0, each class and each function OSError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0 if name.isupper() else OSError


def uvloop_without_tls() -> None:
    """Import uvloop for a program without TLS: it takes two thirds less."""
    import_without("uvloop", {"ssl": NoTLS()})


def leave_out_tls(module: str) -> None:
    """Import what would load OpenSSL for this program, if it has no use for that."""
    if module in WITHOUT_TLS:
        asyncio_without_tls()
    if module == TOOL_HOST:
        uvloop_without_tls()


def uuid_alone() -> None:
    """Import uuid, as click and msgspec do. It asks platform for the name of this system alone, and that compiles nine
    patterns: 2 ms.
    """
    import_without("uuid", {"platform": SimpleNamespace(system=lambda: os.uname().sysname)})


def msgspec_alone() -> None:
    """Import msgspec as where no development tools are installed. These bring typing_extensions along, which brings
    inspect and seven more: a tenth of what the broker imports.
    """
    uuid_alone()
    import_without("msgspec", {"typing_extensions": None})


class LaterModule:
    """A module that is imported when something of it is asked for which is not `given`."""

    def __init__(self, module: str, **given: Any) -> None:
        vars(self).update(given, module=module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self.module), name)


def zmq_alone() -> None:
    """Import pyzmq. It takes pickle and random for methods that only an extension may call, and asks platform for the
    name of the interpreter alone: 4 ms.
    """
    instead = {
        "pickle": LaterModule("pickle", DEFAULT_PROTOCOL=4),
        "platform": LaterModule("platform", python_implementation=lambda: sys.implementation.name),
        "random": LaterModule("random"),
    }
    import_without("zmq", instead)


def jsonschema_rs_alone() -> None:
    """Import jsonschema_rs. It has the email package read the date of its own build, and nothing else: 5 ms."""
    import_without("jsonschema_rs", {"email.utils": SimpleNamespace(parsedate_to_datetime=str)})


class LaterPattern:
    """A pattern that is compiled at its first use. Until then it has what `re.compile` was given."""

    def __init__(self, *given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(re.compile(*self._given), name)


def yaml_alone() -> None:
    """Import yaml. The patterns are for its reader in Python, and take half of the import; ours reads by libyaml."""
    if "yaml" not in sys.modules:
        sys.modules["re"] = SimpleNamespace(**{**vars(re), "compile": LaterPattern})  # type: ignore[assignment]
        try:
            import_module("yaml")
        finally:
            sys.modules["re"] = re


def leave(end: SystemExit) -> NoReturn:
    """End this process as the interpreter does, but for freeing each object: that takes a tenth of a short life."""
    code = 0 if end.code is None else end.code
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for what threads still do
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was open when this process began
            with suppress(OSError, ValueError):  # nobody reads it
                stream.flush()
    os._exit(code)


if __name__ == "__main__":
    import runpy

    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed already
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.meta_path.insert(0, OurPackage(root))
    # Imports leave no garbage, and looking for it takes a tenth of a start. Programs turn it on when they are ready.
    gc.disable()
    arguments = sys.argv[1:]
    while arguments[0] == "--packages":
        sys.path.append(arguments[1])
        del arguments[:2]
    module = arguments[0]
    sys.argv = arguments
    msgspec_alone()
    leave_out_tls(module)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        leave(end)
