"""Which provider serves a model. Each is imported when an agent needs it: most of their weight is in what they use."""

from __future__ import annotations

from agentproc.providers.base import Provider
from schemas.launch import ModelSpec


def make_provider(model: ModelSpec) -> Provider:
    """The provider of a model. Cheap: nothing is connected or loaded for connecting before the first call."""
    if model.provider == "embedded":
        from agentproc.providers.embedded import EmbeddedProvider

        return EmbeddedProvider()
    from agentproc.providers.http import HttpProvider

    if model.provider == "anthropic":
        from agentproc.providers.anthropic import Anthropic

        return HttpProvider(Anthropic())
    from agentproc.providers.openai import OpenAI

    return HttpProvider(OpenAI())
