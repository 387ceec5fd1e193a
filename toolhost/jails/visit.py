"""A jail that is asked one thing, and ended."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

from schemas.launch import ToolHostSpec, ToolSpec
from schemas.worker_frames import WORKER_PROTOCOL, Init, WorkerFrame
from toolhost.jails.jail import Jail
from toolhost.policy.facts import look_up
from toolhost.policy.plan import plan
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers
from toolhost.untrusted import Violation

#: What its worker may send (bytes): it says one thing.
OUTPUT_LIMIT: Final = 1 << 20
Told = TypeVar("Told")


class Visit(ABC, Generic[Told]):
    """Who such a jail reports to (jail.Owner)."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._told: asyncio.Future[Told | str] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    async def answer(
        self, tool: ToolSpec, spec: ToolHostSpec, host: HostFacts, powers: Powers, timeout_s: float
    ) -> tuple[Jail, Told | str]:
        """The jail of the tool, which is gone by then, and what was told in it, or in words why nothing was.

        Raises GoondanError where there can be no such jail, TimeoutError, and what `ask` raises.
        """
        jail = await Jail.start(
            lambda: plan(look_up(tool, None, spec, host, powers), host),
            self,
            powers,
            output_limit=OUTPUT_LIMIT,
            name=tool.name,
        )
        try:
            async with asyncio.timeout(timeout_s):
                self.ask(jail, tool)
                return jail, await self._told
        finally:
            jail.kill("the visit is over")
            await self._over

    @abstractmethod
    def ask(self, jail: Jail, tool: ToolSpec) -> None:
        """Tell the worker what to do. May raise OSError."""

    def init(self, jail: Jail, tool: ToolSpec, granted: dict[str, str]) -> Init:
        """The worker's first frame. `granted` are variables."""
        paths = jail.plan.request.import_paths
        return Init(WORKER_PROTOCOL, tool.name, tool.entry, granted, import_paths=paths, jailed=True)

    @abstractmethod
    def hear(self, jail: Jail, frame: WorkerFrame) -> None:
        """A frame of the worker; `tell` what it means."""

    @abstractmethod
    def describe_end(self, jail: Jail, cause: str) -> str:
        """In words: the jail has ended without an answer."""

    def tell(self, what: Told | str) -> None:
        """This is the answer, if there was none before."""
        if not self._told.done():
            self._told.set_result(what)

    def jail_found(self, jail: Jail, pid: int) -> None:
        """It has no network."""

    def jail_frames(self, jail: Jail, frames: list[WorkerFrame]) -> None:
        for frame in frames:
            self.hear(jail, frame)

    def jail_broken(self, jail: Jail, violation: Violation) -> None:
        self.tell(str(violation))

    def jail_printed(self, jail: Jail, text: str) -> None:
        """The last line is in the jail's last words; the others are nobody's business."""

    def jail_gone(self, jail: Jail, cause: str) -> None:
        self.tell(self.describe_end(jail, cause))
        self._over.set_result(None)
