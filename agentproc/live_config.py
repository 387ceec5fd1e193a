"""The configuration in force for an agent instance: the bundle's configuration with the patches that the broker keeps.

Rules.
- The broker sends the whole configuration with `welcome` and with each `config.changed`: the patches, and the bundle's
  part when that has changed. Older news, and patches made for another state of the bundle, are ignored. So is a
  specification that this process cannot follow (schemas/bundle/effective_config.py): the process is about to be
  replaced.
- A step runs with the configuration that was in force when it began (step_config.py).
- The id of a proposal is derived from its step, so a step that is taken up again proposes the same patch.

Source: docs/live-config.md; docs/design/turns.md section 9; requirements CONFIG-01 to CONFIG-03.
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

from goondan.agentproc.extensions.step_changes import with_config
from goondan.schemas.bundle.effective_config import (
    Applied,
    Change,
    LiveChanges,
    apply_changes,
    can_follow,
    declared,
    digest_of,
    shown,
)
from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec, ModelSpec
from goondan.schemas.live_config import MAX_PROPOSAL_BYTES, ConfigOutcome, ConfigProposal
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import NO_PAYLOAD, ErrorPayload, Frame

#: When an accepted patch takes effect, as the proposer is told.
EFFECTIVE_FROM: Final = "next-step"
_NO_SECRETS: Final = "A patch is kept as it is. Ask for the token where it is used: api.oauth.get_access_token."
#: The keys that a proposal may have.
_KEYS: Final = frozenset(("patches", "reason", "scope", "revision"))
#: How many dynamic tools one proposal can name: as many as it can have operations.
_MAX_REGISTERED: Final = 64


class ProposingLink(Protocol):
    """The methods of a link that are used here (goondan.schemas.transport.link.Link)."""

    def post(self, frame: Frame) -> asyncio.Future[Frame]: ...
    def forget(self, frame_id: str) -> None: ...


class Earlier(Struct, frozen=True):
    """The agent as an earlier revision of the bundle described it, by names. `base` identifies that revision."""

    #: The revision.
    base: str
    #: What it said.
    said: Applied


class InForce:
    """One configuration of an agent: the bundle's part (`spec`) with changes. It does not change. `earlier` is the
    bundle's part when the configuration began, if that was another; `spec` then has the current meaning of the names in
    it.
    """

    def __init__(
        self, spec: AgentSpec, revision: int = 0, changes: Sequence[Change] = (), earlier: Earlier | None = None
    ) -> None:
        self.spec = spec
        self.revision = revision
        self.changes = list(changes)
        self._earlier = earlier

    @cached_property
    def base(self) -> str:
        """Identifies the bundle's part (goondan.schemas.bundle.effective_config.digest_of)."""
        return digest_of(self.spec) if self._earlier is None else self._earlier.base

    @cached_property
    def _applied(self) -> Applied:
        said = declared(self.spec) if self._earlier is None else self._earlier.said
        return apply_changes(said, self.changes)

    @property
    def _differs(self) -> bool:
        """Whether it differs from the bundle's current configuration."""
        return bool(self.changes) or self._earlier is not None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as extensions see it. Nobody may change this object."""
        return shown(self.spec, self._applied)

    @property
    def tools(self) -> list[str] | None:
        """The names of the Tools and of the dynamic tools that a step begins with; None: those that the
        bundle gives.
        """
        own = self._earlier is not None or any(change.tools is not None for change in self.changes)
        return self._applied.tools if own else None

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._applied.system if self._differs else self.spec.system

    @cached_property
    def model(self) -> ModelSpec:
        """The model of the step."""
        own = self.spec.model
        return msgspec.structs.replace(own, model=self._applied.model.model) if self._differs else own

    @property
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


class LiveConfig:
    """The configuration in force for one agent instance, and the way to change it."""

    def __init__(
        self, spec: AgentSpec, instance_key: str, link: ProposingLink, redact: Callable[[str], str] = str
    ) -> None:
        """`redact` removes secrets from a text. A patch that contains a secret is refused."""
        self._key = instance_key
        self._link = link
        self._redact = redact
        self.current = InForce(spec)
        self._seen: InForce | None = None  # what the step that runs was shown
        self._place = ""
        self._proposed: Counter[str] = Counter()

    def take(self, payload: Raw, spec: Raw = NO_PAYLOAD) -> None:
        """Take the configuration that the broker sends: LiveChanges, with the bundle's part in them or beside them.
        Raises GoondanError E_FRAME_INVALID.
        """
        told = LiveChanges() if payload == NO_PAYLOAD else from_raw(payload, LiveChanges)
        now = self.current
        given = told.spec if spec == NO_PAYLOAD else spec
        new = now.spec if given == NO_PAYLOAD else from_raw(given, AgentSpec)
        if new != now.spec:
            if not can_follow(now.spec, new):
                return
            made = InForce(new, told.revision, told.changes)
            self.current = made if not told.changes or told.base == made.base else InForce(new, told.revision)
        elif told.revision > now.revision and told.base == now.base:
            self.current = InForce(now.spec, told.revision, told.changes)

    def begin_step(self, turn_id: str, step: int, in_force: InForce) -> None:
        """A step begins with this configuration. The proposals of its extensions are based on it."""
        self._seen, self._place = in_force, f"{turn_id}/{step}"
        self._proposed.clear()

    def end_turn(self) -> None:
        """No step runs. Proposals are now based on the latest known configuration."""
        self._seen, self._place = None, ""

    async def propose(self, proposal: Any, *, extension: str, registered: Sequence[str]) -> dict[str, Any]:
        """Propose a patch for an extension, and return the outcome (LiveConfigApi.propose_patch). `registered` are the
        names of dynamic tools. Raises GoondanError E_USAGE, E_LINK_CLOSED.
        """
        if not isinstance(proposal, Mapping) or proposal.keys() - _KEYS or "patches" not in proposal:
            message = "a proposal is {patches: [{op, path, value}], reason, scope, revision}"
            raise fail("E_USAGE", message, suggestion="Give `patches`; the others may be left out.")
        seen = self.current if self._seen is None else self._seen
        fields = {"revision": seen.revision, **{key: value for key, value in proposal.items() if value is not None}}
        patch_id = ""
        try:
            patch_id = self._new_id(extension, msgspec.json.encode(dict(proposal), order="deterministic"))
            given = {**fields, "id": patch_id, "base": seen.base, "extension": extension}
            made = msgspec.convert(given, ConfigProposal)
            named = msgspec.json.encode(made.patches).decode()
            if self._redact(named) != named:
                message = "a patch may not hold a token"
                return _rejected(patch_id, error_payload("E_CONFIG_INVALID_VALUE", message, suggestion=_NO_SECRETS))
            mentioned = [name for name in registered if name in named]
            payload = to_raw(msgspec.structs.replace(made, registered=mentioned[:_MAX_REGISTERED]))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # with what msgspec finds wrong
            patch_id = patch_id or self._new_id(extension, b"")
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

    def _new_id(self, extension: str, content: bytes) -> str:
        """The id is the same for the same proposal of the same step, even if the step begins again with another
        configuration. Outside of steps each id is new. `content` is the proposal as JSON.
        """
        self._proposed[extension] += 1
        place = self._place or os.urandom(8).hex()
        told = "\0".join((self.current.spec.name, self._key, place, extension, str(self._proposed[extension]), ""))
        digest = hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=10)
        digest.update(content)
        return "cfg-" + digest.hexdigest()


_OUTCOME: Final[dict[str, Any]] = {
    "status": "", "patchId": "", "effectiveFrom": EFFECTIVE_FROM, "revision": 0, "error": None,
}  # fmt: skip


def _rejected(patch_id: str, error: ErrorPayload) -> dict[str, Any]:
    told = {"code": error.code, "message": error.message, "suggestion": error.suggestion}
    return {**_OUTCOME, "status": "rejected", "patchId": patch_id, "error": told}
