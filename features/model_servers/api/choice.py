"""The model server of this machine that a person has chosen: `$GOONDAN_STATE_ROOT/model-server.json`.

It counts for `provider: auto` where the environment names no model. It is always on this machine, and is not used while
somebody else listens on its port. It is believed as trust records are: only where nobody else could have written it.

Source: docs/design/commands.md section 10; docs/design/bundle.md section 6.
"""

from __future__ import annotations

import os
import stat
import time
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from goondan.features.model_servers.api.finding import belongs_to_others
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.state_root import open_state_root
from goondan.kernel.trust.records import why_not_believed
from goondan.schemas.models.origins import is_open, origin_of
from goondan.schemas.system.directories import DirectoryRefused, open_directory, replace_in
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.wire.errors import fail

FILE: Final = "model-server.json"
_MAX_BYTES: Final = 64 << 10
#: Servers that were declined are remembered, so many at most.
_MAX_DECLINED: Final = 32
_FORMAT: Final = 1


class Choice(Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """What a person has said about servers of this machine."""

    #: The base URL of the server; None: none was chosen.
    endpoint: str | None = None
    #: Servers that the person did not want. They are not offered by `gdn run` again.
    declined: list[str] = []
    #: When it was said last: RFC 3339.
    when: str = ""
    #: The version of this form.
    format: int = _FORMAT


def read(state_root: str, bundle: str) -> Choice:
    """What was said, for the bundle at `bundle`; nothing when it is not believed."""
    path = os.path.join(state_root, FILE)
    try:
        state = os.lstat(path)
        if state.st_uid != os.geteuid() or state.st_mode & 0o022 or not stat.S_ISREG(state.st_mode):
            return Choice()
        if why_not_believed(state_root, bundle) is not None:
            return Choice()
        found = msgspec.json.decode(read_file(path, _MAX_BYTES), type=Choice)
    except (OSError, Unreadable, msgspec.DecodeError, RecursionError):
        return Choice()
    if found.format != _FORMAT or (found.endpoint is not None and not is_here(found.endpoint)):
        return Choice()
    return found


def endpoint(state_root: str, bundle: str) -> str | None:
    """The server to use: None when none was chosen, or somebody else listens on its port."""
    chosen = read(state_root, bundle).endpoint
    return None if chosen is None or belongs_to_others(urlsplit(chosen).port or 80) else chosen


def choose(state_root: str, bundle: str, endpoint: str) -> None:
    """Use this server from now on. Raises GoondanError E_STATE."""
    before = read(state_root, bundle)
    declined = [one for one in before.declined if one != endpoint]
    _write(state_root, bundle, Choice(endpoint=endpoint, declined=declined, when=rfc3339_seconds(time.time())))


def decline(state_root: str, bundle: str, endpoint: str) -> None:
    """Offer this server no more when a swarm starts. Raises GoondanError E_STATE."""
    before = read(state_root, bundle)
    declined = [*(one for one in before.declined if one != endpoint), endpoint][-_MAX_DECLINED:]
    _write(state_root, bundle, Choice(endpoint=before.endpoint, declined=declined, when=rfc3339_seconds(time.time())))


def forget(state_root: str) -> bool:
    """Forget everything that was said; whether there was something. Raises GoondanError E_STATE."""
    path = os.path.join(state_root, FILE)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise fail("E_STATE", f"{path}: {error.strerror}") from None
    return True


def is_here(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, over http."""
    origin = origin_of(endpoint)
    return origin is not None and origin.startswith("http:") and not is_open(origin)


def _write(state_root: str, bundle: str, choice: Choice) -> None:
    reason = why_not_believed(state_root, bundle)
    if reason is not None:
        raise fail("E_STATE", f"nothing can be kept in {state_root}: {reason}")
    open_state_root(state_root, make=True)
    try:
        with open_directory(state_root, make=True, private_from=state_root) as folder:
            data = msgspec.json.format(msgspec.json.encode(choice), indent=1) + b"\n"
            replace_in(folder.fd, FILE, data, sync=True)
    except DirectoryRefused as refused:
        raise fail("E_STATE", str(refused), suggestion=refused.fix) from None
    except OSError as error:
        raise fail("E_STATE", f"{os.path.join(state_root, FILE)}: {error.strerror}") from None
