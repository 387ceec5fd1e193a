"""What changesets do with a bundle's files: complete or undo half a commit before they are read, and begin a repository
for a new bundle.

Source: docs/changesets.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from goondan.features.changesets.bundle.entries import FOLDER, INTENT
from goondan.kernel.bundle.rules.kinds import Begun

#: What extensions have of it (kinds.api_members).
API: Final = {"swarm_bundle": frozenset(("commit_changeset", "open_changeset"))}

_SAID: Final[dict[str, str]] = {
    "made": "made a git repository of it, with a first commit",
    "there": "it is in a git repository already: commit it there, so that agents can propose changes",
    "no git": "no git is installed: without a repository agents cannot propose changes of the bundle",
    "failed": "no git repository could be made of it: without one agents cannot propose changes of the bundle",
}


def before_reading(state_dir: str) -> None:
    """See kinds.before_reading."""
    if os.path.lexists(os.path.join(state_dir, FOLDER, INTENT)):
        from goondan.features.changesets.bundle.recovery import settle

        settle(state_dir)


def begin(folder: str, names: Sequence[str]) -> Begun:
    """See kinds.begin: makes a git repository of the new files, so that agents can propose changes. When there is a
    repository already, the person commits the files.
    """
    from goondan.features.changesets.bundle.repository import begin_repository

    outcome = begin_repository(folder, names)
    return Begun("repository", outcome, _SAID[outcome])
