"""The paths of the bundle, of the state of its workspace, and of the runtime directory with the sockets.

A bundle's identity is its place: `X` and `X/goondan.yaml` are the same workspace and the same kernel, whatever the
spelling. The state lies under `$GOONDAN_STATE_ROOT` (default `~/.goondan`), the sockets usually under
`$XDG_RUNTIME_DIR/goondan/` or `/tmp/goondan-<uid>/`; kernels with different state roots never meet, so the runtime
directory is named after both. Only names are made here, after a look at what is there: kernel/rundir.py creates and
checks the runtime directory, kernel/state_root.py the state root; the kernel's record (kernel/lock.py) says which
runtime directory it is.

Source: docs/design/processes.md section 8; requirement STATE-07.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from goondan.schemas.worker.grantable import KEYS, TOP, within

if TYPE_CHECKING:
    from goondan.schemas.wire.errors import GoondanError

try:  # hashlib loads OpenSSL, which takes 4 ms of each command; a path and a message are short
    import _sha256 as _hashes  # type: ignore[import-not-found]
except ImportError:  # a later Python has it elsewhere
    import hashlib as _hashes

BUNDLE_FILE: Final = "goondan.yaml"
#: Characters of a digest in a path: enough against accidents, short enough for socket paths.
DIGEST_CHARS: Final = 16
#: Longest path of a socket (sockaddr_un holds 108 bytes with the final zero).
MAX_SOCKET_PATH: Final = 107
#: Where runtime directories are made when there is no usable XDG_RUNTIME_DIR.
FRESH_BASE: Final = "/tmp"
#: The places for the state when there is no home directory. Files in the first one survive a restart of the machine.
HOMELESS: Final = ("/var/tmp", "/tmp")
#: The longest name of a socket in a runtime directory.
LONGEST_SOCKET: Final = "supervisor.sock"
#: The environment variable that names another file for a key.
KEY_VARIABLE: Final = "GOONDAN_KEY_FILE"
#: The folder of the running kernel in the state of its workspace, and its record there (kernel/lock.py).
FOLDER: Final = "kernel"
RECORD: Final = "kernel.json"


def fail(code: str, message: str, *, suggestion: str | None = None) -> GoondanError:
    """See goondan.schemas.wire.errors.fail, which a command has no time to import before it needs it."""
    from goondan.schemas.wire import errors

    return errors.fail(code, message, suggestion=suggestion)


def find_bundle(given: str | None, *, cwd: str | None = None) -> str:
    """The absolute path of the bundle that a command means: `given`, else ./goondan.yaml, else the quickstart.

    Links are resolved. Raises GoondanError E_CONFIG_NOT_FOUND when there is none.
    """
    if given is not None:
        if not given or "\0" in given:
            raise fail("E_CONFIG_NOT_FOUND", "the bundle's path is empty or holds a zero byte")
        path = os.path.expanduser(given)
        path = os.path.realpath(path if os.path.isabs(path) else os.path.join(cwd or _cwd(), path))
        if not is_utf8(path):
            raise fail("E_CONFIG_NOT_FOUND", "the bundle's path is not UTF-8", suggestion="Move it to another place.")
        if not os.path.exists(path):
            raise fail("E_CONFIG_NOT_FOUND", f"{given}: no such file or directory")
        return path
    here = os.path.join(cwd or _cwd(), BUNDLE_FILE)
    if os.path.exists(here):
        return find_bundle(here)
    for folder in quickstart_folders():
        path = os.path.join(folder, BUNDLE_FILE)
        if os.path.isfile(path):
            return os.path.realpath(path)
    raise fail("E_CONFIG_NOT_FOUND", f"there is no {BUNDLE_FILE} here, and the quickstart is not installed")


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise fail("E_CONFIG_NOT_FOUND", f"the current directory cannot be used: {error.strerror}") from None


def is_utf8(path: str) -> bool:
    """Whether a path can be sent, stored and printed: the system allows names that are no text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def quickstart_folders() -> list[str]:
    """The places of the quickstart bundle: in the source tree, or where an installation puts it."""
    source_tree = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [
        os.path.join(source_tree, "examples", "quickstart"),
        os.path.join(sys.prefix, "share", "goondan-kernel", "examples", "quickstart"),
    ]


def identity(bundle: str) -> str:
    """The path that names a bundle's workspace: its directory for `goondan.yaml` and for directories, else the file
    itself.
    """
    path = os.path.realpath(bundle)
    return os.path.dirname(path) if os.path.basename(path) == BUNDLE_FILE and not os.path.isdir(path) else path


def sha256(data: bytes) -> str:
    """The digest in hexadecimal digits."""
    return str(_hashes.sha256(data).hexdigest())


def digest(bundle: str, *also: str) -> str:
    """The short digest that stands for a bundle in paths."""
    parts = "\0".join((identity(bundle), *also))
    return sha256(parts.encode("utf-8", "surrogateescape"))[:DIGEST_CHARS]


def state_root(env: Mapping[str, str] | None = None) -> str:
    """`$GOONDAN_STATE_ROOT`, else `~/.goondan`; absolute. Without a home directory that can be written to, a private
    folder of this user where temporary files survive a restart: the same one each time.

    Raises GoondanError E_STATE for a name that is no text.
    """
    variables = os.environ if env is None else env
    given = variables.get("GOONDAN_STATE_ROOT")
    root = os.path.expanduser(given or "~/.goondan")
    if root.startswith("~") or (not given and not _has_room(root)):
        root = next(homeless_roots(), "")
        if not root:
            raise fail("E_STATE", "there is no home directory for ~/.goondan", suggestion="Set GOONDAN_STATE_ROOT.")
    if not is_utf8(root):
        raise fail("E_STATE", "the path of the state root is not UTF-8", suggestion="Set GOONDAN_STATE_ROOT.")
    return os.path.abspath(root)


