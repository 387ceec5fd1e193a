"""Where this process may make control groups for jails. Pure; own_groups.py finds it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Tree(Struct, frozen=True, kw_only=True):
    """Where groups can be made: the folder of each controller that we may use, None for one that is not to be had.

    In version 2 they are all the same folder; processor time is counted there without a controller, and a group can be
    frozen without one.
    """

    version: Literal[1, 2]
    memory: str | None = None
    pids: str | None = None
    cpu: str | None = None
    cpuacct: str | None = None
    freezer: str | None = None

    @property
    def folders(self) -> list[str]:
        """Every folder, each once."""
        found = (self.memory, self.pids, self.cpu, self.cpuacct, self.freezer)
        return list(dict.fromkeys(folder for folder in found if folder is not None))
