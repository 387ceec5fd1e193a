"""The decided patches, and the configuration that is in force. Pure.

Rules.
- Every accepted patch and every revert has a number of its own, in the order of acceptance: the revision. The
  configuration of an instance at a revision is the bundle's with all patches up to it, in that order, without those
  that were reverted by then.
- A patch that was made from an older revision is accepted if no later decision touches the same parts. Changes go by
  names, so the patch still means the same. Otherwise it is refused with E_CONFIG_CONFLICT.
- The number of kept patches is bounded. Patches that change nothing any more are forgotten first: they were reverted,
  or a later patch has set the same parts. When every patch still counts, a new one is refused.

Source: docs/live-config.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.features.live_config.broker.rules import within_bound
from goondan.features.live_config.wire import CONFLICT, LIMIT
from goondan.kernel.broker.state.records import Item, Put, Retire, encode
from goondan.schemas.bundle.effective_config import ORDER, Applied, Change, Touched, overlap, tool_of, touches
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import ErrorPayload

#: Patches that are remembered for one instance, and as many for all of an agent: each new patch is compared with them.
MAX_PATCHES: Final = 200
#: The same of the whole workspace: 20,000 take some 20 MB of the broker's memory.
MAX_IN_ALL: Final = 20_000
#: Rejected proposals of one agent that are remembered.
MAX_REJECTED: Final = 50
#: Bytes of all changes that are in force for one instance, as msgpack: `welcome` has them, in one frame.
MAX_CHANGES_BYTES: Final = 256 << 10

#: Who proposed a patch.
AGENT: Final = "agent"
OPERATOR: Final = "operator"

State = Literal["staged", "accepted", "reverted", "rejected"]
#: The subjects of records.
_PATCH: Final = "config:"


class ConfigPatched(Struct, array_like=True, tag="live_config/patch", kw_only=True):
    """A patch of an agent's configuration was accepted, and perhaps reverted since; or a proposal was rejected.

    Not frozen: the broker's Patch is one with more fields.
    """

    #: Nothing: it concerns an agent.
    concerns: str = ""
    #: Its number in the order of decisions.
    number: int
    #: The id of the proposal.
    id: str
    #: The agent that it is for.
    agent: str
    #: The instance that it is for; None: all instances of the agent.
    key: str | None
    #: What it changes.
    change: Change
    #: The parts of the configuration that it touches: names from the outside in.
    touched: frozenset[Touched]
    #: From this revision on it does not count; 0: it counts.
    reverted: int = 0
    #: Its operations without their values.
    asked: list[str] = []
    #: Who proposed it: `agent` or `operator`.
    by: str = ""
    #: The instance key of the agent that proposed it.
    by_key: str | None = None
    #: The extension that proposed it, as its agent says.
    extension: str | None = None
    #: The event whose turn proposed it.
    event_id: str | None = None
    #: Why, in the proposer's words.
    reason: str = ""
    #: The revision that it was made from.
    made_from: int = 0
    #: When (milliseconds since 1970).
    at_ms: int = 0
    #: The tools in it that extensions had registered and that are not in the bundle.
    dynamic: list[str] = []
    #: Why it was rejected.
    error: ErrorPayload | None = None


def patch_written(record: ConfigPatched, forgotten: Iterable[int] = ()) -> Item:
    """A decision about a patch of configuration. It replaces an earlier decision, and old patches are forgotten."""
    subject = f"{_PATCH}{record.number}"
    return Item((*_gone(forgotten), Retire(subject), Put(subject, encode(record))), refusable=True)


def patches_forgotten(numbers: Iterable[int]) -> Item:
    """Patches are forgotten."""
    return Item(_gone(numbers))


def _gone(numbers: Iterable[int]) -> tuple[Retire, ...]:
    return tuple(Retire(f"{_PATCH}{number}") for number in numbers)


class Patch(ConfigPatched, kw_only=True):
    """One patch: what the journal keeps of it, and how far it is."""

    #: The state of the patch.
    state: State = "staged"
    #: As `reverted`, while the revert is on its way into the journal.
    reverting: int = 0
    #: Size of its change as msgpack (bytes).
    size: int = 0

    def counts_at(self, revision: int) -> bool:
        """Whether it is part of the configuration at this revision."""
        if self.state not in ("accepted", "reverted") or self.number > revision:
            return False
        return not self.reverted or self.reverted > revision


class Patches:
    """All patches. The patches of one instance, or for all of an agent, are a group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str | None], dict[int, Patch]] = {}
        self._rejected: dict[str, dict[int, Patch]] = {}
        self._by_id: dict[str, Patch] = {}
        #: The highest number that is in use.
        self.last = 0
        #: Group -> number up to which decisions may be forgotten.
        self._forgotten: dict[tuple[str, str | None], int] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Patch]:
        every = [*self._groups.values(), *self._rejected.values()]
        return iter(sorted((patch for group in every for patch in group.values()), key=lambda patch: patch.number))

    def restore(self, patches: Iterable[Patch]) -> None:
        """Take over the decisions of an earlier broker."""
        for patch in sorted(patches, key=lambda patch: patch.number):
            self.add(patch)
            self.last = max(self.last, patch.number, patch.reverted)
        for name, group in self._groups.items():
            if len(group) >= MAX_PATCHES:
                self._forgotten[name] = next(iter(group)) - 1

    def next_number(self) -> int:
        """A number for a decision that is made now."""
        self.last += 1
        return self.last

    def add(self, patch: Patch) -> None:
        """Add a patch that is on its way into the journal, or is there."""
        if patch.state == "rejected":
            self._rejected.setdefault(patch.agent, {})[patch.number] = patch
        else:
            patch.size = _size_of(patch.change)
            self._groups.setdefault((patch.agent, patch.key), {})[patch.number] = patch
            self._count += 1
        self._by_id[patch.id] = patch

    def forget(self, patch: Patch, *, never_was: bool = False) -> None:
        """Forget a patch. `never_was`: the journal had no room for it, so it was never decided."""
        if self._by_id.get(patch.id) is patch:
            del self._by_id[patch.id]
        if patch.state == "rejected":
            self._rejected.get(patch.agent, {}).pop(patch.number, None)
            return
        name = patch.agent, patch.key
        group = self._groups.get(name, {})
        if group.pop(patch.number, None) is None:
            return
        self._count -= 1
        if not group:
            del self._groups[name]
        if not never_was:
            self._forgotten[name] = max(self._forgotten.get(name, 0), patch.number)

    def find(self, patch_id: str) -> Patch | None:
        """The patch of this id."""
        return self._by_id.get(patch_id)

    def of_instance(self, agent: str, key: str) -> list[Patch]:
        """The patches for this instance alone."""
        return list(self._groups.get((agent, key), {}).values())

    def instances(self, agent: str) -> dict[str, list[Patch]]:
        """The patches of single instances of an agent, by key, that are in force or on their way into the journal."""
        found: dict[str, list[Patch]] = {}
        for (name, key), group in self._groups.items():
            if name == agent and key is not None:
                own = [patch for patch in group.values() if patch.state in ("staged", "accepted")]
                if own:
                    found[key] = own
        return found

    def has_any(self, agent: str) -> bool:
        """Whether any patch may concern this agent."""
        return any(name == agent for name, _ in self._groups)

    def revision(self, agent: str, key: str | None) -> int:
        """The number of the last decision that counts for an instance; 0 when there is none."""
        known = [patch for patch in self._concerning(agent, key) if patch.state != "staged"]
        return max((max(patch.number, patch.reverted) for patch in known), default=0)

    def in_force(self, agent: str, key: str | None, revision: int | None = None) -> list[Patch]:
        """The patches that make the configuration of an instance at a revision (None: the newest), in order."""
        at = self.last if revision is None else revision
        return [patch for patch in self._concerning(agent, key) if patch.counts_at(at)]

    def coming(self, agent: str, key: str | None) -> list[Patch]:
        """The patches that will be in force when all decisions are in the journal."""
        every = self._concerning(agent, key)
        return [patch for patch in every if patch.state in ("staged", "accepted") and not patch.reverting]

    def check_conflict(self, agent: str, key: str | None, revision: int, touched: frozenset[Touched]) -> None:
        """Raise E_CONFIG_CONFLICT when a decision after `revision` touches the same parts as this patch, or when there
        is no such revision.
        """
        if revision > self.last:
            message = f"the patch was made from revision {revision}, which there is not yet; the last is {self.last}"
            hint = "Leave `revision` out, or give that of an answer."
            raise fail(CONFLICT, message, suggestion=hint)
        if any(revision < self._forgotten.get(name, 0) for name in ((agent, None), (agent, key))):
            message = f"the patch was made from revision {revision}, which is too old to be known"
            raise fail(CONFLICT, message)
        for patch in self._concerning(agent, key):
            if max(patch.number, patch.reverted, patch.reverting) > revision:
                met = overlap(touched, patch.touched)
                if met is not None:
                    changed = f"{patch.id} has changed /{'/'.join(met)[:200]} since"
                    message = f"the patch was made from revision {revision}, and {changed}"
                    raise fail(CONFLICT, message)

    def make_room(self, agent: str, key: str | None, change: Change) -> list[Patch]:
        """The patches to forget before this change is added. Raises GoondanError E_CONFIG_LIMIT."""
        group, counting = self._groups.get((agent, key), {}), self.coming(agent, key)
        forgotten: list[Patch] = []
        size = _size_of(change) + sum(patch.size for patch in counting)
        if size > MAX_CHANGES_BYTES:
            forgotten = [patch for patch in counting if patch.state == "accepted" and self._is_overwritten(patch)]
            size -= sum(patch.size for patch in forgotten)
            if size > MAX_CHANGES_BYTES:
                message = f"the patches in force for {agent} would take {size} bytes, limit {MAX_CHANGES_BYTES}"
                raise fail(LIMIT, message)
        if key is None:
            for instance, own in self.instances(agent).items():
                together = size + sum(patch.size for patch in own)
                if together > MAX_CHANGES_BYTES:
                    message = f"with those of instance {instance!r} the patches in force for {agent} would take "
                    raise fail(LIMIT, f"{message}{together} bytes, limit {MAX_CHANGES_BYTES}")
        if forgotten or (len(group) < MAX_PATCHES and self._count < MAX_IN_ALL):
            return forgotten
        for patch in group.values():
            if patch.state == "reverted" or (patch.state == "accepted" and self._is_overwritten(patch)):
                return [patch]
        raise fail(LIMIT, f"{len(group)} patches are remembered here and {self._count} in all, no more fit")

    def surplus_rejected(self, agent: str) -> list[Patch]:
        """The rejected proposals to forget before one more is added."""
        rejected = list(self._rejected.get(agent, {}).values())
        return rejected[: max(0, len(rejected) + 1 - MAX_REJECTED)]

    # --- inside

    def _concerning(self, agent: str, key: str | None) -> list[Patch]:
        """The patches that concern an instance, in the order of their numbers. `key` None: an instance without patches
        of its own.
        """
        every = list(self._groups.get((agent, None), {}).values())
        if key is not None and (own := self._groups.get((agent, key))):
            every = sorted((*every, *own.values()), key=lambda patch: patch.number)
        return every

    def _is_overwritten(self, patch: Patch) -> bool:
        """Whether the configuration is the same without it.

        A later patch may set the same part again. An entry that was put into a list, or taken out, may be taken out
        later, as long as no patch in between has changed the order of the list.
        """
        waiting = touches(patch.change)
        lists = patch.change.tools is not None or patch.change.extensions is not None
        for later in self._concerning(patch.agent, patch.key):
            if later.number <= patch.number or later.state != "accepted":
                continue
            if later.key not in (None, patch.key):
                continue
            if lists and any(touched[-1] == ORDER for touched in later.touched):
                return False
            waiting = {touched for touched in waiting if not _sets(later, touched)}
        return not waiting


