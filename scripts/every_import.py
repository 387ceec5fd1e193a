"""Imports each module of the product once, and prints those that cannot be imported.

A fault that only shows when a class is made, such as a struct with two bases, is found by no type checker, and a module
that no test imports at the start is imported by nobody before a user needs it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from scripts.import_circles import PACKAGES, ROOT, graph_of

#: What is found by other paths in a jail, and what runs when it is imported. Their tests run them.
LEFT_OUT: Final = (
    "goondan.toolhost.base.",
    "goondan.toolhost.inside.boot",
    "goondan.features.certify.command.samples.",
    "goondan.features.code_mode.jail.",
    "goondan.features.skills.jail.",
    "goondan.kernel.cli.__main__",
    "goondan.toolhost.launcher.__main__",
    "goondan.toolhost.egress.start",
    "goondan.features.mcp.jail.start",
)


def main() -> int:
    """Print an error for each module that cannot be imported. Returns 1 if there are any."""
    failed = 0
    for module in sorted(graph_of(ROOT, PACKAGES)):
        if module.startswith(LEFT_OUT):
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            print(f"{module}: {type(error).__name__}: {error}")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
