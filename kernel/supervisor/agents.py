"""The processes of agents: performs the roster's decisions and tells the roster what happened.

The fork server forks an agent on request, as a child of ours. Each request has the writing end
of a pipe, through which the agent reports that it was welcomed. Its token is made here, for this launch only.

Source: docs/design/processes.md section 3.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from goondan.kernel.supervisor.lifecycle import AgentAction, KillAgent, Roster, Spawn, Tell, TerminateAgent
from goondan.kernel.supervisor.reaping import Child, Exit, Readiness, Reaper
from goondan.kernel.supervisor_client import ProcessInfo
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.control import Exited, Principal, Ready, SpawnFailed
from goondan.schemas.wire.forkserver import MAX_PACKET, WARM, ForkReply, ForkRequest, decode_reply, encode_packet

#: The most replies that are read in one wake-up, so that other descriptors get their turn.
REPLIES_PER_WAKEUP: Final = 64

_log = logging.getLogger("supervisor")


class Agents:
    """All agent processes of the kernel.

    `mint` makes the token of a launch, `log_path` names its log, and `tell` sends a report to the broker. `on_change`
    is called when an agent has ended, `on_hang` when the fork server does not answer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reaper: Reaper,
        *,
        endpoint: str,
        mint: Callable[[Principal, int], str],
        log_path: Callable[[Principal], str],
        tell: Callable[[Exited | Ready | SpawnFailed], None],
        on_change: Callable[[], None],
        on_hang: Callable[[], None],
    ) -> None:
        self.roster = Roster()
        self._loop = loop
        self._reaper = reaper
        self._endpoint = endpoint
        self._mint = mint
        self._log_path = log_path
        self._tell = tell
        self._on_change = on_change
        self._on_hang = on_hang
        self._children: dict[int, Child] = {}
        self._readiness: dict[int, Readiness] = {}
        self._socket: socket.socket | None = None
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._kernel_ready = False

    # --- the fork server

    def kernel_ready(self) -> None:
        """The start of the kernel is over. Fork servers may now do the work that they have postponed."""
        self._kernel_ready = True
        if self._socket is not None:
            with suppress(OSError):  # it died, or it has many requests: then it begins this work by itself
                self._socket.send(WARM)

    def fork_server_up(self, channel: socket.socket) -> None:
        """A fork server listens at the other end of `channel`."""
        self._socket = channel
        self._loop.add_reader(channel, self._replies)
        if self._kernel_ready:
            self.kernel_ready()
        self.perform(self.roster.fork_server(up=True, now=self._loop.time()))

    def fork_server_down(self) -> None:
        """The fork server is gone, and with it every request that it had not answered."""
        channel, self._socket = self._socket, None
        if channel is not None:
            # Its last answers may still be in the buffer: those agents exist.
            self._read(channel)
            self._loop.remove_reader(channel)
            self._loop.remove_writer(channel)
            channel.close()
        self._unsent.clear()
        self.perform(self.roster.fork_server(up=False, now=self._loop.time()))
        self._reaper.sweep_soon()

    def _replies(self) -> None:
        if self._socket is not None and not self._read(self._socket):
            self._loop.remove_reader(self._socket)  # its end of the channel is closed; the reaper reports the death

    def _read(self, channel: socket.socket) -> bool:
        """Handle the replies that have come. False at the end of the stream."""
        for _ in range(REPLIES_PER_WAKEUP):
            try:
                packet = channel.recv(MAX_PACKET)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            try:
                self._answered(decode_reply(packet))
            except DECODE_ERRORS as error:
                _log.error("the fork server sent no reply: %s", error)
        return True

    def _answered(self, reply: ForkReply) -> None:
        now = self._loop.time()
        launch = reply.seq
        if reply.pid is None:
            _log.error("launch %d was refused by the fork server: %s", launch, reply.error)
            self._forget(launch)
            self.perform(self.roster.refused(launch, reply.error or "refused by the fork server", now))
            return
        if self.roster.find(launch) is None:
            self._reaper.sweep_soon()  # nobody expects it any more: an unknown child
            return
        child = self._reaper.watch(reply.pid, lambda seen: self._exited(launch, seen), leads_group=False)
        if child is None:
            self._forget(launch)
            self.perform(self.roster.exited(launch, "it ended before it was ours", now))
            return
        self._children[launch] = child
        self.perform(self.roster.spawned(launch, now))

    def _request(self, principal: Principal, launch: int) -> None:
        request = ForkRequest(
            seq=launch,
            agent=principal.name,
            instance_key=principal.instance_key or "",
            endpoint=self._endpoint,
            token=self._mint(principal, launch),
            parent_pid=os.getpid(),
            log_path=self._log_path(principal),
            broker_uid=os.geteuid(),
        )
        self._readiness[launch] = Readiness(self._loop, lambda: self._ready(launch))
        self._unsent.append((encode_packet(request), launch))
        self._send()

    def _send(self) -> None:
        channel = self._socket
        while self._unsent and channel is not None:
            packet, launch = self._unsent[0]
            readiness = self._readiness.get(launch)
            if readiness is None or readiness.write_fd < 0:
                self._unsent.popleft()  # the launch is over already
                continue
            try:
                socket.send_fds(channel, [packet], [readiness.write_fd])
            except BlockingIOError:
                self._loop.add_writer(channel, self._send)
                return
            except OSError:
                return  # it died; fork_server_down follows
            readiness.handed_over()
            self._unsent.popleft()
        if channel is not None:
            self._loop.remove_writer(channel)

    # --- what happens to agents

    def _ready(self, launch: int) -> None:
        self._readiness.pop(launch, None)
        self.perform(self.roster.ready(launch, self._loop.time()))

    def _exited(self, launch: int, seen: Exit) -> None:
        agent = self.roster.find(launch)
        cause = seen.cause if agent is None else agent.why_ended(seen.cause)
        if agent is not None and not (agent.ordered or seen.clean):
            _log.warning("agent %s/%s ended: %s", agent.principal.name, agent.principal.instance_key, cause)
        self._children.pop(launch, None)
        report = self._forget(launch)
        cause = f"{cause}: {report}" if report else cause
        self.perform(self.roster.exited(launch, cause, self._loop.time(), clean=seen.clean))
        self._on_change()

    def _forget(self, launch: int) -> str | None:
        """Stop reading the pipe of a launch. Returns its report about a failed start, if there is one."""
        readiness = self._readiness.pop(launch, None)
        if readiness is None:
            return None
        report = readiness.report
        readiness.close()
        return report.message if report is not None else None

    # --- performing

    def perform(self, actions: list[AgentAction]) -> None:
        """Perform the decisions of the roster."""
        for action in actions:
            match action:
                case Spawn(principal, launch):
                    self._request(principal, launch)
                case KillAgent(launch):
                    self._child(launch, Child.kill)
                case TerminateAgent(launch):
                    self._child(launch, Child.terminate)
                case Tell(message):
                    if isinstance(message, SpawnFailed):
                        _log.error("agent %s is given up: %s", message.principal.name, message.message)
                    self._tell(message)
        self._schedule()

    def _child(self, launch: int, do: Callable[[Child], None]) -> None:
        child = self._children.get(launch)
        if child is not None:
            do(child)

    def _schedule(self) -> None:
        due = self.roster.next_due()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._loop.call_at(due, self.tick)

    def tick(self) -> None:
        """Let the roster check its deadlines."""
        self.perform(self.roster.tick(self._loop.time()))

    def audit(self) -> None:
        """Compare the processes with the roster, in case an event was lost. Normally there is no difference."""
        self.tick()
        missed, actions = self.roster.audit(self._loop.time())
        if missed:
            _log.error("the backstop found %d wanted agents that nobody had started: %s", len(missed), missed[:3])
        self.perform(actions)
        if self.roster.overdue(self._loop.time()):
            _log.error("the fork server does not answer")
            self._on_hang()

    # --- questions

    @property
    def busy(self) -> bool:
        """Whether any of them has not said goodbye."""
        return not all(agent.is_done for agent in self.roster.live.values())

    def launches(self, agents: Collection[str], *, here: bool = False) -> set[int]:
        """The launches of these agents whose processes live, or may. `here`: those that the broker has welcomed."""
        live = self.roster.live.values()
        return {one.launch for one in live if one.principal.name in agents and (one.was_ready or not here)}

    def processes(self, offset: float) -> list[ProcessInfo]:
        """The agents, for `ps`. `offset` added to the loop's time gives the wall-clock time."""
        rows = []
        for agent in self.roster.live.values():
            child = self._children.get(agent.launch)
            pid = child.pid if child is not None else None
            rows.append(self._row(agent.principal, _STATUS[agent.phase], pid, agent.since + offset))
        waiting = [p for p in self.roster.wanted if p not in self.roster.live]
        return rows + [self._row(principal, "waiting", None, self._loop.time() + offset) for principal in waiting]

    def _row(self, principal: Principal, status: str, pid: int | None, since: float) -> ProcessInfo:
        history = self.roster.histories.get(principal)
        if history is not None and history.loops:
            status = "crash-loop"
        return ProcessInfo(
            role="agent",
            name=principal.name,
            instance_key=principal.instance_key,
            pid=pid,
            status=status,
            since=rfc3339(since),
            restarts=history.restarts if history is not None else 0,
            last_exit=history.last_exit if history is not None else None,
        )


_STATUS: Final = {
    "asked": "starting",
    "starting": "starting",
    "ready": "running",
    "leaving": "stopping",
    "dying": "stopping",
}
