"""Telling extensions of the repository in which the agent works.

Source: requirements EVENTS-07, PIPELINE-12, PIPELINE-24.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

from agentproc.extensions.events import EventBus
from agentproc.extensions.pipeline import POINTS, Pipeline, Watch
from agentproc.extensions.point_contexts import WorkspacePointContext
from agentproc.extensions.points import LayerFailed, run_mutators
from agentproc.extensions.repositories import repository_at

REPO_AVAILABLE = "workspace.repoAvailable"

log = logging.getLogger("agentproc")


class Workspaces:
    """Which workdir the extensions of an instance have been told of."""

    def __init__(self, pipeline: Pipeline, events: EventBus, watch: Watch) -> None:
        self._watch = watch
        self._pipeline = pipeline
        self._events = events
        self._told = ""

    async def enter(self, workdir: str) -> None:
        """The next turn works here. A repository is told once for as long as the workdir stays the same: first to the
        mutators of `workspace.repoAvailable`, then as an event with what they have made of its metadata.
        """
        if workdir == self._told or (self._pipeline.empty and self._events.empty):
            return
        self._told = workdir
        repository = repository_at(workdir)
        if repository is None:
            return
        context = WorkspacePointContext(repository.path, "repo", dict(repository.metadata) or None)
        try:
            mutators = self._pipeline.at(REPO_AVAILABLE)
            context = await run_mutators(mutators, context, POINTS[REPO_AVAILABLE].changes, self._watch)
        except LayerFailed as fault:
            lines = "".join(traceback.format_exception(fault.error)).rstrip()
            log.warning("the %s handler of extension %s failed\n%s", REPO_AVAILABLE, fault.layer.extension, lines)
        payload: dict[str, Any] = {"path": context.path}
        if context.metadata is not None:
            payload["metadata"] = context.metadata
        self._events.emit(REPO_AVAILABLE, payload, emitter="the kernel")
