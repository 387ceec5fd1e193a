"""Budgets in an agent's process: it claims their part of the specification. The broker counts by it."""

from __future__ import annotations

from goondan.agentproc.parts import AgentFeature


class Budgets(AgentFeature):
    """The feature in the process of an agent instance."""

    name = "budgets"


FEATURE = Budgets
