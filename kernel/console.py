"""The entry point of the `gdn` of an installed wheel. It puts the module path in order before it imports anything else.

pip writes that script, and its interpreter is not isolated. What it has imported by then cannot be taken back; see
docs/decisions/044.
"""

from __future__ import annotations

from typing import NoReturn

from goondan.kernel.import_path import leave_current_folder


def main() -> NoReturn:
    """Run the command that was given. Ends the process."""
    leave_current_folder()
    from goondan.kernel.cli import main as run

    run()
