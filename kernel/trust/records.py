"""The user's agreements: one file for each bundle, `<state root>/trust/<digest of its folder>.json`.

A record is believed only if nobody else could have written it, and if it does not lie inside the bundle or a clone,
where it would come along with them. A record that is not believed is as good as none: the user is asked.
"""

from __future__ import annotations

import os
import pwd
import stat
import time
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.grants.powers import Power
from goondan.kernel.paths import digest, identity
from goondan.kernel.state_root import doubt, is_homes_own, open_state_root
from goondan.schemas.system.directories import DirectoryRefused, open_directory, replace_in
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within

FOLDER: Final = "trust"
#: A record (bytes): a bundle's documents have at most 8 MiB of text, and powers are made from them.
MAX_RECORD: Final = 32 << 20
#: Records that `gdn trust --list` reads.
MAX_RECORDS: Final = 10_000
#: Part of every record; one of another format is not read.
FORMAT: Final = 1


class Record(Struct, frozen=True, rename="camel", kw_only=True):
    """A user's agreement."""

    #: The folder of the bundle, or its file where that is not a goondan.yaml.
    bundle: str
    #: The powers that were agreed to.
    powers: list[Power]
    #: The user says that all of it is their own work, so that changed modules need no question.
    own: bool = False
    #: When: RFC 3339.
    when: str = ""
    #: The user's name or number.
    by: str = ""
    #: How: `question`, `command` or `init`.
    how: str = ""
    #: The version of this record's form.
    format: int = FORMAT


def read(state_root: str, bundle: str) -> Record | None:
    """What was agreed to for the bundle at `bundle`; None when nothing was, or when the record is not believed."""
    if why_not_believed(state_root, bundle) is not None:
        return None
    found = _read(record_path(state_root, bundle))
    return found if found is not None and found.bundle == identity(bundle) else None


def write(state_root: str, bundle: str, powers: Iterable[Power], *, own: bool = False, how: str) -> Record:
    """Agree to `powers`; earlier agreement about the bundle is replaced. Raises GoondanError E_STATE."""
    now = rfc3339_seconds(time.time())
    record = Record(bundle=identity(bundle), powers=list(powers), own=own, when=now, by=_user(), how=how)
    reason = why_not_believed(state_root, bundle)
    if reason is not None:
        raise fail(
            "E_STATE",
            f"nothing can be kept in {state_root}: {reason}",
            suggestion="Set GOONDAN_STATE_ROOT to a folder of your own, or trust for one command with --trust.",
        )
    path = record_path(state_root, bundle)
    open_state_root(state_root, make=True)
    try:
        with open_directory(os.path.dirname(path), make=True, private_from=state_root) as folder:
            data = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
            replace_in(folder.fd, os.path.basename(path), data, sync=True)
    except DirectoryRefused as refused:
        raise fail("E_STATE", str(refused), suggestion=refused.fix) from None
    except OSError as error:
        raise fail("E_STATE", f"{path}: {error.strerror}") from None
    return record


def forget(state_root: str, bundle: str) -> bool:
    """Take back what was agreed to; whether there was something. Raises GoondanError E_STATE."""
    try:
        os.unlink(record_path(state_root, bundle))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise fail("E_STATE", f"{record_path(state_root, bundle)}: {error.strerror}") from None
    return True


def every(state_root: str) -> list[Record]:
    """All records that are believed, by the bundle's path."""
    folder = os.path.join(state_root, FOLDER)
    try:
        names = sorted(os.listdir(folder))[:MAX_RECORDS]
    except OSError:
        return []
    found = [_read(os.path.join(folder, name)) for name in names if name.endswith(".json")]
    kept = [record for record in found if record is not None and why_not_believed(state_root, record.bundle) is None]
    return sorted(kept, key=lambda record: record.bundle)


def why_not_believed(state_root: str, bundle: str) -> str | None:
    """Why records below this state root are not read for the bundle; None when they are."""
    root, subject = os.path.realpath(state_root), identity(bundle)
    # A home directory never comes from somebody else, even if it holds a bundle.
    if within(root, subject) and not is_homes_own(root):
        return "it lies inside the bundle"
    return doubt(root) or _doubt_of_folder(os.path.join(root, FOLDER))


def _doubt_of_folder(path: str) -> str | None:
    """Why the folder of records is not believed. It is ours alone from the beginning, so any group counts as others."""
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return None  # it is made when there is something to write
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISDIR(state.st_mode):
        return f"{path} is no folder"
    if state.st_uid != os.geteuid():
        return f"{path} belongs to uid {state.st_uid}"
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {path} (mode {stat.S_IMODE(state.st_mode):04o})"
    return None


def _read(path: str) -> Record | None:
    try:
        state = os.lstat(path)
        if state.st_uid != os.geteuid() or state.st_mode & 0o022 or not stat.S_ISREG(state.st_mode):
            return None
        record = msgspec.json.decode(read_file(path, MAX_RECORD), type=Record)
    except (OSError, Unreadable, msgspec.DecodeError, RecursionError):
        return None
    return record if record.format == FORMAT else None


def record_path(state_root: str, bundle: str) -> str:
    """Where the record of a bundle is, if there is one."""
    return os.path.join(state_root, FOLDER, f"{digest(bundle)}.json")


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
