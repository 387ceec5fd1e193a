"""What deletions want done with the folders of instances. Pure; instance_folders.py does it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Moved(NamedTuple):
    """A folder is out of the way, or `problem` says why it is not."""

    agent: str
    key: str
    problem: str = ""


class Folders(Protocol):
    """The folders of all instances."""

    def exists(self, agent: str, key: str) -> bool:
        """Whether the instance has one."""

    def move(self, agent: str, key: str, keep_workdir: bool) -> None:
        """Take it away, but for its workdir if that stays; one that is not there is no error. `moved` says when."""

    def moved(self) -> list[Moved]:
        """What was done since the last question."""
