"""Tells extensions about the repository in which the agent works, and about the worktrees of changesets.

Source: requirements EVENTS-07, EVENTS-08, BUNDLE-10, PIPELINE-12, PIPELINE-24.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any, Final

from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.extensions.pipeline import POINTS, Pipeline, Watch
from goondan.agentproc.extensions.point_contexts import WorkspacePointContext
from goondan.agentproc.extensions.points import LayerFailed, run_mutators
from goondan.agentproc.extensions.repositories import repository_at

REPO_AVAILABLE: Final = "workspace.repoAvailable"
WORKTREE_MOUNTED: Final = "workspace.worktreeMounted"

log = logging.getLogger("agentproc")


class Workspaces:
    """Remembers the workdir that the extensions of an instance were told about."""

    def __init__(self, pipeline: Pipeline, events: EventBus, watch: Watch) -> None:
        self._watch = watch
        self._pipeline = pipeline
        self._events = events
        self._told = ""
        #: The workdir of the running turn, or of the last one; "" before the first turn.
        self.workdir = ""

    async def enter(self, workdir: str) -> None:
        """The next turn works in this workdir. A repository is announced once for as long as the workdir stays the
        same: first to the mutators of `workspace.repoAvailable`, then as an event with the metadata that they return.
        """
        self.workdir = workdir
        if workdir == self._told or (self._pipeline.empty and self._events.empty):
            return
        self._told = workdir
        repository = repository_at(workdir)
        if repository is None:
            return
        context = WorkspacePointContext(repository.path, "repo", dict(repository.metadata) or None)
        told = await self._mutated(REPO_AVAILABLE, context)
        payload: dict[str, Any] = {"path": told.path}
        if told.metadata is not None:
            payload["metadata"] = told.metadata
        self._events.emit(REPO_AVAILABLE, payload, emitter="the kernel")

    async def mounted(self, path: str, changeset_id: str) -> None:
        """A changeset has a worktree. It is announced to the mutators of `workspace.worktreeMounted`, then
        as an event.
        """
        context = WorkspacePointContext(path, "worktree", {"changesetId": changeset_id})
        told = await self._mutated(WORKTREE_MOUNTED, context)
        payload: dict[str, Any] = {"path": told.path, "changesetId": changeset_id}
        added = {key: value for key, value in (told.metadata or {}).items() if key != "changesetId"}
        if added:
            payload["metadata"] = added
        self._events.emit(WORKTREE_MOUNTED, payload, emitter="the kernel")

    async def _mutated(self, point: str, context: WorkspacePointContext) -> WorkspacePointContext:
        """The context after the mutators of a point. When one of them fails, that is logged."""
        try:
            mutators = self._pipeline.at(point)
            return await run_mutators(mutators, context, POINTS[point].changes, self._watch)
        except LayerFailed as fault:
            lines = "".join(traceback.format_exception(fault.error)).rstrip()
            log.warning("the %s handler of extension %s failed\n%s", point, fault.layer.extension, lines)
            return context
