"""Where this process may make control groups for jails. Pure; own_groups.py finds it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Tree(Struct, frozen=True, kw_only=True):
    """Where groups can be made: a folder for each controller, None for one that we may not use.

    In version 2 all are the same folder.
    """

    #: The version of control groups.
    version: Literal[1, 2]
    #: Limits memory and counts it.
    memory: str | None = None
    #: Limits processes and counts them.
    pids: str | None = None
    #: Shares the processors out.
    cpu: str | None = None
    #: Counts processor time. Version 2 does that without a controller.
    cpuacct: str | None = None
    #: Freezes all processes of a group. Version 2 does that without a controller.
    freezer: str | None = None

    @property
    def folders(self) -> list[str]:
        """Every folder, each once."""
        found = (self.memory, self.pids, self.cpu, self.cpuacct, self.freezer)
        return list(dict.fromkeys(folder for folder in found if folder is not None))