def is_homeless(root: str) -> bool:
    """Whether a state root is one of those that are used for want of a home directory."""
    return os.path.basename(root).startswith(_homeless_name()) and "GOONDAN_STATE_ROOT" not in os.environ


def _has_room(root: str) -> bool:
    """Whether ~/.goondan can be used, or made. One of somebody else counts: it is refused later, with the reason."""
    try:
        state = os.stat(root)
    except OSError:
        return os.access(os.path.dirname(root), os.W_OK | os.X_OK, effective_ids=True)
    return state.st_uid != os.geteuid() or os.access(root, os.W_OK | os.X_OK, effective_ids=True)


def homeless_roots() -> Iterator[str]:
    """State roots for whoever has no home directory, the best first: one that is ours already, then those to be made.

    Everybody can make names where they lie. A name that another user has taken is passed over, and what is ours cannot
    be taken away there.
    """
    bases = [base for base in dict.fromkeys(HOMELESS) if os.access(base, os.W_OK | os.X_OK, effective_ids=True)]
    free = []
    for base in bases:
        taken: dict[str, bool] = {}
        with suppress(OSError), os.scandir(base) as entries:
            for entry in entries:
                if entry.name.startswith(_homeless_name()):
                    with suppress(OSError):
                        state = entry.stat(follow_symlinks=False)
                        taken[entry.name] = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
        yield from (os.path.join(base, name) for name in sorted(taken) if taken[name] and _is_homeless_name(name))
        names = (_homeless_name() + (f".{number}" if number else "") for number in range(len(taken) + 1))
        free.append(os.path.join(base, next(name for name in names if name not in taken)))
    yield from free


def _homeless_name() -> str:
    return f"goondan-state-{os.geteuid()}"


def _is_homeless_name(name: str) -> bool:
    rest = name.removeprefix(_homeless_name())
    return not rest or (rest.startswith(".") and rest[1:].isdecimal())


def state_dir(bundle: str, env: Mapping[str, str] | None = None) -> str:
    """Where the workspace of `bundle` keeps its state."""
    return os.path.join(state_root(env), "workspaces", digest(bundle))


def root_of(state_dir: str) -> str:
    """The state root that a workspace's state directory lies in; the directory itself when it lies in none."""
    above = os.path.dirname(state_dir)
    return os.path.dirname(above) if os.path.basename(above) == "workspaces" else state_dir


def run_dirs(bundle: str, env: Mapping[str, str] | None = None, *, base: str = FRESH_BASE) -> list[str]:
    """The usual runtime directories of the kernel of `bundle`, the best first: under XDG_RUNTIME_DIR where that is
    usable, and under `base`. Those in which paths of sockets would have more than 107 bytes are left out.
    """
    variables = os.environ if env is None else env
    name = runtime_name(bundle, env)
    candidates: list[str] = []
    runtime = variables.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_private(runtime):
        candidates.append(os.path.join(runtime, "goondan", name))
    candidates.append(f"{base}/goondan-{os.geteuid()}/{name}")
    return [path for path in candidates if socket_bytes(path) <= MAX_SOCKET_PATH]


def runtime_name(bundle: str, env: Mapping[str, str] | None = None) -> str:
    """The name of the runtime directory of `bundle`: kernels with different state roots never meet in one."""
    return digest(bundle, os.path.realpath(state_root(env)))


def fresh_name(token: str) -> str:
    """The name of a folder for runtime directories that nobody can foresee: `token` is random."""
    return f"goondan-{os.geteuid()}-{token}"


def socket_bytes(run_dir: str) -> int:
    """The length of the longest path of a socket in a runtime directory (bytes)."""
    return len(os.fsencode(os.path.join(run_dir, LONGEST_SOCKET)))


def prepare_private(path: str) -> None:
    """Make a directory and those above it, each closed to others. Raises GoondanError E_STATE."""
    from goondan.schemas.system.directories import DirectoryRefused, open_directory

    try:
        open_directory(path, make=True).close()
    except DirectoryRefused as refused:
        raise fail("E_STATE", f"{refused.path} {refused.problem}", suggestion=refused.fix) from None
    except OSError as error:
        raise fail("E_STATE", f"{error.filename or path}: {error.strerror}") from None


def _is_private(path: str) -> bool:
    """Whether a directory that the environment names is absolute, ours, and closed to others."""
    if not os.path.isabs(path):
        return False
    try:
        state = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077


def key_file(env: Mapping[str, str], home: str, name: str) -> str:
    """The path of a key with which something in the state root is encrypted: $GOONDAN_KEY_FILE, otherwise
    goondan/keys/NAME below $XDG_CONFIG_HOME or ~/.config. No jail sees its folder.
    """
    given = env.get(KEY_VARIABLE, "")
    if given.startswith("/"):
        return os.path.normpath(given)
    config = env.get("XDG_CONFIG_HOME", "")
    folder = f"{config}/goondan/keys" if config.startswith("/") else f"{home}/{KEYS}"
    return os.path.normpath(f"{folder}/{name}")


def is_shared(folder: str, home: str) -> bool:
    """Whether a folder must not hold keys: the home directory, one above it, or one of the system. No jail sees a
    folder with a key, and jails have to see these.
    """
    return folder in TOP or within(home, folder) or folder.count("/") < 2
