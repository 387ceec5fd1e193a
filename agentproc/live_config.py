"""The configuration that is in force for an agent instance: the bundle's, with the patches that the broker keeps.

Rules.
- The broker says what is in force, whole, with `welcome` and with each `config.changed`: the patches, and what the
  bundle says when that has changed. What is older than what is known, or was made for what another bundle says, is
  ignored. So is a specification that this process cannot follow (schemas/in_place.py): it is about to be replaced.
- A step runs with what was in force when it began (step_config.py).
- A proposal has an id that is derived from its step, so a step that is taken up again proposes the same patch.

Source: docs/live-config.md; docs/decisions/078; requirements CONFIG-01 to CONFIG-03.
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

from agentproc.extensions.effective import with_config
from schemas.codec import from_raw, to_raw
from schemas.effective_config import Applied, Change, apply_changes, declared, digest_of, shown
from schemas.errors import GoondanError, error_payload, fail
from schemas.frames import NO_PAYLOAD, ErrorPayload, Frame
from schemas.in_place import can_follow
from schemas.launch import AgentSpec, ExtensionSpec, ModelSpec
from schemas.live_config import MAX_PROPOSAL_BYTES, ConfigOutcome, ConfigProposal, LiveChanges

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


class Earlier(Struct, frozen=True):
    """What an earlier revision of the bundle said of the agent, by names. `base` names it."""

    base: str
    said: Applied


class InForce:
    """One configuration of an agent: what the bundle says, with changes. It does not change. `spec` is the bundle's
    part. `earlier`: this is what the bundle said when it began, and `spec` has what the names in it mean now.
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
        """Names what the bundle says (schemas.effective_config.digest_of)."""
        return digest_of(self.spec) if self._earlier is None else self._earlier.base

    @cached_property
    def _applied(self) -> Applied:
        said = declared(self.spec) if self._earlier is None else self._earlier.said
        return apply_changes(said, self.changes)

    @property
    def _differs(self) -> bool:
        """Whether it is another than what the bundle says now."""
        return bool(self.changes) or self._earlier is not None

    @cached_property
    def config(self) -> dict[str, Any]:
        """As extensions see it; nobody may change this one."""
        return shown(self.spec, self._applied)

    @property
    def tools(self) -> list[str] | None:
        """Names of Tools and of dynamic tools that a step begins with; None: what the bundle says."""
        own = self._earlier is not None or any(change.tools is not None for change in self.changes)
        return self._applied.tools if own else None

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._applied.system if self._differs else self.spec.system

    @cached_property
    def model(self) -> ModelSpec:
        """The model that is asked."""
        own = self.spec.model
        return msgspec.structs.replace(own, model=self._applied.model.model) if self._differs else own

    @property
    def max_steps(self) -> int:
        """Steps that a turn may take."""
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
    """What is in force for one agent instance, and how it is changed."""

    def __init__(
        self, spec: AgentSpec, instance_key: str, link: ProposingLink, redact: Callable[[str], str] = str
    ) -> None:
        """`redact` takes out of a text what is secret: no patch may hold that."""
        self._key = instance_key
        self._link = link
        self._redact = redact
        self.current = InForce(spec)
        self._seen: InForce | None = None  # what the step that runs was shown
        self._place = ""
        self._proposed: Counter[str] = Counter()

    def take(self, payload: Raw, spec: Raw = NO_PAYLOAD) -> None:
        """What the broker says is in force: LiveChanges, with what the bundle says in them or beside them. Raises
        GoondanError E_FRAME_INVALID.
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
        """A step begins with this: what its extensions propose is made from it."""
        self._seen, self._place = in_force, f"{turn_id}/{step}"
        self._proposed.clear()

    def end_turn(self) -> None:
        """No step runs: what is proposed now is made from what is known now."""
        self._seen, self._place = None, ""

    async def propose(self, proposal: Any, *, extension: str, registered: Sequence[str]) -> dict[str, Any]:
        """Propose a patch for an extension, and what came of it (LiveConfigApi.propose_patch). `registered` are the
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
        """The same for the same proposal of the same step, whatever is in force when that begins once more; outside of
        steps always another. `content` is the proposal as JSON.
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
