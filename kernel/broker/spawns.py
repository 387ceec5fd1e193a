"""What is remembered of an instance that somebody has asked for with `agents.spawn`. Pure."""

from __future__ import annotations

from msgspec import Struct

from kernel.broker.workdirs import Beneath, Workdir


class Spawned(Struct, frozen=True):
    """An instance that was asked for with `agents.spawn`. `owner_*` asked first; `created` is on the broker's clock.

    `by` is the sender and the frame id that started it last, so that a repeat is told the same. `cwd`: the working
    directory that it was given, None where it has its own.
    """

    owner_agent: str
    owner_key: str
    created: float
    cwd: Workdir | None
    by: tuple[str, str]


class SpawnRecord(Struct, frozen=True, omit_defaults=True):
    """A spawned instance, remembered beyond the broker's life. `created`: seconds since 1970. `gone`: no more. `cwd`
    and `beneath`: the working directory that it was given (workdirs.Workdir).
    """

    agent: str
    key: str
    owner_agent: str = ""
    owner_key: str = ""
    created: float = 0.0
    cwd: str | None = None
    gone: bool = False
    beneath: Beneath | None = None
