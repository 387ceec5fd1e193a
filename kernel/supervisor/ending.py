"""The end of the processes of a kernel, group by group, before it ends itself or takes its own place.

lifecycle.py decides (`step_stop`). The broker asks the agents to leave, so that they can release their events. When
there is no broker, they get SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from goondan.kernel.supervisor.agents import Agents
from goondan.kernel.supervisor.lifecycle import (
    HURRY_S,
    KILL_WAIT_S,
    STOP_ORDER,
    Finished,
    KillGroup,
    StopAction,
    Stopping,
    TerminateGroup,
    step_stop,
)
from goondan.kernel.supervisor.services import Services
from goondan.schemas.wire.control import Drain

if TYPE_CHECKING:
    from goondan.kernel.supervisor.control_link import ControlLink

#: How long agents get to come to a step boundary and to release their events (seconds). They are killed some time
#: later: by then the broker must have its events back.
DRAIN_S: Final = 2.5
#: The same before a restart (seconds). It is longer, because a call that is cut off has an unknown outcome, and turns
#: go on right after the restart.
RESTART_GRACE_S: Final = 8.0

_log = logging.getLogger("supervisor")


class Ending:
    """The state of the end.

    - `begun`: processes are being ended.
    - `for_good`: the kernel ends with them.
    - `hurry`: no command waits for work that still runs.
    - `changed` must be set when a process has ended, or one of the others has changed.
    """

    def __init__(self) -> None:
        self.begun = False
        self.for_good = False
        self.hurry = False
        self.changed = asyncio.Event()

    async def run(self, services: Services, agents: Agents, control: ControlLink | None) -> tuple[str, ...]:
        """End all processes. Returns the groups that not even SIGKILL has ended in time."""
        loop = asyncio.get_running_loop()
        state: Stopping | None = None
        patience = None if self.for_good else RESTART_GRACE_S + KILL_WAIT_S
        while True:
            self.changed.clear()
            alive = _alive(services, agents)
            if patience is not None and self.for_good:  # a restart that has become an end
                patience = None
                if state is not None and STOP_ORDER[state.index][0] == "agents":
                    until = loop.time() + STOP_ORDER[state.index][1]
                    state = Stopping(state.index, state.killed, min(state.until, until))
                    self._drain(services, control)
            state, actions = step_stop(state, alive, loop.time(), hurry=self.hurry, agents_s=patience)
            for action in actions:
                if isinstance(action, Finished):
                    return action.left
                self._perform(action, services, agents, control)
            if state is None:
                raise AssertionError("a stop that ends says Finished")
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets to be cancelled when the change comes that very moment.
                async with asyncio.timeout_at(state.until):
                    await self.changed.wait()

    def _perform(self, action: StopAction, services: Services, agents: Agents, control: ControlLink | None) -> None:
        match action:
            case TerminateGroup("agents"):
                agents.stop(told=self._drain(services, control))
            case TerminateGroup(group):
                for role in services.group(group):
                    services.terminate(role)
            case KillGroup("agents"):
                _log.warning("agents did not leave in time")
                agents.kill_all()
            case KillGroup(group):
                _log.warning("%s did not leave in time", group)
                for role in services.group(group):
                    services.kill(role)
            case _:
                pass

    def _drain(self, services: Services, control: ControlLink | None) -> bool:
        """Let the broker ask the agents to leave. False when there is no broker."""
        if control is None or not control.ready or services.state["broker"].phase != "ready":
            return False
        if self.for_good:
            control.tell(Drain(round((HURRY_S if self.hurry else DRAIN_S) * 1000), "orchestrator_shutdown"))
        else:
            control.tell(Drain(round(RESTART_GRACE_S * 1000), "restart"))
        return True


def _alive(services: Services, agents: Agents) -> frozenset[str]:
    alive = {group for group, _ in STOP_ORDER if any(services.alive(role) for role in services.group(group))}
    return frozenset(alive | ({"agents"} if agents.alive else set()))
