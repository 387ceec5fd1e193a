"""Deletes an instance: its work, its process, its jails, its folder, in this order. Pure; `Folders` moves files.

Phases of a deletion: `work` (its events end) -> `process` (its process leaves) -> `jails` (tool hosts end its jails) ->
`tombstone` (the journal writes that it is to go) -> `folder` (its folder is moved away) -> `end` (the journal writes
that it has gone) -> over.

Rules.
- Without `force`, an instance that has work stays, and the refusal names the work. With `force` the work is cancelled:
  whoever waits for an answer gets E_INSTANCE_DELETED.
- Before the tombstone, a deletion can be given up; the instance has lost only its work then. After the tombstone, the
  deletion is carried out, if necessary by the next broker.
- During the deletion, new events and spawns for the instance are refused with E_OVERLOADED; their senders send them
  again. An event after the deletion starts a new instance, which shares only the name with the old one.
- Nobody wants the answers to requests that the instance sent without waiting. A new instance of that name never gets
  them.
- A second question about a deletion joins it. A later question is told of the end for as long as ids are kept.

Source: docs/design/delivery.md section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol

from msgspec import Struct

from goondan.kernel.broker.routing.directory import Directory
from goondan.kernel.broker.routing.ends import Cancels
from goondan.kernel.broker.routing.processes import Processes
from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.bus import MAX_ID, RETURN_S, Bus, join, overloaded
from goondan.kernel.broker.state.entities import TOOLS, Connection, Event, Instance
from goondan.kernel.broker.state.parts import OfHosts, OfInstances, Op, Part, Record, hooks_of
from goondan.schemas.bundle.address import instance_workdir, is_instance_key, is_resource_name
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import OPERATOR_AGENT, ORCHESTRATOR, ErrorPayload, Frame, InstanceEnd, InstanceEnded


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


#: How long a holder may take to end a cancelled turn (seconds). Then its process is killed. Its calls get 2 s to stop.
CANCEL_S: Final = 5.0
#: How long its process may take to end (seconds): the supervisor kills a process that does not leave within 10 s.
LEAVE_S: Final = 15.0
#: How long tool hosts may take to end the jails of an instance (seconds): a killed jail is gone within milliseconds,
#: unless its disk does not answer; a tool host that ended is back within two seconds.
JAILS_S: Final = 15.0
#: How often a tool host that has not answered is asked again (seconds): the question may have been lost.
ASK_AGAIN_S: Final = 2.0
#: A refusal names at most so many ids.
MAX_NAMED: Final = 3

Phase = Literal["work", "process", "jails", "tombstone", "folder", "end", "over"]


class Deletion(Struct):
    """A deletion that is under way."""

    #: The instance that is deleted.
    instance: Instance
    #: True when unfinished work does not prevent the deletion.
    force: bool
    #: When the present phase is given up, or a holder is killed (seconds on the broker's clock).
    until: float
    #: The present phase.
    phase: Phase = "work"
    #: Connection and frame id of everybody who waits for the end.
    askers: list[tuple[Connection, str]] = []
    #: Tool hosts by incarnation: id and time of the last frame to it. None: the host has ended the jails.
    hosts: dict[str, tuple[str, float] | None] = {}
    #: True when others work in the instance's workdir, so that it stays.
    keep_workdir: bool = False


class Deletions(Part, OfHosts):
    """All deletions that are under way."""

    def __init__(
        self,
        bus: Bus,
        cancels: Cancels,
        processes: Processes,
        directory: Directory,
        folders: Folders,
        parts: Sequence[object],
    ) -> None:
        self._bus = bus
        self._cancels = cancels
        self._processes = processes
        self._directory = directory
        self._folders = folders
        self._forgets = hooks_of(parts, OfInstances, OfInstances.forget)
        #: Deletions by agent and instance key.
        self.active: dict[tuple[str, str], Deletion] = {}
        self.ops = (Op("instance.delete", self.ask),)
        #: Records of an earlier broker, until the whole journal was read.
        self._restored: list[records.InstanceDeleted] = []
        self.records = (Record(records.InstanceDeleted, lambda _, record: self._restored.append(record)),)

    def resumed(self, now: float) -> None:
        """Go on with the deletions that an earlier broker had decided."""
        restored, self._restored = self._restored, []
        for tombstone in restored:
            agent, key = tombstone.agent, tombstone.key
            instance = self._bus.instance(agent, key, now)
            instance.deleting = True
            self.active[agent, key] = Deletion(instance, True, now, "folder")
            self._remove(agent, key, tombstone.keep_workdir)

    # --- questions

    def ask(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "instance.delete", agent, instanceKey, force}`: answered when the instance is deleted."""
        agent, key, force = asked.get("agent"), asked.get("instanceKey"), asked.get("force") is True
        if not isinstance(agent, str) or not (is_resource_name(agent) or agent == OPERATOR_AGENT):
            raise fail("E_AGENT_NOT_FOUND", f"{str(agent)[:100]!r} is no agent's name")
        if not isinstance(key, str) or not is_instance_key(key):
            raise fail("E_FRAME_INVALID", f"instanceKey must be 1 to {MAX_ID} visible characters")
        deletion = self.active.get((agent, key))
        if deletion is None:
            if self._bus.closing:
                raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping; the instance was not deleted")
            if self._told_again(connection, frame, agent, key):
                return
            if now - self._bus.started_ms / 1000 < RETURN_S:  # its process may not be back yet
                raise overloaded("the broker has just started and may not know it yet")
            deletion = self._begin(agent, key, force, now)
        join(deletion.askers, connection, frame, "instance")
        deletion.force = deletion.force or force
        self._advance(deletion, now)

    def _told_again(self, connection: Connection, frame: Frame, agent: str, key: str) -> bool:
        """Whether there is no such instance. Then the question may be a repeat, and it is answered here."""
        if (agent, key) in self._bus.mailbox.instances or self._folders.exists(agent, key):
            return False
        if self._bus.archive.find_ended(records.deleted_subject(agent, key)) is None:
            raise fail("E_INSTANCE_NOT_FOUND", f"there is no instance {agent[:100]}/{key[:100]}")
        self._tell(connection, frame.id, agent, key)
        return True

    def _begin(self, agent: str, key: str, force: bool, now: float) -> Deletion:
        known = self._bus.mailbox.instances.get((agent, key))
        work = [] if force or known is None else self._work(known)
        if work:
            raise fail("E_INSTANCE_BUSY", f"{agent}/{key[:100]} has work: {'; '.join(work)}")
        instance = known or self._bus.instance(agent, key, now)
        instance.deleting = True
        self._bus.counters["deletions"] += 1
        deletion = self.active[agent, key] = Deletion(instance, force, now + CANCEL_S)
        return deletion

    def _work(self, instance: Instance) -> list[str]:
        """The unfinished work of the instance, in words."""
        found: list[str] = []
        waiting = [event.id for event in instance.queue]
        if instance.leased is not None:
            found.append(f"it works on {instance.leased.id[:MAX_ID]!r}")
        if waiting or instance.open > (instance.leased is not None):
            count = max(len(waiting), instance.open - (instance.leased is not None))
            found.append(f"{_counted(count, 'message')} waiting for it{_named(waiting, count)}")
        if instance.answers:
            found.append(f"{_counted(len(instance.answers), 'answer')} on the way to it")
        asked = [event.id for event in self._asked_by(instance)]
        if asked:
            found.append(f"it expects {_counted(len(asked), 'answer')}{_named(asked, len(asked))}")
        if instance.spawns or (instance.requested and not found):
            found.append("it is being started")
        return found

    def _asked_by(self, instance: Instance) -> list[Event]:
        """The unfinished requests that the instance has sent without waiting: their answers become its events."""
        return [
            event
            for event in self._bus.mailbox.events.values()
            if event.asynchronous and not event.finished and event.late_for == (instance.agent, instance.key)
        ]

    # --- going on

    def advance(self, now: float) -> None:
        """Take all steps that are possible now: something has happened, or time has passed."""
        for deletion in list(self.active.values()):
            self._advance(deletion, now)

    def tick(self, now: float) -> None:
        """Handle folders that were moved, and everything else that is due."""
        if not self.active:
            return
        for moved in self._folders.moved():
            deletion = self.active.get((moved.agent, moved.key))
            if deletion is not None and deletion.phase == "folder":
                self._moved(deletion, moved)
        self.advance(now)

    def _advance(self, deletion: Deletion, now: float) -> None:
        if deletion.phase == "work" and self._work_is_over(deletion, now):
            deletion.phase, deletion.until = "process", now + LEAVE_S
        if deletion.phase == "process" and self._process_is_gone(deletion, now):
            deletion.phase, deletion.until = "jails", now + JAILS_S
        if deletion.phase == "jails" and self._jails_are_gone(deletion, now):
            self._bury(deletion, now)

    def _work_is_over(self, deletion: Deletion, now: float) -> bool:
        instance = deletion.instance
        if deletion.force:
            self._directory.failed(instance, "E_INSTANCE_DELETED", f"{instance.address} is being deleted")
            for answer_id in instance.answers:  # the turn that wanted them is cancelled
                self._bus.mailbox.blobs.arrived(answer_id, at="agent")
            instance.answers.clear()
            for event in [*([instance.leased] if instance.leased is not None else []), *instance.queue]:
                if not event.cancelled or instance.leased is not event:
                    self._cancels.cancel(event)
            if instance.leased is not None and now >= deletion.until:
                deletion.until = now + CANCEL_S
                self._processes.kill(instance, "its instance is to be deleted, and its turn does not end", now)
        if instance.open or instance.leased is not None or instance.spawns:
            return False
        # A request whose end is on its way to the journal will soon be an event of this instance.
        return not any(event.ending for event in self._asked_by(instance))

    def _process_is_gone(self, deletion: Deletion, now: float) -> bool:
        gone = self._processes.dismissed(deletion.instance, now)
        if not gone and now >= deletion.until:
            message = f"the process of {deletion.instance.address} does not end; it was waited for {LEAVE_S:g} s"
            self._over(deletion, error_payload("E_INSTANCE_BUSY", message))
        return gone

    def _jails_are_gone(self, deletion: Deletion, now: float) -> bool:
        instance, hosts = deletion.instance, self._bus.presence.connections[TOOLS].values()
        for host in hosts:
            asked = deletion.hosts.get(host.incarnation, ("", 0.0))
            if asked is None or now < asked[1]:
                continue
            frame = Frame("instance.end", from_=ORCHESTRATOR, to=instance.agent, instance_key=instance.key)
            frame.payload = to_raw(InstanceEnd(deletion.force))
            self._bus.send(host, frame)
            deletion.hosts[host.incarnation] = (frame.id, now + ASK_AGAIN_S)
        here = {host.incarnation for host in hosts}
        if here and all(deletion.hosts[name] is None for name in here):
            return True
        # A tool host that is away may soon be back, with its jails. A tool host that has ended has no jails any more.
        if not here and (now >= deletion.until or (self._bus.control is None and not deletion.hosts)):
            return True
        if now >= deletion.until:
            message = f"the jails of {instance.address} do not end; they were waited for {JAILS_S:g} s"
            self._over(deletion, error_payload("E_INSTANCE_BUSY", message))
        return False

    def answered(self, host: Connection, frame: Frame, now: float) -> bool:
        """`reply` from a tool host: the jails of an instance have ended, or what they still do."""
        for deletion in self.active.values() if frame.type == "reply" else ():
            asked = deletion.hosts.get(host.incarnation)
            if deletion.phase != "jails" or asked is None or asked[0] != frame.in_reply_to:
                continue
            work = from_raw(frame.payload, InstanceEnded).work
            if not work:
                deletion.hosts[host.incarnation] = None
            elif not deletion.force:
                address = deletion.instance.address
                message = f"{address} has work: some of it goes on in the background{_named(work, len(work))}"
                self._over(deletion, error_payload("E_INSTANCE_BUSY", message))
            else:  # it was asked before somebody wanted it by force
                deletion.hosts[host.incarnation] = ("", 0.0)
            self._advance(deletion, now)
            return True
        return False

    # --- the end

    def _bury(self, deletion: Deletion, now: float) -> None:
        """Stage the tombstone: no part of the instance runs any more."""
        instance = deletion.instance
        if instance.open or instance.leased is not None:
            deletion.phase, deletion.until = "work", now + CANCEL_S
            return
        deletion.phase = "tombstone"
        ledger = self._bus.ledger
        deletion.keep_workdir = self._is_shared(instance)
        writes = [*ledger.tombstone(instance.agent, instance.key, deletion.keep_workdir).writes]
        for event in self._asked_by(instance):
            self._bus.mailbox.unwanted(event)
            writes += ledger.answer_unwanted(event).writes
        writes += self._directory.deleted(instance).writes
        self._bus.stage(records.Item(tuple(writes)), partial(self._tombstone_written, deletion))

    def _is_shared(self, instance: Instance) -> bool:
        """Whether somebody else works in the workdir of this instance."""
        own = instance_workdir(self._bus.plan.state_dir, instance.agent, instance.key)
        mailbox = self._bus.mailbox
        elsewhere = (other.workdir.path for other in mailbox.instances.values() if other is not instance)
        # A workdir that an operator named for an event counts while the event is leased.
        named = (one.leased.content.workdir for one in mailbox.holding if one.leased is not None)
        return any(path is not None and (path == own or path.startswith(f"{own}/")) for path in (*elsewhere, *named))

    def _tombstone_written(self, deletion: Deletion, kept: bool) -> None:
        instance, deletion.phase = deletion.instance, "folder"
        self._remove(instance.agent, instance.key, deletion.keep_workdir)

    def _remove(self, agent: str, key: str, keep_workdir: bool) -> None:
        """Move the folder of an instance away, and have parts forget what they keep of it."""
        self._folders.move(agent, key, keep_workdir)
        for forget in self._forgets:
            forget(agent, key)

    def _moved(self, deletion: Deletion, moved: Moved) -> None:
        """Stage the end of the deletion, or that it could not be carried out."""
        instance, deletion.phase = deletion.instance, "end"
        error = None
        if moved.problem:
            error = error_payload("E_STATE", f"the folder of {instance.address} cannot be moved away: {moved.problem}")
            self._bus.counters["deletions_failed"] += 1
        over = self._bus.ledger.buried(instance.agent, instance.key, gone=error is None)
        self._bus.stage(over, partial(self._over, deletion, error))

    def _over(self, deletion: Deletion, error: ErrorPayload | None, kept: bool = True) -> None:
        """Tell everybody who asked that the instance is deleted, or why it is not."""
        instance, deletion.phase = deletion.instance, "over"
        del self.active[instance.agent, instance.key]
        instance.deleting = False
        self._bus.mailbox.forget_idle(instance)
        for connection, frame_id in deletion.askers:
            if error is None:
                self._tell(connection, frame_id, instance.agent, instance.key)
            else:
                self._bus.error(connection.cls, connection.ident, error, Frame("admin", id=frame_id))

    def _tell(self, connection: Connection, frame_id: str, agent: str, key: str) -> None:
        body = {"agent": agent, "instanceKey": key, "state": "deleted"}
        self._bus.reply(connection, frame_id, body)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _named(names: list[str], count: int) -> str:
    """The first MAX_NAMED of `count` names, in brackets."""
    shown = ", ".join(repr(name[:MAX_ID]) for name in names[:MAX_NAMED])
    return f" ({shown}{', …' if count > MAX_NAMED else ''})" if shown else ""
