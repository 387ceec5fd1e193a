"""Running a bundle that others can write to from a copy that they cannot: `<state_dir>/private/<random>/`.

Copied is what is run: the folders of extensions and of the bundle's own tools, at their places in the bundle's folder.
Documents and prompts are in the plan already. Modules must have the digests that were judged; a copy in which one has
another is thrown away, and nothing starts.

The folder may change while it is read, and not by accident: a folder can become a link to one of the user's. So each
component is opened below the one before it, and links are never followed, only copied as links.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import MAX_MODULE_BYTES, Unreadable
from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec, KernelPlan, SandboxSpec, ServerSpec, ToolSpec
from goondan.schemas.system.directories import remove_tree
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import COPIES, within

#: Files, bytes and nested folders of one copy. A tool's or an extension's folder with more holds something else as
#: well, and copying it would take longer than the rest of a start.
MAX_FILES: Final = 20_000
MAX_BYTES: Final = 512 << 20
MAX_DEPTH: Final = 40
#: Never needed to run: what git keeps, and compiled forms, which are not believed.
_LEFT_OUT: Final = frozenset((".git", "__pycache__"))
_CHUNK: Final = 1 << 20


def with_private_copy(plan: KernelPlan, root: str) -> KernelPlan:
    """The plan, with everything of the bundle at `root` (absolute, links resolved) run from a new private copy.

    Raises GoondanError E_BUNDLE_UNTRUSTED when a module has changed since it was judged, E_STATE without a copy.
    """
    place = os.path.join(plan.state_dir, COPIES, os.urandom(8).hex())
    extensions = [one for agent in plan.agents.values() for one in agent.extensions if not one.bundled]
    tools = [tool for tool in plan.toolhost.tools if not tool.bundled and within(tool.root, root)]
    wholes = {tool.name: _whole(tool, root) for tool in tools}
    try:
        os.makedirs(plan.state_dir, 0o700, exist_ok=True)
        os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
        # Jails run as users of their own: what they are shown must be readable for them. The folders above are closed.
        os.mkdir(place, 0o755)
        copy = _Copy(root, place)
        for path in _outermost([*wholes.values(), *_folders(extensions, root)]):
            copy.take(path)
        for extension in extensions:
            copy.take_modules(os.path.dirname(extension.entry), extension.modules or {})
    except OSError as error:
        remove_tree(place)
        message = f"no private copy of the bundle can be made: {error.filename or place}: {error.strerror}"
        raise fail("E_STATE", message) from None
    except GoondanError:
        remove_tree(place)
        raise

    def moved(path: str) -> str:
        return place + path[len(root.rstrip("/")) :] if within(path, root) else path

    def agent(spec: AgentSpec) -> AgentSpec:
        own = [one if one.bundled else replace(one, entry=moved(one.entry)) for one in spec.extensions]
        return replace(spec, extensions=own)

    def tool(spec: ToolSpec) -> ToolSpec:
        is_own, runtime = spec in tools, spec.javascript
        if runtime is not None and any(within(path, root) for path in (runtime.program, *runtime.libraries)):
            lack = f"others can write to {root}, where its runtime lies"
            spec = replace(
                spec, javascript=None, lack=lack, lack_fix="Install it elsewhere, or take their right to write."
            )
        if not is_own:
            return spec
        whole = wholes[spec.name]
        own = {name: server(one, whole) for name, one in spec.servers.items()}
        shared = None if spec.server is None else server(spec.server, whole)
        narrowed = {name: reading(left, whole) for name, left in spec.narrowed.items()}
        return replace(
            spec,
            entry=moved(spec.entry),
            root=moved(whole),
            sandbox=reading(spec.sandbox, whole),
            narrowed=narrowed,
            server=shared,
            servers=own,
        )

    def reading(sandbox: SandboxSpec, whole: str) -> SandboxSpec:
        # The copy is shown as the tool's own folder. As a grant it would be refused: it lies beside the kernel's state.
        seen = [path for path in sandbox.filesystem.read if path != whole]
        return replace(sandbox, filesystem=replace(sandbox.filesystem, read=seen))

    def server(spec: ServerSpec, folder: str) -> ServerSpec:
        # A folder beside this one may have a name that begins with its name.
        named = re.compile(re.escape(folder) + r"(?=/|\Z)")
        return replace(spec, command=[named.sub(lambda _: moved(folder), word) for word in spec.command])

    return replace(
        plan,
        agents={name: agent(spec) if spec.extensions else spec for name, spec in plan.agents.items()},
        toolhost=replace(plan.toolhost, tools=[tool(spec) for spec in plan.toolhost.tools]),
        private_copy=place,
    )


def sweep(state_dir: str, keep: str = "") -> None:
    """Remove the copies of earlier kernels. Only for the holder of the kernel's lock."""
    folder = os.path.join(state_dir, COPIES)
    with suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if path != keep:
                remove_tree(path)


