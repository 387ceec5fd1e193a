"""The state of extensions: objects in memory, and objects that outlive the process.

`api.ext_state()` and `api.instance.shared` are in memory and empty in a new process. `api.state` has one JSON object
for each scope, in a file.

Scopes. `instance` belongs to this agent instance, and one process writes it. `workspace` belongs to all instances of
all agents with the extension, and many processes write it. So a change names the revision that it was made from, and a
change from an older revision is refused.

A file is replaced as a whole and synced, so that a crash leaves the old object or the new one. A file that cannot be
read is an error that names it; it is never overwritten.

Source: docs/extensions.md; requirements STATE-01 to STATE-06.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.agentproc.conversation.file import sync_directory
from goondan.agentproc.extensions.points.results import output_of
from goondan.schemas.bundle.address import path_segment
from goondan.schemas.wire.errors import GoondanError, fail


class ExtState(dict[str, Any]):
    """One extension's own object. A key may be written as an attribute: `state.count` is `state["count"]`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name, None)


class InstanceApi(Struct, frozen=True):
    """`api.instance`."""

    #: One object for all extensions of the agent instance. Begin your keys with the name of your extension
    #: (`guard:data`), and check that another extension's key is there before you use it.
    shared: dict[str, Any]


Scope = Literal["instance", "workspace"]
#: The largest object, as JSON (bytes). State is read and written whole; growing data belongs into files of its own.
MAX_BYTES: Final = 1024 * 1024
#: How often `update` tries again when other processes were faster. Each try costs a lock and two small files.
MAX_TRIES: Final = 100
#: How long to wait for a file's lock (seconds). It is held while two small files are read and written. If it is held
#: longer, the process that holds it was stopped.
LOCK_S: Final = 2.0
#: The pause between two tries to get the lock (seconds).
LOCK_PAUSE_S: Final = 0.002


class StoredState:
    """The stored objects of one extension. `instance_dir` and `state_dir` are absolute."""

    def __init__(self, extension: str, instance_dir: str, state_dir: str) -> None:
        name = path_segment(extension)
        self._files = {
            "instance": f"{instance_dir}/extensions/{name}.json",
            "workspace": f"{state_dir}/extensions/{name}/shared.json",
        }

    def get(self, *, scope: Scope = "instance") -> dict[str, Any]:
        """The object as it was last set, {} at first. You may change it; only `set` stores it. Raises GoondanError
        E_STATE (the file cannot be read), E_USAGE.
        """
        return self.read(scope=scope)[0]

    def read(self, *, scope: Scope = "workspace") -> tuple[dict[str, Any], int]:
        """The object and its revision. The revision grows with each change; 0 means never set. Raises the errors of
        `get`.
        """
        return _read(self._path(scope))

    def set(self, value: dict[str, Any], *, scope: Scope = "instance", revision: int | None = None) -> int:
        """Store an object, durably, and return its revision. `revision` is the one that the change was made from.

        Raises GoondanError E_STATE_CONFLICT when the stored revision is another (nothing is changed); E_USAGE when the
        value is no JSON object, or a workspace object comes without `revision`; E_TOOL_LIMIT beyond MAX_BYTES; E_STATE,
        E_DISK_FULL.
        """
        path = self._path(scope)
        if scope == "workspace" and revision is None:
            message = "a workspace's state is changed by many processes: say which revision the change was made from"
            raise fail("E_USAGE", message, suggestion="Use api.state.update(change, scope='workspace').")
        data = _encoded(value)
        with _locked(path):
            _, stored = _read(path)
            if revision is not None and revision != stored:
                message = f"the state has revision {stored}, the change was made from {revision}"
                raise fail("E_STATE_CONFLICT", message)
            _write(path, b'{"revision":%d,"value":%s}\n' % (stored + 1, data))
        return stored + 1

    def update(
        self, change: Callable[[dict[str, Any]], dict[str, Any]], *, scope: Scope = "workspace"
    ) -> dict[str, Any]:
        """Store the object that `change` makes of the current one, and return it. `change` is called again when another
        process was faster. Raises the errors of `set`, and the exceptions of `change`.
        """
        for _ in range(MAX_TRIES):
            value, revision = self.read(scope=scope)
            made = change(value)
            try:
                self.set(made, scope=scope, revision=revision)
            except GoondanError as error:
                if error.info.code != "E_STATE_CONFLICT":
                    raise
                continue
            return made
        raise fail("E_STATE_CONFLICT", f"others changed the state in {MAX_TRIES} tries")

    def _path(self, scope: Any) -> str:
        path = self._files.get(scope) if isinstance(scope, str) else None
        if path is None:
            raise fail("E_USAGE", f"no scope {str(scope)[:80]!r}; there are: {', '.join(self._files)}")
        return path


def _encoded(value: Any) -> bytes:
    """The object as JSON. Raises GoondanError E_USAGE, E_TOOL_LIMIT."""
    if not isinstance(value, dict):
        raise fail("E_USAGE", f"state is {type(value).__name__}, not an object")
    try:
        output_of(value)  # depth, and keys that are no texts, which JSON would make texts of
        data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise fail("E_USAGE", f"state is no JSON object: {str(error)[:200]}") from None
    if len(data) > MAX_BYTES:
        message = f"state of {len(data)} bytes, limit {MAX_BYTES}"
        raise fail("E_TOOL_LIMIT", message, suggestion="Keep what grows in files of your own.")
    return data


def _read(path: str) -> tuple[dict[str, Any], int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise fail("E_STATE", f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            document = json.loads(file.read(2 * MAX_BYTES))
            value, revision = document["value"], document["revision"]
        except (ValueError, TypeError, KeyError, RecursionError, OSError):
            value, revision = None, None
    if not isinstance(value, dict) or not isinstance(revision, int):
        message = f"{path} holds no state of an extension; it was left as it is"
        raise fail("E_STATE", message, suggestion="Look at the file; mend it, or move it away to begin anew.")
    return value, revision


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of the file at `path`. Its folder is made when it is missing."""
    with _named(path):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        give_up = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise fail("E_STATE", f"{path} is locked by another process, which does nothing with it") from None
                time.sleep(LOCK_PAUSE_S)
        yield
    finally:
        os.close(lock)


def _write(path: str, data: bytes) -> None:
    """Replace the file, durably."""
    new = path + ".new"
    with _named(path):
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except OSError:
            with suppress(OSError):
                os.unlink(new)
            raise
        sync_directory(os.path.dirname(path))


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = "E_DISK_FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "E_STATE"
        raise fail(code, f"{path} cannot be written: {error.strerror}") from None
