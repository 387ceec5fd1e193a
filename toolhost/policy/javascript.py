"""How the jail of a tool in JavaScript or TypeScript differs from another one. Pure.

- Its tool stands at JAIL_TOOL. Both runtimes look for packages, `package.json` and `tsconfig.json` in every folder
  above a module. At its own path some of those could be a workdir, where any tool puts files.
- The boot stage becomes the runtime in place of our Python worker, when the walls are up.
- The runtime shows read-only, where it lies beside the system.
- Linux counts address space that V8 takes ahead as data (RLIMIT_DATA). Where a control group keeps the memory, that
  limit is left out.

Source: docs/design/sandbox.md section 9; docs/decisions/144.
"""

from __future__ import annotations

from typing import Final

from schemas.entries import entry_kind
from schemas.errors import fail
from schemas.launch import JavaScriptRuntime, ToolSpec
from toolhost.privileges.tree import Tree

#: Where the tool's folder is, or its entry when only that shows.
JAIL_TOOL: Final = "/run/goondan/tool"
#: The worker, below the folder of our code.
WORKER: Final = "javascript/worker.mjs"
#: The part of `memoryMb` that V8's heap may take; the rest is its own, that of buffers and that of programs.
_HEAP_PART: Final = 0.75


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


def command(runtime: JavaScriptRuntime, code: str, memory_mb: int) -> list[str]:
    """What the boot stage becomes; `code` is the folder of our code in the jail."""
    worker = f"{code}/{WORKER}"
    if runtime.name == "bun":
        # Whatever lies in the workdir is any tool's: no settings, no variables and no packages come from there.
        return [runtime.program, "--no-install", "--config=/dev/null", "--env-file=/dev/null", "--smol", worker]
    heap = max(16, int(memory_mb * _HEAP_PART))
    # SIGUSR1, which any program in the jail can send, would open the inspector: that runs code in the worker.
    flags = (f"--max-old-space-size={heap}", "--disable-sigusr1", "--disable-warning=ExperimentalWarning")
    return [runtime.program, *flags, worker]
