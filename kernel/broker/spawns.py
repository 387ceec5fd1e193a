"""What the broker remembers of an instance that was started with `agents.spawn`. Pure."""

from __future__ import annotations

from msgspec import Struct

from goondan.kernel.broker.workdirs import Beneath, Workdir


class Spawned(Struct, frozen=True):
    """An instance that was started with `agents.spawn`."""

    #: The agent that asked first.
    owner_agent: str
    #: The instance key of this agent.
    owner_key: str
    #: When it asked (seconds on the broker's clock).
    created: float
    #: The working directory that the spawn gave; None when the instance has its own.
    cwd: Workdir | None
    #: Sender and frame id of the last spawn, so that a repeat gets the same answer.
    by: tuple[str, str]


class SpawnRecord(Struct, frozen=True, omit_defaults=True):
    """A spawned instance, as a later broker is told of it."""

    #: The agent of the instance.
    agent: str
    #: The instance key.
    key: str
    #: The agent that asked first.
    owner_agent: str = ""
    #: The instance key of this agent.
    owner_key: str = ""
    #: When it asked (seconds since 1970).
    created: float = 0.0
    #: The working directory that the spawn gave (workdirs.Workdir); None when the instance has its own.
    cwd: str | None = None
    #: True when the instance is not remembered any more.
    gone: bool = False
    #: How this directory is reached (workdirs.Workdir).
    beneath: Beneath | None = None
