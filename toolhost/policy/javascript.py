"""How the jail of a tool in JavaScript or TypeScript differs from another one. Pure.

- Its tool stands at JAIL_TOOL. Both runtimes look for packages, `package.json` and `tsconfig.json` in every folder
  above a module. At its own path some of those could be a workdir, where any tool puts files.
- The boot stage becomes the runtime in place of our Python worker, when the walls are up.
- The runtime shows read-only, where it lies beside the system.
- Node takes half of the memory that its control group has for its heap. A jail shows no control group, so these files
  say what the tool has. An option would say it too, but with one Node throws away the compiled code that it brings,
  and starts 25 ms later.
- Linux counts address space that V8 takes ahead as data (RLIMIT_DATA). Where a control group keeps the memory, that
  limit is left out.

Source: docs/design/sandbox.md section 9; docs/decisions/144.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.bundle.launch import JavaScriptRuntime, ToolSpec
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.entries import entry_kind
from goondan.toolhost.limits.table import Tree

#: Where the tool's folder is, or its entry when only that shows.
JAIL_TOOL: Final = "/run/goondan/tool"
#: The worker, below the folder of our code.
WORKER: Final = "javascript/worker.mjs"
#: Where a runtime reads the memory of its control group (bytes), in both versions of these.
MEMORY_FILES: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.high",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.soft_limit_in_bytes",
)
#: Without these files, the part of `memoryMb` that Node's heap may take; the rest is its own, that of buffers and that
#: of programs.
_HEAP_PART: Final = 0.5


def is_javascript(tool: ToolSpec) -> bool:
    """Whether a JavaScript runtime loads the entry of this tool."""
    return tool.server is None and entry_kind(tool.entry) == "javascript"


def runtime_of(tool: ToolSpec) -> JavaScriptRuntime | None:
    """The runtime of the tool; None when its entry needs none. Raises GoondanError E_SANDBOX_UNAVAILABLE when it needs
    one and there is none.
    """
    if is_javascript(tool) and tool.javascript is None:
        text = f"no jail of the tool {tool.name} can be made: {tool.lack or 'it has no JavaScript runtime'}"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=tool.lack_fix or None)
    return tool.javascript if is_javascript(tool) else None


def limits_data(tool: ToolSpec, groups: Tree | None) -> bool:
    """Whether each process of the tool is kept to its memory by itself (RLIMIT_DATA)."""
    return not is_javascript(tool) or groups is None or groups.memory is None


def command(runtime: JavaScriptRuntime, code: str, heap_of_mb: int | None) -> list[str]:
    """What the boot stage becomes; `code` is the folder of our code in the jail.

    `heap_of_mb`: the memory of the tool where no MEMORY_FILES say it (MiB).
    """
    worker = f"{code}/{WORKER}"
    if runtime.name == "bun":
        # Whatever lies in the workdir is any tool's: no settings, no variables and no packages come from there.
        return [runtime.program, "--no-install", "--config=/dev/null", "--env-file=/dev/null", "--smol", worker]
    heap = [] if heap_of_mb is None else [f"--max-old-space-size={max(16, int(heap_of_mb * _HEAP_PART))}"]
    # SIGUSR1, which any program in the jail can send, would open the inspector: that runs code in the worker.
    return [runtime.program, *heap, "--disable-sigusr1", "--disable-warning=ExperimentalWarning", worker]


def memory_files(tool: ToolSpec) -> list[tuple[str, str]]:
    """The files of a jail with mounts that say the memory of its tool: (path, text)."""
    return [(path, f"{tool.sandbox.limits.memory_mb << 20}\n") for path in MEMORY_FILES] if is_javascript(tool) else []
