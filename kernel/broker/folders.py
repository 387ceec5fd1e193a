"""The interface by which deletions move the folders of instances. Pure; instance_folders.py implements it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Moved(NamedTuple):
    """The result of moving an instance's folder away."""

    #: The agent.
    agent: str
    #: The key of its instance.
    key: str
    #: Why the folder was not moved; "" when it was.
    problem: str = ""


class Folders(Protocol):
    """The folders of all instances."""

    def exists(self, agent: str, key: str) -> bool:
        """Whether the instance has a folder."""

    def move(self, agent: str, key: str, keep_workdir: bool) -> None:
        """Move the folder away, without its workdir if that stays. A missing folder is no error. See `moved`."""

    def moved(self) -> list[Moved]:
        """The results since the last call."""
