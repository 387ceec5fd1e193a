"""A jail that answers one question and is then ended."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

from goondan.schemas.bundle.launch import ToolHostSpec, ToolSpec
from goondan.schemas.worker.worker_frames import WORKER_PROTOCOL, Init, WorkerFrame
from goondan.toolhost.facts.request import look_up
from goondan.toolhost.jails.jail import Jail
from goondan.toolhost.jails.launch import launch
from goondan.toolhost.jails.worker import Worker
from goondan.toolhost.policy.plan import plan
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.untrusted import Violation

#: What its worker may send (bytes): one answer.
OUTPUT_LIMIT: Final = 1 << 20
Told = TypeVar("Told")


class Visit(ABC, Generic[Told]):
    """The object that such a jail reports to (jail.JailOwner)."""

    def __init__(self) -> None:
        #: The jail, once it is there.
        self.jail: Jail | None = None
        loop = asyncio.get_running_loop()
        self._told: asyncio.Future[Told | str] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    async def answer(
        self, tool: ToolSpec, spec: ToolHostSpec, host: HostFacts, powers: Powers, timeout_s: float
    ) -> tuple[Jail, Told | str]:
        """The jail of the tool, which is gone by then, and its answer, or in words why there is none.

        Raises GoondanError when no such jail can be made, TimeoutError, and what `ask` raises.
        """
        launched = await launch(lambda: plan(look_up(tool, None, spec, host, powers), host), powers)
        loop = asyncio.get_running_loop()
        jail = self.jail = Jail(launched, self, powers, loop, output_limit=OUTPUT_LIMIT, name=tool.name)
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
        return Init(WORKER_PROTOCOL, tool.name, jail.plan.request.entry, granted, import_paths=paths, jailed=True)

    @abstractmethod
    def hear(self, jail: Jail, frame: WorkerFrame) -> None:
        """Handle a frame of the jail's worker, or of the worker of a call in it; `tell` the answer."""

    @abstractmethod
    def describe_end(self, jail: Jail, cause: str) -> str:
        """In words: how the jail ended without an answer."""

    def tell(self, what: Told | str) -> None:
        """Take this as the answer, unless there is one already."""
        if not self._told.done():
            self._told.set_result(what)

    def jail_found(self, jail: Jail, pid: int) -> None:
        """It has no network."""

    def worker_frames(self, worker: Worker, frames: list[WorkerFrame]) -> None:
        if self.jail is not None:
            for frame in frames:
                self.hear(self.jail, frame)

    def worker_broken(self, worker: Worker, violation: Violation) -> None:
        self.tell(str(violation))

    def worker_printed(self, worker: Worker, text: str) -> None:
        """Nothing to do: the worker's last words hold the last line, and nobody needs the others."""

    def worker_gone(self, worker: Worker, cause: str) -> None:
        if isinstance(worker, Jail):
            self.tell(self.describe_end(worker, cause))
            self._over.set_result(None)
        elif worker.last_words:
            self.tell(f"{worker.last_words} ({cause})")
