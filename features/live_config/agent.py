"""`api.live_config`: extensions propose patches of the running configuration.

The broker judges a patch. The configuration that comes of it reaches the agent like any other
(agentproc/turn/configuration.py). The id of a proposal is derived from its step, so a step that is taken up again
proposes the same patch.

Source: docs/live-config.md; requirement CONFIG-01.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from goondan.agentproc.calls.caller import until_answered
from goondan.agentproc.turn import configuration, parts
from goondan.agentproc.turn.instance import Instance
from goondan.features.live_config.wire import LIMIT, MAX_PROPOSAL_BYTES, ConfigOutcome, ConfigProposal
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import GoondanError, error_payload, fail

#: When an accepted patch takes effect, as the proposer is told.
EFFECTIVE_FROM: Final = "next-step"
_NO_SECRETS: Final = "A patch is kept as it is. Ask for the token where it is used: api.oauth.get_access_token."
#: The keys that a proposal may have.
_KEYS: Final = frozenset(("patches", "reason", "scope", "revision"))
#: How many dynamic tools one proposal can name: as many as it can have operations.
_MAX_REGISTERED: Final = 64


class LiveConfig(parts.AgentFeature):
    """`api.live_config` in the process of an agent instance. No turn has a part of it."""

    name = "live_config"

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self._step: tuple[str, configuration.InForce] | None = None
        self._proposed: Counter[str] = Counter()  # in this step, by extensions

    @property
    def api(self) -> Mapping[str, Callable[[str], object]]:
        """`api.live_config`."""
        return {"live_config": partial(LiveConfigApi, self)}

    def new_id(self, extension: str, content: bytes) -> str:
        """The id of a proposal. It is the same for the same proposal of the same step, even if the step begins again
        with another configuration. Outside of steps each id is new. `content` is the proposal as JSON.
        """
        step = self.instance.config.step
        if step is not self._step:
            self._step = step
            self._proposed.clear()
        self._proposed[extension] += 1
        place = os.urandom(8).hex() if step is None else step[0]
        named = (self.instance.spec.name, self.instance.instance_key, place, extension, str(self._proposed[extension]))
        digest = hashlib.blake2b("\0".join((*named, "")).encode("utf-8", "surrogatepass"), digest_size=10)
        digest.update(content)
        return "cfg-" + digest.hexdigest()


#: See agentproc/turn/parts.py.
FEATURE: Final = LiveConfig


class LiveConfigApi:
    """`api.live_config` of one extension (docs/live-config.md)."""

    __slots__ = ("_extension", "_feature")

    def __init__(self, feature: LiveConfig, extension: str) -> None:
        self._feature = feature
        self._extension = extension

    async def propose_patch(self, proposal: dict[str, Any]) -> dict[str, Any]:
        """Propose `{patches: [{op, path, value}], reason, scope, revision}`; only `patches` is required.

        `op` is `add`, `remove` or `replace`, `path` a JSON Pointer into the effective configuration. `scope` is
        `instance` (the default) or `agent`. `revision` is the configuration that the proposal was made from, by default
        that of the running step.

        Returns `{status: accepted | rejected, patchId, effectiveFrom: "next-step", revision, error}`; `error` is None
        or `{code, message, suggestion}`. Raises GoondanError: E_USAGE for an invalid proposal, E_LINK_CLOSED,
        E_FORBIDDEN for an agent that is answered from a recording.
        """
        given: Any = proposal
        if not isinstance(given, Mapping) or given.keys() - _KEYS or "patches" not in given:
            message = "a proposal is {patches: [{op, path, value}], reason, scope, revision}"
            raise fail("E_USAGE", message, suggestion="Give `patches`; the others may be left out.")
        instance, extension = self._feature.instance, self._extension
        config = instance.config
        seen = config.current if config.step is None else config.step[1]
        fields = {"revision": seen.revision, **{key: value for key, value in given.items() if value is not None}}
        patch_id = ""
        try:
            patch_id = self._feature.new_id(extension, msgspec.json.encode(dict(given), order="deterministic"))
            fields |= {"id": patch_id, "base": seen.base, "extension": extension}
            made = msgspec.convert(fields, ConfigProposal)
            named = msgspec.json.encode(made.patches).decode()
            if instance.secrets.redact(named) != named:
                message = "a patch may not hold a token"
                return _rejected(patch_id, error_payload("E_CONFIG_INVALID_VALUE", message, suggestion=_NO_SECRETS))
            mentioned = [name for name in instance.tools.names if name in named]
            payload = codec.to_raw(msgspec.structs.replace(made, registered=mentioned[:_MAX_REGISTERED]))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # with what msgspec finds wrong
            patch_id = patch_id or self._feature.new_id(extension, b"")
            return _rejected(patch_id, error_payload("E_CONFIG_INVALID_VALUE", f"no patch: {error}"))
        if len(memoryview(payload)) > MAX_PROPOSAL_BYTES:
            message = f"a proposal of {len(memoryview(payload))} bytes, limit {MAX_PROPOSAL_BYTES}"
            return _rejected(patch_id, error_payload(LIMIT, message))
        frame = frames.Frame("config.propose", payload=payload)
        future = instance.link.post(frame)
        try:
            outcome = codec.from_raw((await until_answered(instance.link, frame, future)).payload, ConfigOutcome)
        except GoondanError as error:
            if error.info.code == "E_LINK_CLOSED":
                raise
            return _rejected(patch_id, error.info)
        if outcome.error is not None:
            return _rejected(patch_id, outcome.error)
        return {**_OUTCOME, "status": "accepted", "patchId": outcome.patch_id, "revision": outcome.revision}


_OUTCOME: Final[dict[str, Any]] = {
    "status": "", "patchId": "", "effectiveFrom": EFFECTIVE_FROM, "revision": 0, "error": None,
}  # fmt: skip


def _rejected(patch_id: str, error: frames.ErrorPayload) -> dict[str, Any]:
    told = {"code": error.code, "message": error.message, "suggestion": error.suggestion}
    return {**_OUTCOME, "status": "rejected", "patchId": patch_id, "error": told}
