"""`api.swarm_bundle`: changesets of the bundle, over the agent's own link. docs/changesets.md has the rules.

A request's id is made of the tool call that makes it, and of how many requests that call made before. So a call that
runs again gets the same changeset. Outside of tool calls each request has a new id.

Source: requirements BUNDLE-01 to BUNDLE-10, EVENTS-08.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from uuid import uuid4

import msgspec

from goondan.agentproc.calls.caller import AgentLink
from goondan.agentproc.extensions.local_calls import current_call
from goondan.agentproc.turn.parts import AgentFeature
from goondan.features.changesets import wire
from goondan.schemas.wire import errors, frames
from goondan.schemas.wire.codec import from_raw, replace_surrogates, to_raw

#: How long to wait for an answer (milliseconds). Changesets are handled one after another. Each takes a part of a
#: second, or some seconds in a large repository.
ANSWER_MS: Final = 180_000
#: How many characters of a changeset's id are sent. A valid id is shorter.
_MAX_ID: Final = 100


#: Called when a worktree is there, with its path and what it is made for.
Mounted = Callable[[str, dict[str, Any]], Awaitable[None]]


class Changesets(AgentFeature):
    """`api.swarm_bundle` in the process of an agent instance. No turn has a part of it."""

    name = "changesets"

    @property
    def api(self) -> Mapping[str, Callable[[str], object]]:
        """`api.swarm_bundle`."""
        api = SwarmBundleApi(BundleChanges(self.instance.link, self.instance.workspaces.mounted))
        return {"swarm_bundle": lambda extension: api}


#: See agentproc/turn/parts.py.
FEATURE: Final = Changesets


class BundleChanges:
    """The changesets of one agent instance. `mounted` tells its extensions about a new worktree."""

    def __init__(self, link: AgentLink, mounted: Mounted) -> None:
        self._link = link
        self._mounted = mounted
        self._asked: Counter[str] = Counter()

    async def open(self, reason: str) -> dict[str, Any]:
        """Make a new worktree. Raises GoondanError E_CHANGESET_IO, E_LEASE_LOST, E_FORBIDDEN."""
        payload = to_raw(wire.OpenChangeset(replace_surrogates(reason[: wire.MAX_REASON])))
        reply = await self._ask(frames.Frame("changeset.open", payload=payload))
        opened = from_raw(reply.payload, wire.OpenedChangeset)
        await self._mounted(opened.workdir, {"changesetId": opened.changeset_id})
        return _plain(opened)

    async def commit(self, changeset_id: str, message: str) -> dict[str, Any]:
        """Commit a changeset. Returns its outcome, failures included. Raises GoondanError E_LEASE_LOST, E_FORBIDDEN."""
        asked = wire.CommitChangeset(
            replace_surrogates(changeset_id[:_MAX_ID]), replace_surrogates(message[: wire.MAX_MESSAGE])
        )
        reply = await self._ask(frames.Frame("changeset.commit", payload=to_raw(asked)))
        return _plain(from_raw(reply.payload, wire.CommittedChangeset))

    async def _ask(self, frame: frames.Frame) -> frames.Frame:
        call = current_call.get()
        if call:
            self._asked[call] += 1
            frame.call_id = f"{call}.{self._asked[call]}"
        else:
            frame.call_id = uuid4().hex
        frame.deadline_ms = ANSWER_MS
        return await self._link.post(frame)


class SwarmBundleApi:
    """`api.swarm_bundle`."""

    __slots__ = ("_changes",)

    def __init__(self, changes: BundleChanges) -> None:
        self._changes = changes

    async def open_changeset(self, input: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A git worktree of the bundle: `{changesetId, baseRef, workdir, hint: {bundleRootInWorkdir,
        recommendedFiles}}`. `input` is `{reason}`, or nothing. No change in it is in force before it is committed.

        Raises GoondanError E_CHANGESET_IO, E_USAGE, and E_LEASE_LOST outside of a turn.
        """
        return await self._changes.open(_text(_fields(input), "reason"))

    async def commit_changeset(self, input: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a changeset's worktree; `input` is `{changesetId, message}`.

        Returns `{status, changesetId, baseRef, newRef, summary: {filesChanged, filesAdded, filesDeleted}, error: {code,
        message}}`. There is a `newRef` with the status `ok`, and an `error` with `rejected` and `failed`. Committed
        changes are in force from the next step. Raises GoondanError E_USAGE, and E_LEASE_LOST outside of a turn.
        """
        fields = _fields(input)
        changeset_id = _text(fields, "changesetId")
        if not changeset_id:
            raise errors.fail("E_USAGE", "commit_changeset needs the changesetId that open_changeset gave")
        return await self._changes.commit(changeset_id, _text(fields, "message"))


def _fields(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise errors.fail("E_USAGE", f"a changeset is asked for with an object, not {type(given).__name__}")
    return given


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise errors.fail("E_USAGE", f"{name} of a changeset is a text, not {type(value).__name__}")
    return value


def _plain(answer: wire.OpenedChangeset | wire.CommittedChangeset) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    return plain
