"""What is remembered of changesets: one file each, in the changesets' folder.

Source: docs/changesets.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, Literal

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.lookup import Unreadable
from goondan.kernel.changesets.git import io_error
from goondan.schemas.changesets import ID_DIGITS, CommittedChangeset
from goondan.schemas.system.private_files import replace_file

#: In the state directory.
FOLDER: Final = "changesets"
RECORDS: Final = "records"
WORKTREES: Final = "worktrees"
#: Of a record (bytes).
_MAX_RECORD: Final = 1 << 20
#: Commits that are remembered; the repository has all of them.
MAX_COMMITTED: Final = 1000


class Record(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """One changeset."""

    #: Names it.
    changeset_id: str
    #: Whether it can still be committed.
    state: Literal["open", "committed"]
    #: The agent that opened it.
    agent: str
    #: Its instance.
    instance_key: str
    #: The event whose turn has it. "": it is an operator's.
    event_id: str
    #: The question that it answers. "": it is an operator's.
    request: str
    #: Why it was opened, in the words of whoever opened it.
    reason: str
    #: The commit that it began with.
    base: str
    #: When it was opened: RFC 3339.
    opened_at: str
    #: Where the repository keeps what it knows of the worktree.
    admin_dir: str = ""
    #: The commit that its own commit was made on.
    parent: str = ""
    #: Its own commit.
    commit: str = ""
    #: When it ended: RFC 3339.
    ended_at: str = ""
    #: How the commit ended.
    result: CommittedChangeset | None = None
    #: The changeset that this one takes back.
    reverts: str = ""


class Records:
    """The records in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, RECORDS)

    def all(self) -> list[Record]:
        """All of them, the latest first. What cannot be read is left out."""
        found = []
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                record = self.get(name.removesuffix(".json")) if name.endswith(".json") else None
                if record is not None:
                    found.append(record)
        return sorted(
            found, key=lambda record: (record.ended_at or record.opened_at, record.changeset_id), reverse=True
        )

    def get(self, changeset_id: str) -> Record | None:
        """One of them; None when there is none."""
        if not is_id(changeset_id):
            return None
        try:
            return msgspec.json.decode(read_file(self._path(changeset_id), _MAX_RECORD), type=Record)
        except (Unreadable, msgspec.DecodeError):
            return None

    def put(self, record: Record) -> None:
        """Remember it, durably. Raises GoondanError E_CHANGESET_IO."""
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            replace_file(self._path(record.changeset_id), msgspec.json.encode(record), sync=True)
        except OSError as error:
            raise io_error(f"{self._folder}: {error.strerror}") from None
        if record.state == "committed":
            for old in [one for one in self.all() if one.state == "committed"][MAX_COMMITTED:]:
                self.remove(old.changeset_id)

    def remove(self, changeset_id: str) -> None:
        """Forget it."""
        with suppress(OSError):
            os.unlink(self._path(changeset_id))

    def _path(self, changeset_id: str) -> str:
        return os.path.join(self._folder, f"{changeset_id}.json")


def is_id(text: str) -> bool:
    """Whether it is the form of a changeset's id."""
    return len(text) == ID_DIGITS and all(c in "0123456789abcdef" for c in text)
