"""How much a model may write at most, and the param that tells its vendor. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from agentproc.providers.anthropic import DEFAULT_MAX_TOKENS
from schemas.launch import ModelSpec
from schemas.model_providers import BY_NAME, PROVIDERS

#: The name of the limit for most servers, also for those that speak as another vendor does.
_USUAL: Final = "max_tokens"
#: The params by which vendors limit an answer.
_PARAMS: Final = tuple(dict.fromkeys((_USUAL, *(provider.limit_param for provider in PROVIDERS))))


def output_limit(model: ModelSpec) -> int:
    """The most tokens of an answer; a guess when the params of the model give no limit. 0 for a provider that is no
    model and counts no tokens.
    """
    if model.provider == "embedded":
        return 0
    return next((value for name in _PARAMS if (value := _number(model, name)) is not None), DEFAULT_MAX_TOKENS)


def limited_output(model: ModelSpec, tokens: int) -> ModelSpec:
    """The model with answers of at most so many tokens."""
    name = next((name for name in _PARAMS if name in model.params), None)
    if name is None:
        name = BY_NAME[model.provider].limit_param if model.endpoint is None else _USUAL
    return msgspec.structs.replace(model, params={**model.params, name: tokens})


def _number(model: ModelSpec, name: str) -> int | None:
    value = model.params.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
