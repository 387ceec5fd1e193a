"""The instances of a workspace, as their folders say. Nothing is opened and nothing is changed."""

from __future__ import annotations

import os
from typing import Any

from msgspec import Struct

from goondan.kernel.trace_files import conversation_files
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.frames import OPERATOR_AGENT


class Found(Struct, frozen=True):
    """One instance."""

    #: The agent.
    agent: str
    #: Its key. None: it is long, and the folder's name holds only a part of it.
    instance_key: str | None
    #: Its folder.
    folder: str
    #: The size of its conversation, without the workdir.
    bytes: int
    #: When it was last written (seconds since 1970).
    written: float

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "agent": self.agent,
            "instanceKey": self.instance_key,
            "folder": self.folder,
            "bytes": self.bytes,
            "written": rfc3339(self.written),
        }


def instances(state_dir: str, agent: str | None = None, key: str | None = None) -> list[Found]:
    """Those that have had an event, the one that was written last first; of one agent, or one key, if given.

    Those of `gdn call` are an agent of their own, which is left out unless it is named.
    """
    found = [
        Found(
            agent=place.agent,
            instance_key=key if key is not None else place.instance_key,
            folder=os.path.dirname(place.path),
            bytes=_size(place.path) + _size(f"{place.path}-wal"),
            written=place.written,
        )
        for place in conversation_files(state_dir, agent, key)
        if agent is not None or place.agent != OPERATOR_AGENT
    ]
    return sorted(found, key=lambda one: -one.written)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it has gone, or there is none
        return 0
