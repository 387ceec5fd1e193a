"""Which model an agent gets: the provider, its endpoint and its key, from the Model document and the environment.

`auto` takes the first that the environment offers: Anthropic by its key, OpenAI by its key, a server of one's own by
OPENAI_BASE_URL, else `embedded`. GOONDAN_PROVIDER settles the provider, GOONDAN_MODEL the model's name. Only the
quickstart and `gdn init` use `auto`. A bundle that names a vendor without its key is E_CONFIG_MISSING_ENV, never
embedded.

A server that is not the vendor's has models of its own: without a name, `auto` takes the first that it lists.

A key belongs to one origin: the vendor's, or that of the endpoint; so do a Model's headers. When the bundle names the
endpoint, the user has to agree to it (kernel/trust). Before that the model is held without its key and headers.

Source: docs/design/bundle.md section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from goondan.kernel.bundle.model_headers import header_values
from goondan.kernel.bundle.problems import Path
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody, ValueSource
from goondan.schemas.models.model_providers import (
    BY_NAME,
    DEFAULT_MAX_TOKENS,
    LIMIT_PARAMS,
    PROVIDERS,
    ModelProvider,
    limit_param,
)
from goondan.schemas.models.origins import is_open, origin_of

#: A person's choice for `auto`: a provider, and the name of a model.
PROVIDER_VARIABLE: Final = "GOONDAN_PROVIDER"
MODEL_VARIABLE: Final = "GOONDAN_MODEL"
#: Which variable makes `auto` choose which provider, in this order.
_BY_VARIABLE: Final[tuple[tuple[str, ModelProvider], ...]] = (
    *((provider.key_variable, provider) for provider in PROVIDERS),
    *((provider.url_variable, provider) for provider in PROVIDERS if provider.auto_by_url),
)
_NAMES: Final = ", ".join(BY_NAME)
#: The provider of servers that are named by their URL alone.
_BY_URL: Final = next(provider for provider in PROVIDERS if provider.auto_by_url)
#: Stands in the place of the variable where the person has chosen a server of this machine.
CHOSEN_BY: Final = "you"


class ModelFault(Struct, frozen=True):
    """Why an agent cannot use a Model."""

    #: The code of the error.
    code: str
    #: The message. `{}` in it stands for what the document says at `path`.
    message: str
    #: The place in the document.
    path: Path
    #: What to do about it.
    suggestion: str


def resolve_model(
    body: ModelBody,
    params: Mapping[str, Any],
    env: Mapping[str, str],
    document: str = "",
    chosen: str | None = None,
) -> ModelSpec | ModelFault:
    """The model of one agent. `params` are the agent's own: they win. An empty variable counts as unset. `document` is
    the name of the Model document. `chosen` is the server of this machine that the person has chosen; the environment
    comes before it.
    """
    model = _resolve(body, params, env, chosen)
    if isinstance(model, ModelFault):
        return model
    return replace(
        model,
        pricing=body.pricing,
        context_tokens=body.context_tokens,
        caching=body.caching,
        limits=body.limits,
        retry=body.retry,
        document=document,
        sees=body.sees,
    )


def _resolve(
    body: ModelBody, params: Mapping[str, Any], env: Mapping[str, str], chosen: str | None
) -> ModelSpec | ModelFault:
    merged = {**body.params, **params}
    if body.provider == "embedded":
        return ModelSpec(provider="embedded", model=body.model, params=merged)
    if body.provider == "replay":
        return ModelSpec(provider="replay", model=body.model, params=merged)
    if body.provider == "auto":
        if chosen is None or names_a_model(env):
            return _auto(body, merged, env)
        by_choice = _auto(body, merged, {**env, _BY_URL.url_variable: chosen})
        return by_choice if isinstance(by_choice, ModelFault) else replace(by_choice, chosen_by=CHOSEN_BY)
    provider = BY_NAME[body.provider]
    key = _own_key(body, env)
    if isinstance(key, ModelFault):
        return key
    if not body.model:
        message = f"provider {provider.name} needs the name of a model"
        return ModelFault("E_CONFIG_MISSING_FIELD", message, ("spec", "model"), "Add model: NAME.")
    key = key or env.get(provider.key_variable) or None
    if key is None and body.endpoint is None:
        return _no_key(provider, "give apiKey, or give endpoint if it is a server of your own that needs none")
    headers = header_values(body.headers, env)
    if isinstance(headers, tuple):
        return ModelFault(*headers)
    return ModelSpec(
        provider=provider.name,
        model=body.model,
        endpoint=body.endpoint,
        api_key=key,
        params=merged,
        key_origin=_key_origin(key is not None or bool(headers), body.endpoint),
        headers=headers,
        auth=body.auth,
        api_version=body.api_version,
    )


def without_key(model: ModelSpec) -> ModelSpec:
    """The model as it may be held before anybody has agreed to where its key and its headers go."""
    return replace(model, api_key=None, key_origin=None, headers={})


def sends_open_key(model: ModelSpec) -> bool:
    """Whether its key or its headers are sent over http to another machine."""
    return model.key_origin is not None and is_open(model.key_origin)


def _key_origin(secret: bool, endpoint: str | None) -> str | None:
    """Where a key goes: None for the vendor's own server. `secret`: there is a key, or there are headers."""
    return origin_of(endpoint) if secret and endpoint is not None else None


def doubled_end(provider: ModelProvider, endpoint: str) -> str | None:
    """The end of an endpoint that each request adds once more; None when there is none."""
    path = urlsplit(endpoint).path.rstrip("/")
    return max((end for end in provider.added if path.endswith(end)), key=len, default=None)


