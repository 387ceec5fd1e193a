"""The supervisor's connection to the broker. It reports which processes run and have ended, and gets the wanted set.

It survives a restart of the broker: the link says hello again, and after every welcome the whole inventory is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from goondan.schemas.transport.link import Link
from goondan.schemas.wire import codec, control, errors, frames

#: A link that the broker refused is made again after this time (seconds).
RECONNECT_S: Final = 0.5
#: How long one attempt waits for the welcome (seconds). The broker has reported before that it is ready.
WELCOME_S: Final = 10.0

_log = logging.getLogger("supervisor")
_decode = msgspec.msgpack.Decoder(control.ToSupervisor).decode


class ControlLink:
    """The connection. `on_message` gets the messages of the broker, `inventory` is called at every welcome, and
    `on_welcome` after it.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        on_message: Callable[[control.ToSupervisor], None],
        inventory: Callable[[], control.Inventory],
        on_welcome: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self._on_message = on_message
        self._inventory = inventory
        self._on_welcome = on_welcome
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Connect, and stay connected. Further calls change nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            link = Link(self._endpoint, self._token, on_frame=self._frame, on_welcome=self._welcomed)
            self._link = link
            try:
                await link.start(WELCOME_S)
                await link.closed
                return  # closed by us
            except errors.GoondanError as error:
                _log.error("the control link was refused: %s", error)
            await link.close(0)
            await asyncio.sleep(RECONNECT_S)

    async def end(self) -> None:
        """Close. There is no broker any more."""
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            await self._link.close(0)
            self._link = None

    @property
    def ready(self) -> bool:
        """Whether a broker has welcomed us and is not known to be gone."""
        return self._link is not None and self._link.ready

    def tell(self, message: control.ToBroker) -> None:
        """Report to the broker, if there is one.

        Nothing is kept while there is no broker: the inventory for the next broker has the content of these reports.
        """
        if self._link is not None:
            self._link.send(frames.Frame("runtime.event", payload=codec.to_raw(message)))

    def ping(self) -> float:
        """Ask the broker for a sign of life. Returns when the last one came, in the loop's time."""
        if self._link is None:
            return 0.0
        self._link.send(frames.Frame("ping"))
        return self._link.heard_at

    def _welcomed(self, welcome: frames.Welcome) -> None:
        self.tell(self._inventory())
        self._on_welcome()

    def _frame(self, frame: frames.Frame) -> None:
        if frame.type != "runtime.event":
            return
        try:
            message = _decode(frame.payload)
        except codec.DECODE_ERRORS as error:
            _log.error("the broker sent no control message: %s", error)
            return
        self._on_message(message)
