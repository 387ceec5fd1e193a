"""Which model an agent gets: the provider, its endpoint and its key, from the Model document and the environment.

`auto` takes the vendor whose key is in the environment, else `embedded`: only the quickstart and `gdn init` use it.
A bundle that names a vendor without its key is E_CONFIG_MISSING_ENV, never embedded.

Source: design section 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from kernel.bundle.problems import Path
from schemas.launch import ModelSpec
from schemas.resources import ModelBody, ValueSource

Vendor = Literal["anthropic", "openai"]
#: Where a vendor's key is by custom, its own server, and the model `auto` takes.
KEY_VARIABLE: Final[dict[str, str]] = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY"}
URL_VARIABLE: Final[dict[str, str]] = {"anthropic": "ANTHROPIC_BASE_URL", "openai": "OPENAI_BASE_URL"}
MODEL_VARIABLE: Final[dict[str, str]] = {"anthropic": "ANTHROPIC_MODEL", "openai": "OPENAI_MODEL"}
AUTO_MODEL: Final[dict[str, str]] = {"anthropic": "claude-sonnet-4-5", "openai": "gpt-5-mini"}


class ModelFault(Struct, frozen=True):
    """Why a Model cannot be used by an agent. `{}` in the message is what its document says at `path`."""

    code: str
    message: str
    path: Path
    suggestion: str


def resolve_model(body: ModelBody, params: Mapping[str, Any], env: Mapping[str, str]) -> ModelSpec | ModelFault:
    """The model of one agent. `params` are the agent's own: they win. An empty variable counts as unset."""
    merged = {**body.params, **params}
    if body.provider == "embedded":
        return ModelSpec(provider="embedded", model=body.model, params=merged)
    if body.provider == "auto":
        return _auto(body, merged, env)
    vendor: Vendor = body.provider
    key = _own_key(body, env)
    if isinstance(key, ModelFault):
        return key
    if not body.model:
        message = f"provider {vendor} needs the name of a model"
        return ModelFault("E_CONFIG_MISSING_FIELD", message, ("spec", "model"), "Add model: NAME.")
    key = key or env.get(KEY_VARIABLE[vendor]) or None
    if key is None and body.endpoint is None:
        name = KEY_VARIABLE[vendor]
        message = f"the environment variable {name} is not set, and provider {vendor} needs a key"
        hint = f"Set {name}, give apiKey, or give endpoint if it is a server of your own that needs none."
        return ModelFault("E_CONFIG_MISSING_ENV", message, ("spec", "provider"), hint)
    return ModelSpec(provider=vendor, model=body.model, endpoint=body.endpoint, api_key=key, params=merged)


def _auto(body: ModelBody, params: dict[str, Any], env: Mapping[str, str]) -> ModelSpec | ModelFault:
    vendor: Vendor
    if env.get(KEY_VARIABLE["anthropic"]):
        vendor = "anthropic"
    elif env.get(KEY_VARIABLE["openai"]) or env.get(URL_VARIABLE["openai"]):
        vendor = "openai"
    else:
        return ModelSpec(provider="embedded", model=body.model, params=params)
    key = _own_key(body, env)
    if isinstance(key, ModelFault):
        return key
    return ModelSpec(
        provider=vendor,
        model=body.model or env.get(MODEL_VARIABLE[vendor]) or AUTO_MODEL[vendor],
        endpoint=body.endpoint or env.get(URL_VARIABLE[vendor]) or None,
        api_key=key or env.get(KEY_VARIABLE[vendor]) or None,
        params=params,
    )


def _own_key(body: ModelBody, env: Mapping[str, str]) -> str | ModelFault | None:
    """The key that the document gives, None when it gives none."""
    key = body.api_key
    if not isinstance(key, ValueSource):
        return key or None
    if key.value_from is None:
        return key.value or None
    name = key.value_from.env
    value = env.get(name)
    if value:
        return value
    path = ("spec", "apiKey", "valueFrom", "env")
    return ModelFault("E_CONFIG_MISSING_ENV", "the environment variable {} is not set", path, "Set it.")