class Base(Struct, frozen=True):
    """The part of the bundle that is about one agent."""

    #: Its specification.
    spec: AgentSpec
    #: The configuration that the bundle declares.
    declared: Applied
    #: The digest of this configuration.
    digest: str
    #: The tools that the agent may call.
    allowed: frozenset[str]

    def fitting(self, patch: Patch) -> Change:
        """The change of a patch, without tools that are gone or that it would not be allowed to add now."""
        tools = patch.change.tools
        added = [] if tools is None else [name for name in tools.added if not self._why_not(patch, name)]
        if tools is None or added == tools.added:
            return patch.change
        return replace(patch.change, tools=replace(tools, added=added))

    def _why_not(self, patch: Patch, tool: str) -> str:
        """Why a patch does not add this tool; "" when it adds it."""
        known = any(tool_of(item) == tool for item in self.spec.registry)
        if not known and tool not in patch.dynamic:
            return f"Tool/{tool} is not in the bundle any more"
        if known and patch.by != OPERATOR and not within_bound(self.spec, tool, self.allowed):
            return f"Tool/{tool} is one that extensions may not add any more"
        return ""

    def idle_parts(self, patch: Patch) -> list[str]:
        """The parts of a patch that have nothing to act on."""
        added = [] if patch.change.tools is None else patch.change.tools.added
        idle = [why for name in added if (why := self._why_not(patch, name))]
        model = patch.change.model
        if model is not None and model.provider != self.spec.model.provider:
            idle.append(f"the agent's model is one of {self.spec.model.provider}, not of {model.provider}")
        has = {extension.name for extension in self.spec.extensions}
        named = dict.fromkeys(one.extension for one in patch.change.configs)
        return idle + [f"the agent has no Extension/{name}" for name in named if name not in has]


