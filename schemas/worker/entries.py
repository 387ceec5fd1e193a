"""What runs the entry of a Tool: told by the suffix of its path, and by nothing else. Pure.

Source: docs/design/tools.md section 9; schemas/WORKER.md.
"""

from __future__ import annotations

import posixpath
from typing import Final, Literal

#: `python`: the Python worker loads it. `javascript`: the JavaScript worker loads it, under Node or Bun. `executable`:
#: it is started for each call.
EntryKind = Literal["python", "javascript", "executable"]

#: Suffixes of JavaScript and TypeScript that the worker loads: modules, and what the nearest package.json decides.
JAVASCRIPT: Final = (".js", ".mjs", ".ts", ".mts")
#: Suffixes that nothing loads: CommonJS has no `import`, and JSX needs a compiler. Their files are no programs either.
UNLOADABLE: Final = (".cjs", ".cts", ".jsx", ".tsx")


def entry_kind(entry: str) -> EntryKind | None:
    """What runs this entry. None: nothing does (UNLOADABLE)."""
    suffix = posixpath.splitext(entry)[1]
    if suffix == ".py":
        return "python"
    if suffix in JAVASCRIPT:
        return "javascript"
    return None if suffix in UNLOADABLE else "executable"
