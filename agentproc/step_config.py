"""The configuration of each step of a turn: the one that was in force when the step began.

Rules.
- The configuration is stored before the step runs. So a process that takes the step up again runs it with the same
  configuration, even if the bundle has changed in between.
- The patches are stored with the turn. The bundle's part is stored once for each revision that a step has seen, and
  only for agents with extensions: without extensions, nothing reads it after the model's answer.
- Values of environment variables are not stored. An extension with such a config takes its step up again with the
  current config.

Source: docs/live-config.md; docs/design/turns.md section 9; requirements CONFIG-02, CONFIG-03.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.agentproc.catalog import Catalog
from goondan.agentproc.live_config import Earlier, InForce, LiveConfig
from goondan.agentproc.store import ConversationStore
from goondan.schemas.bundle.effective_config import Applied, Change, declared
from goondan.schemas.bundle.launch import AgentSpec

#: The names under which the conversation's file has the last step's beginning: the patches, and the bundle's part.
_STEP_CONFIG: Final = "step_config"
_BUNDLE_SAID: Final = "bundle_said"


class _Begun(Struct, frozen=True):
    """The stored beginning of a step."""

    #: The turn of the step.
    turn_id: str
    #: The revision of the configuration.
    revision: int
    #: The patches that were in force.
    changes: list[Change]


class _Said(Struct, frozen=True):
    """The bundle's part of the agent's configuration when a step began."""

    #: Identifies the bundle's part.
    base: str
    #: The names of the tools.
    tools: list[str]
    #: The names of the extensions.
    extensions: list[str]
    #: The configs of those extensions whose config may be stored.
    configs: dict[str, dict[str, Any]]
    #: The system prompt.
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
        """An earlier process has begun the turn. Its last step's configuration is in force until the next step begins.

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
        """A step begins, or is taken up `again`. Returns its configuration. Raises GoondanError as
        ConversationStore.write.
        """
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
        #: The configuration of the running step, or of the next one.
        self.in_force = in_force
        self._catalog.follow(in_force.spec)
        self._catalog.begin_with(in_force.tools)

    @property
    def _unsaid(self) -> bool:
        """Whether the file should have the bundle's current part and does not have it."""
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
    """The stored part of the bundle, for the extensions that still exist. The model is the one that can be
    asked now.
    """
    configs = {one.name: said.configs.get(one.name, one.config) for one in spec.extensions}
    return replace(
        declared(spec),
        tools=said.tools,
        extensions=[name for name in said.extensions if name in configs],
        configs=configs,
        system=said.system,
    )
