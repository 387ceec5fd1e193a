"""The configuration of an agent: the one in force, and the one that each step of a turn runs with.

Rules.
- The broker sends the whole configuration with `welcome` and with each `config.changed`: the changes, and the bundle's
  part when that has changed. An older one, and changes made for another state of the bundle, are ignored. So is a
  specification that this process cannot follow (schemas/bundle/effective_config.py): the process is about to be
  replaced.
- A step runs with the configuration that was in force when it began. That is stored before the step runs. So a process
  that takes the step up again runs it with the same configuration, even if the bundle has changed in between.
- The changes are stored with the turn. The bundle's part is stored once for each revision that a step has seen, and
  only for agents with extensions: without extensions, nothing reads it after the model's answer.
- Values of environment variables are not stored. An extension with such a config takes its step up again with the
  current config.

Source: docs/live-config.md; docs/design/turns.md section 9; requirements CONFIG-02, CONFIG-03.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.extensions.points.results import with_config
from goondan.agentproc.machine.catalog import Catalog
from goondan.schemas.bundle import effective_config
from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec, ModelSpec
from goondan.schemas.wire import codec, frames

#: The names under which the conversation's file has the last step's beginning: the changes, and the bundle's part.
_STEP_CONFIG: Final = "step_config"
_BUNDLE_SAID: Final = "bundle_said"


class Earlier(Struct, frozen=True):
    """The agent as an earlier revision of the bundle described it, by names. `base` identifies that revision."""

    #: The revision.
    base: str
    #: What it said.
    said: effective_config.Applied


class InForce:
    """One configuration of an agent: the bundle's part (`spec`) with changes. It does not change. `earlier` is the
    bundle's part when the configuration began, if that was another; `spec` then has the current meaning of the names in
    it.
    """

    def __init__(
        self,
        spec: AgentSpec,
        revision: int = 0,
        changes: Sequence[effective_config.Change] = (),
        earlier: Earlier | None = None,
    ) -> None:
        self.spec = spec
        self.revision = revision
        self.changes = list(changes)
        self._earlier = earlier
        #: Whether it differs from the bundle's current configuration.
        self._differs = bool(self.changes) or earlier is not None

    @cached_property
    def base(self) -> str:
        """Identifies the bundle's part (goondan.schemas.bundle.effective_config.digest_of)."""
        return effective_config.digest_of(self.spec) if self._earlier is None else self._earlier.base

    @cached_property
    def _applied(self) -> effective_config.Applied:
        said = effective_config.declared(self.spec) if self._earlier is None else self._earlier.said
        return effective_config.apply_changes(said, self.changes)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as extensions see it. Nobody may change this object."""
        return effective_config.shown(self.spec, self._applied)

    @cached_property
    def tools(self) -> list[str] | None:
        """The names of the Tools and of the dynamic tools that a step begins with; None: those that the
        bundle gives.
        """
        own = self._earlier is not None or any(change.tools is not None for change in self.changes)
        return self._applied.tools if own else None

    @cached_property
    def system(self) -> str | None:
        """The system prompt."""
        return self._applied.system if self._differs else self.spec.system

    @cached_property
    def model(self) -> ModelSpec:
        """The model of the step."""
        own = self.spec.model
        return msgspec.structs.replace(own, model=self._applied.model.model) if self._differs else own

    @cached_property
    def max_steps(self) -> int:
        """How many steps a turn may take."""
        return self._applied.max_steps if self._differs else self.spec.max_steps_per_turn

    @cached_property
    def extensions(self) -> list[ExtensionSpec]:
        """The extensions, in their order."""
        if not self._differs:
            return self.spec.extensions
        known = {extension.name: extension for extension in self.spec.extensions}
        configs = self._applied.configs
        return [
            known[name] if configs[name] == known[name].config else with_config(known[name], configs[name])
            for name in self._applied.extensions
        ]


class Configuration:
    """The configuration in force for one agent instance."""

    def __init__(self, spec: AgentSpec) -> None:
        self.current = InForce(spec)
        #: The step that runs (`turn id/number`), and what it runs with. None: no step runs.
        self.step: tuple[str, InForce] | None = None

    def take(self, payload: Raw, spec: Raw = frames.NO_PAYLOAD) -> None:
        """Take the configuration that the broker sends: LiveChanges, with the bundle's part in them or beside them.
        Raises GoondanError E_FRAME_INVALID.
        """
        told = effective_config.LiveChanges()
        if payload != frames.NO_PAYLOAD:
            told = codec.from_raw(payload, effective_config.LiveChanges)
        now = self.current
        given = told.spec if spec == frames.NO_PAYLOAD else spec
        new = now.spec if given == frames.NO_PAYLOAD else codec.from_raw(given, AgentSpec)
        if new != now.spec:
            if not effective_config.can_follow(now.spec, new):
                return
            made = InForce(new, told.revision, told.changes)
            self.current = made if not told.changes or told.base == made.base else InForce(new, told.revision)
        elif told.revision > now.revision and told.base == now.base:
            self.current = InForce(now.spec, told.revision, told.changes)


class _Begun(Struct, frozen=True):
    """The stored beginning of a step."""

    #: The turn of the step.
    turn_id: str
    #: The revision of the configuration.
    revision: int
    #: The changes that were in force.
    changes: list[effective_config.Change]


class TurnConfig:
    """The configurations of the steps of one turn."""

    def __init__(self, config: Configuration, catalog: Catalog, store: ConversationStore, turn_id: str) -> None:
        self._config = config
        self._catalog = catalog
        self._store = store
        self._turn_id = turn_id
        self._recorded = 0
        self._said = ""  # the base of what is stored of the bundle; "" before anybody has looked
        self._enter(config.current)

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
        earlier = None if said is None or said.base == now.base else Earlier(said.base, _applied(said.said, now.spec))
        if begun.revision != now.revision or earlier is not None:
            self._enter(InForce(now.spec, begun.revision, begun.changes, earlier))

    def begin_turn(self) -> None:
        """The turn begins (inside ConversationStore.write)."""
        if self.in_force.spec.extensions:
            self._note_bundle()

    def begin_step(self, step: int, *, again: bool) -> InForce:
        """A step begins, or is taken up `again`. Returns its configuration. Raises GoondanError as
        ConversationStore.write.
        """
        if not again:
            now = self._config.current
            if now is not self.in_force:
                self._enter(now)
            if now.revision != self._recorded or (now.spec.extensions and self._unsaid):
                with self._store.write():
                    if now.revision != self._recorded:
                        self._recorded = now.revision
                        begun = _Begun(self._turn_id, now.revision, now.changes)
                        self._store.remember(_STEP_CONFIG, msgspec.msgpack.encode(begun))
                    self._note_bundle()
        self._config.step = f"{self._turn_id}/{step}", self.in_force
        return self.in_force

    def close(self) -> None:
        """The turn has ended, or is left."""
        self._config.step = None

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
            kept = {one.name: one.config for one in now.spec.extensions if not one.confidential}
            said = Earlier(now.base, replace(effective_config.declared(now.spec), configs=kept))
            self._store.remember(_BUNDLE_SAID, msgspec.msgpack.encode(said))

    def _stored_said(self) -> Earlier | None:
        stored = self._store.remembered(_BUNDLE_SAID)
        return None if stored is None else msgspec.msgpack.decode(stored, type=Earlier)


def _applied(said: effective_config.Applied, spec: AgentSpec) -> effective_config.Applied:
    """The stored part of the bundle, for the extensions that still exist. The model is the one that can be
    asked now.
    """
    own = effective_config.declared(spec)
    kept = {name: config for name, config in said.configs.items() if name in own.configs}
    return replace(
        own,
        tools=said.tools,
        extensions=[name for name in said.extensions if name in own.configs],
        configs={**own.configs, **kept},
        system=said.system,
    )
