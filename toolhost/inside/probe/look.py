"""The handler of the probe: it looks around in its jail and returns what it sees; toolhost/survey.py judges."""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: From this version on, Landlock keeps signals inside.
SCOPES_ABI = 6
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
#: What the worker holds open to see whether a call left something behind (running.py).
_OF_THE_WORKER = ("/proc/loadavg", "/proc/sys/kernel/ns_last_pid", "/proc/1/task/1/children")
_READ_ONLY = ("/", "/dev", "/etc", "/proc/sys/kernel", "/run", "/run/goondan/goondan_tool", "/usr")


def look(context: Any, input: Any) -> dict[str, Any]:
    """Identity, privileges, processes, network, environment, descriptors, namespaces, and what is writable."""
    status = _status()
    with open("/proc/self/net/dev", encoding="utf-8") as source:
        interfaces = [line.split(":")[0].strip() for line in source if ":" in line]
    return {
        "uid": [int(value) for value in status["Uid"].split()[:3]],
        "capabilities": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
        "noNewPrivs": int(status["NoNewPrivs"]),
        "pids": _pids(),
        "interfaces": interfaces,
        "environment": sorted(name.decode() for name in posix.environ),
        "descriptors": _descriptors(),
        "namespaces": {name: posix.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
        "looksOut": _works(lambda: posix.close(posix.open("/proc/1/environ", posix.O_RDONLY))),
        "signalsOut": (input["landlock"] >= SCOPES_ABI and _works(lambda: posix.kill(input["outside"], 0))),
        "writable": [path for path in _READ_ONLY if _can_write(path)],
    }


def _status() -> dict[str, str]:
    with open("/proc/self/status", encoding="utf-8") as source:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in source)}


def _descriptors() -> list[int]:
    """Open descriptors, without those that the worker and this very look have opened."""
    found = []
    for name in posix.listdir("/proc/self/fd"):
        try:
            target = posix.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own
        if target not in _OF_THE_WORKER:
            found.append(int(name))
    return sorted(found)


def _can_write(path: str) -> bool:
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_CLOEXEC
    return _works(lambda: posix.close(posix.open(f"{path}/probe", flags)))


def _pids() -> list[int]:
    """The processes that can be seen; none where /proc cannot be listed."""
    try:
        return sorted(int(name) for name in posix.listdir("/proc") if name.isdigit())
    except OSError:
        return []


def _works(action: Callable[[], None]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


handlers = {"look": look}
