"""The folders that no jail may see, and those that no jail may write to. Pure.

Source: docs/design/sandbox.md sections 1 and 2.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import unreadable, unwritable, within
from goondan.schemas.worker.hidden import runtime_place, uncovered, workspace_of
from goondan.toolhost.policy.subject import HostFacts, Request

#: Read-only in every workdir: their content later runs on the host (hooks and fsmonitor; .pth files; packages, grants).
GUARDED_NAMES: Final = (".git", ".venv", ".goondan")
#: Folders of the system, and those that a jail makes itself; no workdir lies in them.
SYSTEM: Final = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32",
    "/proc", "/run/goondan", "/sbin", "/sys", "/usr",
)  # fmt: skip
#: These folders are no workdirs either; folders in them can be.
TOP: Final = ("/", "/run", "/home", "/var", "/tmp", "/var/tmp")

#: What helps against such a workdir. No grant does.
_ANOTHER: Final = "Give another folder, one for this work alone: mkdir ~/work, then --workdir ~/work."


def check_request(request: Request, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED for a place that no jail may have, or not in the way that is asked for."""
    if request.workdir_real is not None:
        check_workdir(request.workdir_real, host)
    for place in request.write:
        _check_write_grant(place.path, host)
    for place in request.granted:
        _check_read_grant(place.path)
        _check_read_grant(place.shown)
    for place in request.shown:
        for path in (place.path, place.shown):
            if (folder := uncovered(path, host.hidden, request.tool.root)) is not None:
                raise _hidden(place.shown, folder)


def check_workdir(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED when a person's programs run or trust what lies in `path` (resolved)."""
    _check_writable(path, host)
    hidden = [folder for folder in host.hidden if within(path, folder)]
    if hidden:
        if all(workspace_of(path, folder) is None for folder in hidden):
            raise _hidden(f"the workdir {path}", hidden[0])
        return
    if (folder := runtime_place(path)) is not None:
        raise _hidden(f"the workdir {path}", folder)
    if host.home not in ("", "/") and within(host.home, path):
        text = f"{path} is or holds the home directory, with what your own programs run"
        raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)
    if host.home not in ("", "/") and within(path, host.home) and path[len(host.home) + 1 :].startswith("."):
        text = f"{path} lies in a hidden folder of the home directory, which your programs trust"
        raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)


def _check_writable(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED when no jail may write to `path` (resolved): a system folder, an interpreter, our code."""
    if path in TOP or any(within(path, folder) for folder in SYSTEM):
        text = f"{path} is a system folder and cannot be writable for a tool"
        raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)
    for folder in host.trusted:
        if within(path, folder):
            text = f"{path} lies in {folder}, which holds code that runs outside of jails"
            raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)


def _check_write_grant(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED for a write grant to a folder that has our state or code in it or around it."""
    place = runtime_place(path)
    reason = unwritable(path, [*host.hidden, *([place] if place else []), *host.trusted])
    if reason is not None:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be granted for writing: {reason}")


def _check_read_grant(path: str) -> None:
    """Raise E_SANDBOX_DENIED for a grant to read that would put the host's /proc, /dev or the like into a jail."""
    reason = "every jail has its own" if path == "/" else unreadable(path)
    if reason is not None:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be granted: {reason}")


def hidden_in_it(path: str, folder: str) -> GoondanError:
    """The error for a place that is, lies in or holds a hidden folder under a name that is not in the list."""
    text = f"{path} leads to {folder}, which no tool may see: the kernel keeps its state or its sockets there"
    return fail("E_SANDBOX_DENIED", text, suggestion="Name a folder outside of it, and as it is spelt.")


def _hidden(what: str, folder: str) -> GoondanError:
    text = f"{what} lies in {folder}, which no tool may see: the kernel keeps its state or its sockets there"
    return fail("E_SANDBOX_DENIED", text, suggestion="Name a folder outside of it.")


def guard_candidates(folder: str, tool: ToolSpec, protected: list[str], host: HostFacts) -> list[str]:
    """Paths inside the writable `folder` that must be read-only if they exist, each once."""
    wanted = [f"{folder}/{name}" for name in GUARDED_NAMES]
    roots = [*protected, *([tool.root] if tool.root else []), *host.trusted]
    wanted += [path for path in roots if within(path, folder) and path != folder]
    if within(tool.entry, folder):
        wanted.append(tool.entry)
    return list(dict.fromkeys(wanted))
