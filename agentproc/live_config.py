"""The configuration that is in force for an agent instance: the bundle's, with the patches that the broker keeps.

Rules.
- The broker says what is in force, whole, with `welcome` and with each `config.changed`. What is older than what is
  known, or was made for what another bundle says, is ignored.
- A step runs with what was in force when it began. That is stored beside its turn, so a process that takes the step up
  again runs it with the same.
- A proposal has an id that is derived from its step, so a step that is taken up again proposes the same patch.

Source: docs/live-config.md; requirements CONFIG-01 to CONFIG-03.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw, Struct

from agentproc.catalog import Catalog
from agentproc.extensions.effective import with_config
from agentproc.store import ConversationStore
from schemas.codec import from_raw, to_raw
from schemas.effective_config import Applied, Change, apply_changes, declared, digest_of, shown
from schemas.errors import GoondanError, error_payload, fail
from schemas.frames import NO_PAYLOAD, ErrorPayload, Frame
from schemas.launch import AgentSpec, ExtensionSpec, ModelSpec
from schemas.live_config import MAX_PROPOSAL_BYTES, ConfigOutcome, ConfigProposal, LiveChanges

#: Where the conversation's file has what the last step began with.
_STEP_CONFIG: Final = "step_config"
#: From when on an accepted patch counts, as proposers are told.
EFFECTIVE_FROM: Final = "next-step"
_NO_SECRETS: Final = "A patch is kept as it is. Ask for the token where it is used: api.oauth.get_access_token."
#: What a proposal may have.
_KEYS: Final = frozenset(("patches", "reason", "scope", "revision"))
#: Dynamic tools that one proposal can name: as many as it has operations.
_MAX_REGISTERED: Final = 64


class ProposingLink(Protocol):
    """What is needed of a link (schemas.link.Link)."""

    def post(self, frame: Frame) -> asyncio.Future[Frame]: ...
    def forget(self, frame_id: str) -> None: ...


class InForce:
    """One configuration of an agent: what the bundle says, with changes. It does not change."""

    def __init__(self, spec: AgentSpec, revision: int = 0, changes: Sequence[Change] = ()) -> None:
        self._spec = spec
        self.revision = revision
        self.changes = list(changes)

    @cached_property
    def _applied(self) -> Applied:
        return apply_changes(declared(self._spec), self.changes)

    @cached_property
    def config(self) -> dict[str, Any]:
        """As extensions see it; nobody may change this one."""
        return shown(self._spec, self._applied)

    @property
    def tools(self) -> list[str] | None:
        """Names of Tools and of dynamic tools that a step begins with; None: what the bundle says."""
        return self._applied.tools if any(change.tools is not None for change in self.changes) else None

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._applied.system if self.changes else self._spec.system

    @cached_property
    def model(self) -> ModelSpec:
        """The model that is asked."""
        own = self._spec.model
        return msgspec.structs.replace(own, model=self._applied.model.model) if self.changes else own

    @property
    def max_steps(self) -> int:
        """Steps that a turn may take."""
        return self._applied.max_steps if self.changes else self._spec.max_steps_per_turn

    @cached_property
    def extensions(self) -> list[ExtensionSpec]:
        """The extensions, in their order."""
        if not self.changes:
            return self._spec.extensions
        known = {extension.name: extension for extension in self._spec.extensions}
        configs = self._applied.configs
        return [
            known[name] if configs[name] == known[name].config else with_config(known[name], configs[name])
            for name in self._applied.extensions
        ]


class LiveConfig:
    """What is in force for one agent instance, and how it is changed."""

    def __init__(
        self, spec: AgentSpec, instance_key: str, link: ProposingLink, redact: Callable[[str], str] = str
    ) -> None:
        """`redact` takes out of a text what is secret: no patch may hold that."""
        self._spec = spec
        self._key = instance_key
        self._link = link
        self._redact = redact
        self._digest = ""
        self.current = InForce(spec)
        self._seen: InForce | None = None  # what the step that runs was shown
        self._place = ""
        self._proposed: Counter[str] = Counter()

    def take(self, payload: Raw) -> None:
        """What the broker says is in force. Raises GoondanError E_FRAME_INVALID."""
        if payload == NO_PAYLOAD:
            return
        told = from_raw(payload, LiveChanges)
        if told.revision <= self.current.revision or told.base != self._base:
            return
        self.current = InForce(self._spec, told.revision, told.changes)

    def begin_step(self, turn_id: str, step: int, in_force: InForce) -> None:
        """A step begins with this: what its extensions propose is made from it."""
        self._seen, self._place = in_force, f"{turn_id}/{step}"
        self._proposed.clear()

    def end_turn(self) -> None:
        """No step runs: what is proposed now is made from what is known now."""
        self._seen, self._place = None, ""

    def earlier(self, revision: int, changes: Sequence[Change]) -> InForce:
        """What was in force when a step began."""
        return InForce(self._spec, revision, changes)

    async def propose(self, proposal: Any, *, extension: str, registered: Sequence[str]) -> dict[str, Any]:
        """Propose a patch for an extension, and what came of it (LiveConfigApi.propose_patch). `registered` are the
        names of dynamic tools. Raises GoondanError E_USAGE, E_LINK_CLOSED.
        """
        if not isinstance(proposal, Mapping) or proposal.keys() - _KEYS or "patches" not in proposal:
            message = "a proposal is {patches: [{op, path, value}], reason, scope, revision}"
            raise fail("E_USAGE", message, suggestion="Give `patches`; the others may be left out.")
        seen = self.current if self._seen is None else self._seen
        fields = {"revision": seen.revision, **{key: value for key, value in proposal.items() if value is not None}}
        patch_id = self._new_id(extension, proposal)
        try:
            given = {**fields, "id": patch_id, "base": self._base, "extension": extension}
            made = msgspec.convert(given, ConfigProposal)
            named = msgspec.json.encode(made.patches).decode()
            if self._redact(named) != named:
                message = "a patch may not hold a token"
                return _rejected(patch_id, error_payload("E_CONFIG_INVALID_VALUE", message, suggestion=_NO_SECRETS))
            mentioned = [name for name in registered if name in named]
            payload = to_raw(msgspec.structs.replace(made, registered=mentioned[:_MAX_REGISTERED]))
        except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
            return _rejected(patch_id, error_payload("E_CONFIG_INVALID_VALUE", f"no patch: {error}"))
        if len(memoryview(payload)) > MAX_PROPOSAL_BYTES:
            message = f"a proposal of {len(memoryview(payload))} bytes, limit {MAX_PROPOSAL_BYTES}"
            return _rejected(patch_id, error_payload("E_CONFIG_LIMIT", message))
        frame = Frame("config.propose", payload=payload)
        future = self._link.post(frame)
        try:
            outcome = from_raw((await future).payload, ConfigOutcome)
        except GoondanError as error:
            if error.info.code == "E_LINK_CLOSED":
                raise
            return _rejected(patch_id, error.info)
        finally:
            if not future.done() or future.cancelled():
                self._link.forget(frame.id)
        if outcome.error is not None:
            return _rejected(patch_id, outcome.error)
        return {**_OUTCOME, "status": "accepted", "patchId": outcome.patch_id, "revision": outcome.revision}

    # --- inside

    @property
    def _base(self) -> str:
        self._digest = self._digest or digest_of(self._spec)
        return self._digest

    def _new_id(self, extension: str, proposal: Mapping[str, Any]) -> str:
        """The same for the same proposal of the same step, whatever is in force when that begins once more; outside of
        steps always another.
        """
        self._proposed[extension] += 1
        place = self._place or os.urandom(8).hex()
        content = repr(sorted(proposal.items()))
        told = "\0".join((self._spec.name, self._key, place, extension, str(self._proposed[extension]), content))
        return "cfg-" + hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


_OUTCOME: Final[dict[str, Any]] = {
    "status": "", "patchId": "", "effectiveFrom": EFFECTIVE_FROM, "revision": 0, "error": None,
}  # fmt: skip


def _rejected(patch_id: str, error: ErrorPayload) -> dict[str, Any]:
    told = {"code": error.code, "message": error.message, "suggestion": error.suggestion}
    return {**_OUTCOME, "status": "rejected", "patchId": patch_id, "error": told}


class _Begun(Struct, frozen=True):
    """What is stored of a step that has begun: its turn, and what was in force."""

    turn_id: str
    revision: int
    changes: list[Change]


class TurnConfig:
    """The configurations of the steps of one turn: each has that of its begin, which is stored before the step runs."""

    def __init__(self, live: LiveConfig, catalog: Catalog, store: ConversationStore, turn_id: str) -> None:
        self._live = live
        self._catalog = catalog
        self._store = store
        self._turn_id = turn_id
        self._recorded = 0
        #: That of the step that runs, or of the next one.
        self.in_force = live.current
        catalog.begin_with(self.in_force.tools)

    def resume(self) -> None:
        """An earlier process has begun the turn: what its last step began with is in force until the next one begins.

        Raises GoondanError E_STATE.
        """
        stored = self._store.remembered(_STEP_CONFIG)
        begun = None if stored is None else msgspec.msgpack.decode(stored, type=_Begun)
        if begun is None or begun.turn_id != self._turn_id:
            begun = _Begun(self._turn_id, 0, [])
        self._recorded = begun.revision
        if begun.revision != self.in_force.revision:
            self.in_force = self._live.earlier(begun.revision, begun.changes)
            self._catalog.begin_with(self.in_force.tools)

    def begin_step(self, step: int, *, again: bool) -> InForce:
        """A step begins, or is taken up `again`; what it runs with. Raises GoondanError as ConversationStore.write."""
        if not again:
            self.in_force = self._live.current
            self._catalog.begin_with(self.in_force.tools)
            if self.in_force.revision != self._recorded:
                self._recorded = self.in_force.revision
                begun = _Begun(self._turn_id, self.in_force.revision, self.in_force.changes)
                with self._store.write():
                    self._store.remember(_STEP_CONFIG, msgspec.msgpack.encode(begun))
        self._live.begin_step(self._turn_id, step, self.in_force)
        return self.in_force

    def close(self) -> None:
        """The turn has ended, or is left."""
        self._live.end_turn()
