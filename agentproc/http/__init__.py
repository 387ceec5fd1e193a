"""Asks the servers of models over HTTP, and makes the provider of a model. What requests say and answers mean is in
goondan.agentproc.providers.

A provider is imported when an agent needs it, because its libraries are heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from goondan.agentproc.providers.base import Provider
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.agentproc.providers.vendor import Vendor


class Wire(Protocol):
    """The names that a provider's module has."""

    #: Speaks the vendor's wire.
    VENDOR: Callable[[], Vendor[Any]]
    #: Bodies of two streamed answers: one that calls the tool TOOL with {"a": "1"}, and one that says that it is done.
    #: The fork server plays them, so that agents share what a call needs in memory (agentproc/start/warm_models.py).
    REHEARSED: tuple[str, str]


def wire_of(provider: str) -> Wire:
    """The module of a provider. Raises GoondanError E_CONFIG_INVALID_VALUE when there is no such provider."""
    if provider not in BY_NAME:
        known = ", ".join((*BY_NAME, "embedded"))
        raise fail("E_CONFIG_INVALID_VALUE", f"no model provider {provider[:80]!r}; there are: {known}")
    return cast(Wire, import_module(f"goondan.agentproc.providers.{provider}"))


def make_provider(model: ModelSpec) -> Provider:
    """The provider of a model. This is cheap: connecting, and loading the parts for it, wait for the first call.

    Raises GoondanError E_CONFIG_INVALID_VALUE when there is no such provider.
    """
    if model.provider == "embedded":
        from goondan.agentproc.providers.embedded import EmbeddedProvider

        return EmbeddedProvider()
    wire = wire_of(model.provider)
    from goondan.agentproc.http.provider import HttpProvider

    return HttpProvider(wire.VENDOR())