def _size_of(change: Change) -> int:
    return len(msgspec.msgpack.encode(change))


def _sets(later: Patch, touched: Touched) -> bool:
    """Whether a later patch alone decides this part, whatever its value was before."""
    part, *names = touched
    if part == "prompt":
        return later.change.prompt is not None
    if part == "model":
        return later.change.model is not None
    if part == "policy":
        return later.change.max_steps is not None
    if len(names) == 1:
        changed = later.change.tools if part == "tools" else later.change.extensions
        return changed is not None and names[0] in changed.removed
    if len(names) > 2:
        extension, _, *path = names
        return any(e.extension == extension and e.path == path and not e.removed for e in later.change.configs)
    return False


def record_of(patch: Patch, *, reverted: int = 0) -> ConfigPatched:
    """The record of a patch."""
    fields = {name: getattr(patch, name) for name in ConfigPatched.__struct_fields__}
    return ConfigPatched(**{**fields, "reverted": reverted})


def patch_of(record: ConfigPatched) -> Patch:
    """The patch of a record."""
    state: State = "rejected" if record.error is not None else "reverted" if record.reverted else "accepted"
    return Patch(**msgspec.structs.asdict(record), state=state)


def entry_of(patch: Patch, idle: list[str]) -> dict[str, Any]:
    """One line of the audit. `idle`: the parts of the patch that have nothing to act on now."""
    return {
        "patchId": patch.id,
        "revision": patch.number,
        "agent": patch.agent,
        "instanceKey": patch.key,
        "status": patch.state,
        "revertedAt": patch.reverted or None,
        "by": patch.by,
        "byInstance": patch.by_key,
        "extension": patch.extension,
        "eventId": patch.event_id,
        "reason": patch.reason,
        "madeFrom": patch.made_from,
        "atMs": patch.at_ms,
        "asked": patch.asked,
        "change": msgspec.to_builtins(patch.change),
        "idle": idle,
        "error": None if patch.error is None else msgspec.to_builtins(patch.error),
    }
