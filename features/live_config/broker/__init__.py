"""`config.propose` of agents, the questions of operators, and what is in force. Pure.

Rules.
- Proposals are judged one after the other, each against the configuration that it was made from (rules.py, patches.py).
- An accepted patch is journaled first. Then every live process that it concerns gets all changes that are in force for
  it, in one frame. After that the proposer is told. An instance without a process gets the changes with `welcome`.
- The connection tells who proposes. Only the name of the extension is the agent's own claim; it is kept for the record.
- The same proposal under the same id is the same patch and gets the same answer again.
- An accepted patch stays until it is reverted or its instance is deleted. After a change of the bundle it acts on the
  new bundle, as far as its parts still exist there and as far as it would be allowed now.

Source: docs/live-config.md; requirements CONFIG-01, CONFIG-02.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from goondan.features.live_config import wire
from goondan.features.live_config.broker import patches, rules
from goondan.kernel.broker.state.bus import Bus, Core, join, overloaded
from goondan.kernel.broker.state.entities import AGENTS, Connection
from goondan.kernel.broker.state.parts import LISTS_BYTES, OfInstances, Op, Part, Record, Take, fitting
from goondan.schemas.bundle import address, effective_config, launch
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import OPERATOR_AGENT, Frame

#: At most so many proposals of one agent are judged in so many seconds, because each is written to the journal.
MAX_PROPOSALS: Final = 600
WINDOW_S: Final = 60.0
#: An extension's patch for its whole agent is judged together with the patches of at most so many instances and bytes:
#: each of these takes about 20 us. Operators have no such bound: 20,000 patches take half a second, once.
MAX_JUDGED_INSTANCES: Final = 256
MAX_JUDGED_BYTES: Final = 256 << 10
#: Characters that are kept of an extension's name, and of one operation.
_MAX_NAME: Final = 64
_MAX_ASKED: Final = 200


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (LiveConfigs(core.bus),)


class LiveConfigs(Part, OfInstances):
    """All patches, and the frames about them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._patches = patches.Patches()
        self._bases: dict[str, patches.Base] = {}
        #: Whether the plan is new, and nobody has looked whether its schemas have to be compiled.
        self._new_plan = True
        #: Patch id -> connections and frame ids that wait until the decision is journaled.
        self._askers: dict[str, list[tuple[Connection, str]]] = {}
        #: Agent -> when its last proposals were judged (the broker's clock), the oldest first.
        self._judged: dict[str, deque[float]] = {}
        #: Patch id -> its parts that have nothing to act on, as they were reported last.
        self._idle: dict[str, list[str]] = {}
        self.takes = (Take((AGENTS,), "config.propose", self.propose, wire.MAX_PROPOSAL_BYTES, confined="own state"),)
        #: Records of an earlier broker, until the whole journal was read.
        self._restored: list[patches.ConfigPatched] = []
        self.records = (Record(patches.ConfigPatched, lambda _, record: self._restored.append(record)),)
        self.ops = (
            Op("config.list", self._list),
            Op("config.show", self._show),
            Op("config.propose", self._propose_as_operator, most_bytes=wire.MAX_PROPOSAL_BYTES + LISTS_BYTES),
            Op("config.revert", self._revert),
        )

    def resumed(self, now: float) -> None:
        """Take over the decisions of an earlier broker."""
        restored, self._restored = self._restored, []
        self._patches.restore(patches.patch_of(record) for record in restored)
        self._note_idle()

    def revise(self, plan: launch.KernelPlan) -> None:
        """The plan has changed."""
        self._new_plan = True
        self._bases.clear()
        self._note_idle()

    def tick(self, now: float) -> None:
        """Load what checks configs, while nobody waits for the answer to a patch."""
        if self._new_plan:
            self._new_plan = False
            rules.load_checker(self._bus.plan.agents)

    # --- what is in force

    def changes(self, agent: str, key: str) -> effective_config.LiveChanges | None:
        """The changes that are in force for an instance; None when the bundle alone counts."""
        if not self._patches.has_any(agent) or agent not in self._bus.plan.agents:
            return None
        revision = self._patches.revision(agent, key)
        if not revision:
            return None
        return effective_config.LiveChanges(
            revision=revision, base=self._base(agent).digest, changes=self._changes(agent, key)
        )

    def allows(self, agent: str, key: str) -> frozenset[str]:
        """The tools that operators add to those that the bundle gives the agent of an instance."""
        if not self._patches.has_any(agent) or agent not in self._bus.plan.agents:
            return frozenset()
        added = {
            name
            for patch in self._patches.in_force(agent, key)
            if patch.by == patches.OPERATOR and patch.change.tools is not None
            for name in patch.change.tools.added
        }
        registry = self._bus.plan.agents[agent].registry if added else ()
        return frozenset(item.name for item in registry if effective_config.tool_of(item) in added)

    def welcome(self, peer: Connection) -> dict[str, Any]:
        """The changes that are in force for an agent."""
        agent, key = peer.claims.agent, peer.claims.instance_key
        changes = None if peer.cls != AGENTS or agent is None else self.changes(agent, key or "")
        return {} if changes is None else {"config": to_raw(changes)}

    # --- proposals

    def propose(self, connection: Connection, frame: Frame, now: float) -> None:
        """`config.propose` from an agent."""
        instance = connection.instance
        proposal = from_raw(frame.payload, wire.ConfigProposal)
        if instance is None or not self._bus.plan.agents[instance.agent].extensions:
            raise fail("E_FORBIDDEN", "only an agent with extensions may propose a patch")
        event = instance.leased
        patch = patches.Patch(
            number=0,
            id=proposal.id,
            agent=instance.agent,
            key=instance.key if proposal.scope == "instance" else None,
            change=effective_config.Change(),
            touched=frozenset(),
            by=patches.AGENT,
            by_key=instance.key,
            extension=None if proposal.extension is None else proposal.extension[:_MAX_NAME],
            event_id=None if event is None else event.id,
        )
        if self._told_again(connection, frame, patch):
            return
        self._check_rate(instance.agent, now)
        proposer = rules.Proposer(False, self._base(instance.agent).allowed, proposal.registered[: wire.MAX_OPERATIONS])
        self._decide(connection, frame, patch, proposal, proposer, now)

    # --- the journal's word

    def _journaled(self, patch_id: str, kept: bool) -> None:
        """The journal has a decision, or no room for it."""
        patch = self._patches.find(patch_id)
        if patch is None:
            return
        if not kept:
            self._refuse(patch)
            return
        if patch.state == "staged":
            patch.state = "accepted"
        elif patch.reverting:
            patch.state, patch.reverted, patch.reverting = "reverted", patch.reverting, 0
        self._push(patch.agent, patch.key)
        for connection, frame_id in self._askers.pop(patch_id, []):
            self._tell(connection, frame_id, patch)

    def _refuse(self, patch: patches.Patch) -> None:
        """The disk has no room for a decision: it counts as not made."""
        if patch.state == "staged":
            self._patches.forget(patch, never_was=True)
        patch.reverting = 0
        info = error_payload("E_DISK_FULL", "the disk of the state directory is full; nothing was changed")
        for connection, frame_id in self._askers.pop(patch.id, []):
            self._bus.error(connection.cls, connection.ident, info, Frame("admin", id=frame_id))

    def forget(self, agent: str, key: str) -> None:
        """The instance is deleted: forget its patches."""
        gone = self._patches.of_instance(agent, key)
        for patch in gone:
            self._patches.forget(patch)
        if gone:
            item = patches.patches_forgotten(patch.number for patch in gone)
            self._bus.stage(item)

    # --- inside

    def _decide(
        self,
        connection: Connection,
        frame: Frame,
        patch: patches.Patch,
        proposal: wire.ConfigProposal,
        proposer: rules.Proposer,
        now: float,
    ) -> None:
        """Judge a proposal, and have the journal write the decision."""
        redact = Redactor(*(model.api_key for spec in self._bus.plan.agents.values() for model in spec.models))
        patch.reason = redact((proposal.reason or "")[: wire.MAX_REASON])
        patch.asked = [redact(f"{one.op} {one.path}"[:_MAX_ASKED]) for one in proposal.patches[: wire.MAX_OPERATIONS]]
        patch.made_from = proposal.revision
        patch.at_ms = int((self._bus.booted_at + now) * 1000)
        forgotten: list[patches.Patch] = []
        try:
            forgotten = self._judge(patch, proposal, proposer, redact)
        except GoondanError as error:
            patch.error, patch.state = error.info, "rejected"
            forgotten = self._patches.surplus_rejected(patch.agent)
        for old in forgotten:
            self._patches.forget(old)
        patch.number = self._patches.next_number()
        self._patches.add(patch)
        item = patches.patch_written(patches.record_of(patch), [old.number for old in forgotten])
        if patch.state == "rejected":
            self._bus.counters["config_rejected"] += 1
            self._bus.stage(replace(item, refusable=False))
            self._tell(connection, frame.id, patch)
            return
        self._bus.counters["config_accepted"] += 1
        self._askers[patch.id] = [(connection, frame.id)]
        self._bus.stage(item, partial(self._journaled, patch.id))

    def _judge(
        self, patch: patches.Patch, proposal: wire.ConfigProposal, proposer: rules.Proposer, redact: Redactor
    ) -> list[patches.Patch]:
        """Fill in what the patch does. Returns the patches to forget for it. Raises GoondanError when it is refused."""
        agent, key = patch.agent, patch.by_key if patch.by == patches.AGENT else patch.key
        base = self._base(agent)
        if proposal.base != base.digest:
            raise fail(wire.CONFLICT, f"the patch was made from what the bundle said of {agent} before")
        self._patches.check_conflict(agent, key, proposal.revision, frozenset())
        before = effective_config.apply_changes(base.declared, self._changes(agent, key, proposal.revision))
        judged = rules.judge(base.spec, before, proposal.patches, proposer)
        encoded = msgspec.json.encode(judged.change).decode()
        if redact(encoded) != encoded:
            hint = "A patch is kept as it is; name a variable in the bundle's document instead."
            raise fail("E_CONFIG_INVALID_VALUE", "a patch may not hold the key of a model", suggestion=hint)
        self._patches.check_conflict(agent, key, proposal.revision, judged.touched)
        current = self._coming(agent, patch.key)
        rules.check_fit(base.spec, base.declared, current, [*current, judged.change])
        if patch.key is None:
            self._check_instances(agent, judged.change, proposer.operator)
        forgotten = self._patches.make_room(agent, patch.key, judged.change)
        known = {effective_config.tool_of(item) for item in base.spec.registry}
        added = [] if judged.change.tools is None else judged.change.tools.added
        patch.dynamic = [name for name in added if name not in known]
        patch.change, patch.touched = judged.change, judged.touched
        return forgotten

    def _propose_as_operator(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        agent, key = self._target(asked)
        revision = asked.get("revision")
        fields = {
            "id": asked.get("id"),
            "patches": asked.get("patches"),
            "reason": asked.get("reason"),
            "revision": self._patches.revision(agent, key) if revision is None else revision,
            "base": self._base(agent).digest,
        }
        try:
            proposal = msgspec.convert(fields, wire.ConfigProposal)
        except msgspec.ValidationError as error:
            raise fail("E_CONFIG_INVALID_VALUE", f"no patch: {error}") from None
        patch = patches.Patch(
            number=0,
            id=proposal.id,
            agent=agent,
            key=key,
            change=effective_config.Change(),
            touched=frozenset(),
            by=patches.OPERATOR,
        )
        if not self._told_again(connection, frame, patch):
            self._decide(connection, frame, patch, proposal, rules.Proposer(True), now)

    def _revert(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        patch_id = asked.get("patchId")
        patch = self._patches.find(patch_id) if isinstance(patch_id, str) else None
        if patch is None or patch.state == "rejected":
            raise fail(wire.NOT_FOUND, f"there is no accepted patch {str(patch_id)[:100]!r}")
        if patch.state == "reverted":
            self._tell(connection, frame.id, patch)
            return
        if patch.state == "accepted" and not patch.reverting:
            self._check_without(patch)
            patch.reverting = self._patches.next_number()
            item = patches.patch_written(patches.record_of(patch, reverted=patch.reverting))
            self._bus.stage(item, partial(self._journaled, patch.id))
        elif patch.state == "staged":
            raise overloaded("the patch is on its way into the journal")
        self._join(connection, frame, patch)

    def _check_without(self, patch: patches.Patch) -> None:
        """Raise GoondanError when, without this patch, the config of an extension would not fit its schema."""
        if patch.agent not in self._bus.plan.agents:
            return
        base = self._base(patch.agent)
        left = self._coming(patch.agent, patch.key, without=patch)
        rules.check_fit(base.spec, base.declared, self._coming(patch.agent, patch.key), left)
        if patch.key is None:
            self._check_instances(patch.agent, patch.change, True, without=patch)

    def _check_instances(
        self, agent: str, change: effective_config.Change, operator: bool, *, without: patches.Patch | None = None
    ) -> None:
        """Check the instances that have patches of their own: this change begins to count for all of the agent, or it
        does not count any more (`without`). Raise GoondanError when the config of an extension would not fit its
        schema in one of them.
        """
        base = self._base(agent)
        concerned = rules.with_schema(base.spec, change)
        if not concerned:
            return
        instances = {
            key: own
            for key, own in self._patches.instances(agent).items()
            if any(rules.with_schema(base.spec, patch.change) & concerned for patch in own)
        }
        size = sum(patch.size for own in instances.values() for patch in own)
        if not operator and (len(instances) > MAX_JUDGED_INSTANCES or size > MAX_JUDGED_BYTES):
            message = f"{len(instances)} instances have patches of their own for the config of the same extension"
            raise fail(wire.LIMIT, message, suggestion="An operator can propose it: `gdn config propose`.")
        for key in instances:
            before = self._coming(agent, key)
            after = [*before, change] if without is None else self._coming(agent, key, without=without)
            rules.check_instance(base.spec, base.declared, before, after, key)

    def _told_again(self, connection: Connection, frame: Frame, asked: patches.Patch) -> bool:
        """Whether this proposal was made before. Then it is answered here, or waits with the first."""
        patch_id = asked.id
        if not 0 < len(patch_id) <= wire.MAX_PATCH_ID or not patch_id.isascii() or not patch_id.isprintable():
            raise fail("E_FRAME_INVALID", f"the id of a patch has 1 to {wire.MAX_PATCH_ID} printable ASCII characters")
        known = self._patches.find(patch_id)
        if known is None:
            return False
        if (known.agent, known.by, known.by_key) != (asked.agent, asked.by, asked.by_key):
            raise fail("E_FORBIDDEN", "a patch of this id is somebody else's")
        if known.state == "staged":
            self._join(connection, frame, known)
        else:
            self._tell(connection, frame.id, known)
        return True

    def _join(self, connection: Connection, frame: Frame, patch: patches.Patch) -> None:
        join(self._askers.setdefault(patch.id, []), connection, frame, "patch")

    def _check_rate(self, agent: str, now: float) -> None:
        judged = self._judged.setdefault(agent, deque(maxlen=MAX_PROPOSALS))
        if len(judged) == MAX_PROPOSALS and now - judged[0] < WINDOW_S:
            message = f"{MAX_PROPOSALS} patches were proposed within {WINDOW_S:g} s"
            wait_ms = int((WINDOW_S - (now - judged[0])) * 1000) + 1
            raise overloaded(message, wait_ms)
        judged.append(now)

    def _push(self, agent: str, key: str | None) -> None:
        """Send the changes that are in force now to every live process that they concern."""
        if agent not in self._bus.plan.agents:
            return
        for connection in self._bus.presence.connections[AGENTS].values():
            own = connection.claims.instance_key or ""
            if connection.claims.agent != agent or key not in (None, own):
                continue
            connection.allowed |= self.allows(agent, own)  # a step that runs keeps what it began with
            self._bus.send(connection, Frame("config.changed", payload=to_raw(self.changes(agent, own))))

    def _tell(self, connection: Connection, frame_id: str, patch: patches.Patch) -> None:
        accepted = patch.state != "rejected"
        revision = (patch.reverted or patch.number) if accepted else 0
        outcome = wire.ConfigOutcome(
            status="accepted" if accepted else "rejected", patch_id=patch.id, revision=revision, error=patch.error
        )
        self._bus.reply(connection, frame_id, outcome)

    def _base(self, agent: str) -> patches.Base:
        base = self._bases.get(agent)
        if base is None:
            spec = self._bus.plan.agents[agent]
            base = self._bases[agent] = patches.Base(
                spec,
                effective_config.declared(spec),
                effective_config.digest_of(spec),
                effective_config.reachable_tools(spec),
            )
        return base

    def _changes(self, agent: str, key: str | None, revision: int | None = None) -> list[effective_config.Change]:
        return [self._base(agent).fitting(patch) for patch in self._patches.in_force(agent, key, revision)]

    def _coming(
        self, agent: str, key: str | None, *, without: patches.Patch | None = None
    ) -> list[effective_config.Change]:
        """The changes that will be in force when all decisions are journaled. They have to fit together."""
        return [self._base(agent).fitting(patch) for patch in self._patches.coming(agent, key) if patch is not without]

    def _idle_parts(self, patch: patches.Patch) -> list[str]:
        """The parts of a patch that have nothing to act on."""
        if patch.agent not in self._bus.plan.agents:
            return [f"the bundle has no agent {patch.agent}"]
        return self._base(patch.agent).idle_parts(patch)

    def _note_idle(self) -> None:
        """Tell operators which patches have lost the parts that they act on."""
        before, self._idle = self._idle, {}
        for patch in self._patches:
            if patch.state == "accepted" and (idle := self._idle_parts(patch)):
                self._idle[patch.id] = idle
                if before.get(patch.id) != idle:
                    self._bus.notices.append(f"patch {patch.id} of {patch.agent} is without effect: {'; '.join(idle)}")

    # --- operators

    def _target(self, asked: dict[str, Any]) -> tuple[str, str | None]:
        agent, key = asked.get("agent"), asked.get("instanceKey")
        if not isinstance(agent, str) or agent not in self._bus.plan.agents or agent == OPERATOR_AGENT:
            raise fail("E_AGENT_NOT_FOUND", f"the bundle has no agent {str(agent)[:100]!r}")
        if key is not None and (not isinstance(key, str) or not address.is_instance_key(key)):
            raise fail("E_FRAME_INVALID", "instanceKey is the key of an instance, or null for all of the agent")
        return agent, key

    def _list(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        agent, key = asked.get("agent"), asked.get("instanceKey")
        every = [patch for patch in self._patches if agent in (None, patch.agent) and key in (None, patch.key)]
        newest = fitting(
            patches.entry_of(patch, self._idle_parts(patch) if patch.state == "accepted" else [])
            for patch in reversed(every)
        )
        listed = newest[::-1]
        body = {"patches": listed, "more": len(every) - len(listed)}
        self._bus.reply(connection, frame.id, body)

    def _show(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """The configuration that is in force. Of the `config` of extensions, only what patches have changed."""
        agent, key = self._target(asked)
        base = self._base(agent)
        changes = self._changes(agent, key)
        applied = effective_config.apply_changes(base.declared, changes)
        without = replace(applied, configs={name: {} for name in applied.configs})
        config = effective_config.shown(
            base.spec,
            effective_config.apply_changes(
                without, [effective_config.Change(configs=change.configs) for change in changes]
            ),
        )
        for extension in config["extensions"]:
            extension["patched"] = extension.pop("config")
        body = {
            "agent": agent,
            "instanceKey": key,
            "revision": self._patches.revision(agent, key),
            "patches": [patch.id for patch in self._patches.in_force(agent, key)],
            "config": config,
        }
        self._bus.reply(connection, frame.id, body)