def _whole(tool: ToolSpec, root: str) -> str:
    """The folder that belongs to a tool: its own, or the one above it that a server may read. An installed package
    needs those that lie beside it.
    """
    above = [path for path in tool.sandbox.filesystem.read if within(tool.root, path) and within(path, root)]
    return min((path for path in above if path != root and tool.server is not None), key=len, default=tool.root)


def _folders(extensions: Iterable[ExtensionSpec], root: str) -> list[str]:
    """When the entry lies in the bundle's own folder, only its modules are taken."""
    folders = {os.path.dirname(extension.entry) for extension in extensions}
    return [folder for folder in folders if folder != root and within(folder, root)]


def _outermost(paths: Iterable[str]) -> list[str]:
    every = sorted(set(paths))
    return [path for path in every if not any(path != other and within(path, other) for other in every)]


class _Copy:
    """One copy. `root` is the bundle's folder, `place` the copy's."""

    def __init__(self, root: str, place: str) -> None:
        self._root = root
        self._place = place
        self._files = 0
        self._bytes = 0

    def take(self, path: str) -> None:
        """Copy a file or a folder. What went away meanwhile is left out."""
        target = self._target(path)
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        fd = _open_without_links(path)
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                self._folder(fd, target, 0)
            else:
                self._file(fd, target)
        finally:
            os.close(fd)

    def take_modules(self, folder: str, modules: Mapping[str, str]) -> None:
        """Check that each module is there with its digest. Raises GoondanError E_BUNDLE_UNTRUSTED."""
        for name, digest in modules.items():
            target = self._target(f"{folder}/{name}")
            try:
                if not os.path.islink(target) and _digest(read_file(target, MAX_MODULE_BYTES)) == digest:
                    continue
            except Unreadable:
                pass  # it is taken now
            try:
                data = read_file(f"{folder}/{name}", MAX_MODULE_BYTES)
            except Unreadable:
                data = b""
            if _digest(data) != digest:
                message = f"{folder}/{name} has changed while it was read"
                raise fail("E_BUNDLE_UNTRUSTED", message, suggestion="See who changes it, then start again.")
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(target)
            self._count(len(data))
            with open(os.open(target, _NEW, 0o644), "wb") as out:
                out.write(data)

    def _target(self, path: str) -> str:
        return self._place + path[len(self._root.rstrip("/")) :]

    def _folder(self, fd: int, target: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _too_much()
        os.mkdir(target, 0o755)
        names: list[tuple[str, bool]] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.name not in _LEFT_OUT:
                    names.append((entry.name, entry.is_symlink()))
                if len(names) > MAX_FILES:
                    raise _too_much()
        for name, is_link in names:
            inner = f"{target}/{name}"
            with suppress(FileNotFoundError):
                if is_link:
                    self._count(0)
                    os.symlink(os.readlink(name, dir_fd=fd), inner)
                    continue
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                below = os.open(name, flags, dir_fd=fd)
                try:
                    if stat.S_ISDIR(os.fstat(below).st_mode):
                        self._folder(below, inner, depth + 1)
                    else:
                        self._file(below, inner)
                finally:
                    os.close(below)

    def _file(self, fd: int, target: str) -> None:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            return
        self._count(0)
        mode = 0o755 if state.st_mode & 0o111 else 0o644
        with open(os.open(target, _NEW, mode), "wb") as out:
            os.fchmod(out.fileno(), mode)
            while chunk := os.read(fd, _CHUNK):
                self._bytes += len(chunk)
                if self._bytes > MAX_BYTES:
                    raise _too_much()
                out.write(chunk)

    def _count(self, size: int) -> None:
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES or self._bytes > MAX_BYTES:
            raise _too_much()


_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _open_without_links(path: str) -> int:
    """A file or folder by its real path. A component that is a link by now is refused by the system (ELOOP)."""
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    names = [name for name in path.split("/") if name]
    try:
        for name in names[:-1]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(names[-1] if names else ".", flags, dir_fd=fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _too_much() -> GoondanError:
    message = f"the code of the bundle is too much for a private copy: over {MAX_FILES} files or {MAX_BYTES >> 20} MiB"
    hint = "Make its folder writable for nobody but you, or give its tools and extensions folders of their own."
    return fail("E_STATE", message, suggestion=hint)
