"""The configuration of each step of a turn: that of its begin.

Rules.
- What a step begins with is stored before the step runs, so a process that takes the step up again runs it with the
  same, also when the bundle has changed in between.
- The patches are stored with the turn. What the bundle said is stored once for each revision of it that a step has
  seen, and only for agents with extensions: nobody else looks at it behind the model's answer.
- Values of environment variables are not stored. An extension whose config has some takes its step up again with the
  config of today.

Source: docs/live-config.md; docs/decisions/078; requirements CONFIG-02, CONFIG-03.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentproc.catalog import Catalog
from agentproc.live_config import Earlier, InForce, LiveConfig
from agentproc.store import ConversationStore
from schemas.effective_config import Applied, Change, declared
from schemas.launch import AgentSpec

#: Where the conversation's file has what the last step began with: the patches, and what the bundle said.
_STEP_CONFIG: Final = "step_config"
_BUNDLE_SAID: Final = "bundle_said"


class _Begun(Struct, frozen=True):
    """What is stored of a step that has begun: its turn, and the patches that were in force."""

    turn_id: str
    revision: int
    changes: list[Change]


class _Said(Struct, frozen=True):
    """What the bundle said of the agent when a step began. `base` names it. `configs` are those of extensions whose
    config may be stored.
    """

    base: str
    tools: list[str]
    extensions: list[str]
    configs: dict[str, dict[str, Any]]
    system: str | None


class TurnConfig:
    """The configurations of the steps of one turn."""

    def __init__(self, live: LiveConfig, catalog: Catalog, store: ConversationStore, turn_id: str) -> None:
        self._live = live
        self._catalog = catalog
        self._store = store
        self._turn_id = turn_id
        self._recorded = 0
        self._said = ""  # the base of what is stored of the bundle; "" before anybody has looked
        self._enter(live.current)

    def resume(self) -> None:
        """An earlier process has begun the turn: what its last step began with is in force until the next one begins.

        Raises GoondanError E_STATE.
        """
        stored = self._store.remembered(_STEP_CONFIG)
        begun = None if stored is None else msgspec.msgpack.decode(stored, type=_Begun)
        if begun is None or begun.turn_id != self._turn_id:
            begun = _Begun(self._turn_id, 0, [])
        self._recorded = begun.revision
        now = self.in_force
        said = self._stored_said() if now.spec.extensions else None
        self._said = "" if said is None else said.base
        earlier = None if said is None or said.base == now.base else Earlier(said.base, _applied(said, now.spec))
        if begun.revision != now.revision or earlier is not None:
            self._enter(InForce(now.spec, begun.revision, begun.changes, earlier))

    def begin_turn(self) -> None:
        """The turn begins (inside ConversationStore.write)."""
        self._note_bundle()

    def begin_step(self, step: int, *, again: bool) -> InForce:
        """A step begins, or is taken up `again`; what it runs with. Raises GoondanError as ConversationStore.write."""
        if not again:
            self._enter(self._live.current)
            now = self.in_force
            if now.revision != self._recorded or self._unsaid:
                with self._store.write():
                    if now.revision != self._recorded:
                        self._recorded = now.revision
                        begun = _Begun(self._turn_id, now.revision, now.changes)
                        self._store.remember(_STEP_CONFIG, msgspec.msgpack.encode(begun))
                    self._note_bundle()
        self._live.begin_step(self._turn_id, step, self.in_force)
        return self.in_force

    def close(self) -> None:
        """The turn has ended, or is left."""
        self._live.end_turn()

    # --- inside

    def _enter(self, in_force: InForce) -> None:
        #: That of the step that runs, or of the next one.
        self.in_force = in_force
        self._catalog.follow(in_force.spec)
        self._catalog.begin_with(in_force.tools)

    @property
    def _unsaid(self) -> bool:
        """Whether the file does not have what the bundle says now, and should."""
        return bool(self.in_force.spec.extensions) and self._said != self.in_force.base

    def _note_bundle(self) -> None:
        if self._unsaid and not self._said and (stored := self._stored_said()) is not None:
            self._said = stored.base
        if self._unsaid:
            now = self.in_force
            self._said = now.base
            applied = declared(now.spec)
            kept = {one.name: one.config for one in now.spec.extensions if not one.confidential}
            said = _Said(now.base, applied.tools, applied.extensions, kept, applied.system)
            self._store.remember(_BUNDLE_SAID, msgspec.msgpack.encode(said))

    def _stored_said(self) -> _Said | None:
        stored = self._store.remembered(_BUNDLE_SAID)
        return None if stored is None else msgspec.msgpack.decode(stored, type=_Said)


def _applied(said: _Said, spec: AgentSpec) -> Applied:
    """What the bundle said, as far as the extensions are still there. The model is the one that can be asked now."""
    configs = {one.name: said.configs.get(one.name, one.config) for one in spec.extensions}
    return replace(
        declared(spec),
        tools=said.tools,
        extensions=[name for name in said.extensions if name in configs],
        configs=configs,
        system=said.system,
    )