def doubled_hint(endpoint: str, end: str) -> str:
    """What to do about an endpoint with such an end."""
    path = urlsplit(endpoint).path.rstrip("/")
    return f"Leave {end} out: each request adds it to {path.removesuffix(end) or '/'}."


def model_text(model: ModelSpec) -> str:
    """A model in a few words for a person, with what made `auto` choose it. Says nothing of the key."""
    text = "the embedded console"
    if model.provider == "replay":
        text = "a recorded run"
    elif model.provider != "embedded":
        place = f" at {shown_endpoint(model.endpoint)}" if model.endpoint is not None else ""
        text = f"{model.provider}, {model.model or 'the first model that is listed'}{place}"
    if model.chosen_by is None:
        return text
    return text + (f" (chosen by {model.chosen_by})" if model.chosen_by else " (the environment names no other model)")


def shown_endpoint(url: str) -> str:
    """A URL as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_http_url(text: str) -> bool:
    """Whether requests can be sent there."""
    return origin_of(text) is not None and urlsplit(text).port != 0


def endpoint_fault(whose: str, url: str) -> tuple[str, str] | None:
    """What is wrong with the address of a model's server, and what to do; None: nothing. `whose` names it. A user in
    it would replace the key, and addresses are no place for secrets.
    """
    if not is_http_url(url):
        return f"{whose} is no http or https URL", "Write for example http://127.0.0.1:11434/v1."
    if "@" in urlsplit(url).netloc:
        return f"{whose} has a user or a password in it", "Leave them out: the key of the server is the Model's apiKey."
    return None


def _auto(body: ModelBody, params: dict[str, Any], env: Mapping[str, str]) -> ModelSpec | ModelFault:
    own = (("endpoint", body.endpoint), ("apiKey", body.api_key), ("headers", body.headers or None))
    for field, given in (*own, ("auth", body.auth), ("apiVersion", body.api_version)):
        if given is not None:
            message = f"provider auto takes its server from the environment, and has no {field} of its own"
            hint = f"Name the provider that it belongs to: {_NAMES}."
            return ModelFault("E_CONFIG_INVALID_VALUE", message, ("spec", field), hint)
    found = _choose(env)
    if isinstance(found, ModelFault):
        return found
    provider, chosen_by = found
    model = env.get(MODEL_VARIABLE) or body.model
    if provider is None:
        return ModelSpec(provider="embedded", model=body.model, params=params, chosen_by=chosen_by)
    key, endpoint = env.get(provider.key_variable) or None, env.get(provider.url_variable) or None
    if key is None and endpoint is None:
        return _no_key(provider, f"or unset {PROVIDER_VARIABLE}")
    whose = f"the environment variable {provider.url_variable}"
    if endpoint is not None and (fault := endpoint_fault(whose, endpoint)) is not None:
        return ModelFault("E_CONFIG_INVALID_VALUE", fault[0], ("spec", "provider"), fault[1])
    if endpoint is not None and (end := doubled_end(provider, endpoint)) is not None:
        message = f"the environment variable {provider.url_variable} ends in {end}, which each request adds"
        return ModelFault("E_CONFIG_INVALID_VALUE", message, ("spec", "provider"), doubled_hint(endpoint, end))
    # A vendor's usual model is on the vendor's server. Any other server is asked which models it has.
    name = model or (provider.auto_model if is_vendors(provider, endpoint) else "")
    return ModelSpec(
        provider=provider.name,
        model=name,
        endpoint=endpoint,
        api_key=key,
        params=_limited(provider, endpoint, params),
        chosen_by=chosen_by,
        key_origin=_key_origin(key is not None, endpoint),
    )


def _limited(provider: ModelProvider, endpoint: str | None, params: dict[str, Any]) -> dict[str, Any]:
    """The params with a limit for an answer. A base model that has none talks until somebody stops it."""
    if any(name in params for name in LIMIT_PARAMS):
        return params
    tokens = provider.auto_tokens if is_vendors(provider, endpoint) else DEFAULT_MAX_TOKENS
    return {**params, limit_param(provider.name, endpoint): tokens}


def is_vendors(provider: ModelProvider, endpoint: str | None) -> bool:
    """Whether an endpoint is the vendor's own server; None is."""
    return endpoint is None or origin_of(endpoint) == origin_of(provider.server)


def names_a_model(env: Mapping[str, str]) -> bool:
    """Whether the environment settles what `auto` takes."""
    return any(env.get(variable) for variable in (PROVIDER_VARIABLE, *(variable for variable, _ in _BY_VARIABLE)))


def _choose(env: Mapping[str, str]) -> tuple[ModelProvider | None, str] | ModelFault:
    """The provider, None for `embedded`, and the variable that settled it ("" when none did)."""
    wanted = env.get(PROVIDER_VARIABLE)
    if wanted:
        if wanted == "embedded" or wanted in BY_NAME:
            return BY_NAME.get(wanted), PROVIDER_VARIABLE
        message = f"the environment variable {PROVIDER_VARIABLE} names no provider"
        hint = f"Set it to {_NAMES} or embedded, or unset it."
        return ModelFault("E_CONFIG_INVALID_VALUE", message, ("spec", "provider"), hint)
    for variable, provider in _BY_VARIABLE:
        if env.get(variable):
            return provider, variable
    return None, ""


def _no_key(provider: ModelProvider, otherwise: str) -> ModelFault:
    name = provider.key_variable
    message = f"the environment variable {name} is not set, and provider {provider.name} needs a key"
    return ModelFault("E_CONFIG_MISSING_ENV", message, ("spec", "provider"), f"Set {name}, {otherwise}.")


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
