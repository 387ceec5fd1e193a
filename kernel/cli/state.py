"""The state of a bundle's workspace for a command: checked and mended first, with a line for each mending.

The lines go to standard error, so that the output of the command does not change.
"""

from __future__ import annotations

import sys

from goondan.kernel import paths
from goondan.kernel.state_root import StateRoot, open_state_root


def state_of(bundle: str, *, make: bool = False) -> str:
    """The state directory of the bundle at `bundle` (from paths.find_bundle). With `make` a missing one is made.

    Raises GoondanError E_STATE for a state root that must not be used.
    """
    path = paths.state_dir(bundle)
    prepare(paths.root_of(path), path, make=make)
    return path


def checked_root() -> str:
    """The state root, checked and mended. Raises GoondanError E_STATE."""
    root = paths.state_root()
    prepare(root)
    return root


def prepare(root: str, workspace: str | None = None, *, make: bool = False) -> StateRoot:
    """Check a state root and mend it. Each mending is printed. Raises GoondanError E_STATE."""
    from goondan.kernel.cli.output import write

    found = open_state_root(root, workspace=workspace, make=make)
    for line in found.mended:
        write(f"gdn: {line}", stream=sys.stderr)
    if make and paths.is_homeless(root):
        line = f"gdn: there is no home directory to write to; the state goes to GOONDAN_STATE_ROOT={root}"
        write(line, stream=sys.stderr)
    return found
