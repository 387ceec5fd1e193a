"""How much a model may write at most, and the param that tells its vendor. Pure."""

from __future__ import annotations

import msgspec

from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.model_providers import DEFAULT_MAX_TOKENS, LIMIT_PARAMS, limit_param


def output_limit(model: ModelSpec) -> int:
    """The most tokens of an answer; a guess when the params of the model give no limit. 0 for a provider that is no
    model and counts no tokens.
    """
    if model.provider == "embedded":
        return 0
    return next((value for name in LIMIT_PARAMS if (value := _number(model, name)) is not None), DEFAULT_MAX_TOKENS)


def limited_output(model: ModelSpec, tokens: int) -> ModelSpec:
    """The model with answers of at most so many tokens."""
    name = next((name for name in LIMIT_PARAMS if name in model.params), limit_param(model.provider, model.endpoint))
    return msgspec.structs.replace(model, params={**model.params, name: tokens})


def _number(model: ModelSpec, name: str) -> int | None:
    value = model.params.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
