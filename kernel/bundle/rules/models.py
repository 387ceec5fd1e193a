"""Which model an agent gets, from the Model document and the environment: the provider, its endpoint, its key and its
headers. And the rules of a Model's fields that no type can say. Pure.

`auto` takes the first that the environment offers: Anthropic by its key, OpenAI by its key, a server of one's own by
OPENAI_BASE_URL, else `embedded`. GOONDAN_PROVIDER settles the provider, GOONDAN_MODEL the model's name. Only the
quickstart and `gdn init` use `auto`. A bundle that names a vendor without its key is E_CONFIG_MISSING_ENV, never
embedded.

A server that is not the vendor's has models of its own: without a name, `auto` takes the first that it lists.

A key belongs to one origin: the vendor's, or that of the endpoint; so do a Model's headers. When the bundle names the
endpoint, the user has to agree to it (kernel/trust). Before that the model is held without its key and headers.

A header that says where a request ends, who it is for or who asks is the kernel's own. With one of those a bundle could
send a second request inside the first, or take the key's place.

Source: docs/design/bundle.md section 6; RFC 9110 sections 5.6.2 and 7.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from goondan.kernel.bundle.rules import kinds, shape, variables
from goondan.kernel.bundle.rules.problems import Path, Report
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody, ValueLike, ValueSource
from goondan.schemas.models import model_providers
from goondan.schemas.models.origins import is_open, origin_of

#: A person's choice for `auto`: a provider, and the name of a model.
PROVIDER_VARIABLE: Final = "GOONDAN_PROVIDER"
MODEL_VARIABLE: Final = "GOONDAN_MODEL"
#: Which variable makes `auto` choose which provider, in this order.
_BY_VARIABLE: Final[tuple[tuple[str, model_providers.ModelProvider], ...]] = (
    *((provider.key_variable, provider) for provider in model_providers.PROVIDERS),
    *((provider.url_variable, provider) for provider in model_providers.PROVIDERS if provider.auto_by_url),
)
_NAMES: Final = ", ".join(model_providers.BY_NAME)
#: The provider of servers that are named by their URL alone.
_BY_URL: Final = next(provider for provider in model_providers.PROVIDERS if provider.auto_by_url)
#: Stands in the place of the variable where the person has chosen a server of this machine.
CHOSEN_BY: Final = "you"


class ModelFault(Exception):
    """Why an agent cannot use a Model. `{}` in the message stands for what the document says at `path`."""

    def __init__(self, code: str, message: str, path: Path, suggestion: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.suggestion = suggestion


def resolve_model(
    body: ModelBody,
    params: Mapping[str, Any],
    env: Mapping[str, str],
    document: str = "",
    chosen: str | None = None,
) -> ModelSpec:
    """The model of one agent. `params` are the agent's own: they win. An empty variable counts as unset. `document` is
    the name of the Model document. `chosen` is the server of this machine that the person has chosen; the environment
    comes before it. Raises ModelFault.
    """
    return replace(
        _resolve(body, {**body.params, **params}, env, chosen),
        pricing=body.pricing,
        context_tokens=body.context_tokens,
        caching=body.caching,
        limits=body.limits,
        retry=body.retry,
        document=document,
        sees=body.sees,
    )


def _resolve(body: ModelBody, params: dict[str, Any], env: Mapping[str, str], chosen: str | None) -> ModelSpec:
    if body.provider == "embedded" or body.provider in kinds.providers():
        return ModelSpec(provider=body.provider, model=body.model, params=params)
    if body.provider == "auto":
        if chosen is None or names_a_model(env):
            return _auto(body, params, env)
        return replace(_auto(body, params, {**env, _BY_URL.url_variable: chosen}), chosen_by=CHOSEN_BY)
    provider = model_providers.BY_NAME[body.provider]
    key = _own_key(body, env)
    if not body.model:
        message = f"provider {provider.name} needs the name of a model"
        raise ModelFault("E_CONFIG_MISSING_FIELD", message, ("spec", "model"), "Add model: NAME.")
    key = key or env.get(provider.key_variable) or None
    if key is None and body.endpoint is None:
        raise _no_key(provider, "give apiKey, or give endpoint if it is a server of your own that needs none")
    headers = _header_values(body.headers, env)
    return ModelSpec(
        provider=provider.name,
        model=body.model,
        endpoint=body.endpoint,
        api_key=key,
        params=params,
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


def model_text(model: ModelSpec) -> str:
    """A model in a few words for a person, with what made `auto` choose it. Says nothing of the key."""
    text = "the embedded console"
    if (own := kinds.providers().get(model.provider)) is not None:
        text = own.text
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


def endpoint_fault(
    whose: str, url: str, provider: model_providers.ModelProvider | None = None
) -> tuple[str, str] | None:
    """What is wrong with the address of a model's server, and what to do; None: nothing. `whose` names it. A user in
    it would replace the key, and addresses are no place for secrets. An end that each request of the provider adds
    would stand there twice.
    """
    if not is_http_url(url):
        return f"{whose} is no http or https URL", "Write for example http://127.0.0.1:11434/v1."
    if "@" in urlsplit(url).netloc:
        return f"{whose} has a user or a password in it", "Leave them out: the key of the server is the Model's apiKey."
    path = urlsplit(url).path.rstrip("/")
    ends = [end for end in (() if provider is None else provider.added) if path.endswith(end)]
    if not ends:
        return None
    end = max(ends, key=len)
    hint = f"Leave {end} out: each request adds it to {path.removesuffix(end) or '/'}."
    return f"{whose} ends in {end}, which each request adds", hint


def _auto(body: ModelBody, params: dict[str, Any], env: Mapping[str, str]) -> ModelSpec:
    own = (("endpoint", body.endpoint), ("apiKey", body.api_key), ("headers", body.headers or None))
    for field, given in (*own, ("auth", body.auth), ("apiVersion", body.api_version)):
        if given is not None:
            message = f"provider auto takes its server from the environment, and has no {field} of its own"
            hint = f"Name the provider that it belongs to: {_NAMES}."
            raise ModelFault("E_CONFIG_INVALID_VALUE", message, ("spec", field), hint)
    provider, chosen_by = _choose(env)
    model = env.get(MODEL_VARIABLE) or body.model
    if provider is None:
        return ModelSpec(provider="embedded", model=body.model, params=params, chosen_by=chosen_by)
    key, endpoint = env.get(provider.key_variable) or None, env.get(provider.url_variable) or None
    if key is None and endpoint is None:
        raise _no_key(provider, f"or unset {PROVIDER_VARIABLE}")
    whose = f"the environment variable {provider.url_variable}"
    if endpoint is not None and (fault := endpoint_fault(whose, endpoint, provider)) is not None:
        raise ModelFault("E_CONFIG_INVALID_VALUE", fault[0], ("spec", "provider"), fault[1])
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


def _limited(provider: model_providers.ModelProvider, endpoint: str | None, params: dict[str, Any]) -> dict[str, Any]:
    """The params with a limit for an answer. A base model that has none talks until somebody stops it."""
    if any(name in params for name in model_providers.LIMIT_PARAMS):
        return params
    tokens = provider.auto_tokens if is_vendors(provider, endpoint) else model_providers.DEFAULT_MAX_TOKENS
    return {**params, model_providers.limit_param(provider.name, endpoint): tokens}


def is_vendors(provider: model_providers.ModelProvider, endpoint: str | None) -> bool:
    """Whether an endpoint is the vendor's own server; None is."""
    return endpoint is None or origin_of(endpoint) == origin_of(provider.server)


def names_a_model(env: Mapping[str, str]) -> bool:
    """Whether the environment settles what `auto` takes."""
    return any(env.get(variable) for variable in (PROVIDER_VARIABLE, *(variable for variable, _ in _BY_VARIABLE)))


def _choose(env: Mapping[str, str]) -> tuple[model_providers.ModelProvider | None, str]:
    """The provider, None for `embedded`, and the variable that settled it ("" when none did)."""
    wanted = env.get(PROVIDER_VARIABLE)
    if wanted:
        if wanted == "embedded" or wanted in model_providers.BY_NAME:
            return model_providers.BY_NAME.get(wanted), PROVIDER_VARIABLE
        message = f"the environment variable {PROVIDER_VARIABLE} names no provider"
        hint = f"Set it to {_NAMES} or embedded, or unset it."
        raise ModelFault("E_CONFIG_INVALID_VALUE", message, ("spec", "provider"), hint)
    for variable, provider in _BY_VARIABLE:
        if env.get(variable):
            return provider, variable
    return None, ""


def _no_key(provider: model_providers.ModelProvider, otherwise: str) -> ModelFault:
    name = provider.key_variable
    message = f"the environment variable {name} is not set, and provider {provider.name} needs a key"
    return ModelFault("E_CONFIG_MISSING_ENV", message, ("spec", "provider"), f"Set {name}, {otherwise}.")


def _own_key(body: ModelBody, env: Mapping[str, str]) -> str | None:
    """The key that the document gives, None when it gives none."""
    key = body.api_key
    if not isinstance(key, ValueSource):
        return key or None
    if key.value_from is None:
        return key.value or None
    value = env.get(key.value_from.env)
    if not value:
        raise _not_set(("spec", "apiKey"))
    return value


def _not_set(at: Path) -> ModelFault:
    path = (*at, "valueFrom", "env")
    return ModelFault("E_CONFIG_MISSING_ENV", "the environment variable {} is not set", path, "Set it.")


#: Headers of one Model: more than any gateway wants, and a request stays small.
MAX_HEADERS: Final = 32
#: The longest name and the longest value (characters). Servers refuse heads of more than some 8,000 bytes.
MAX_HEADER_NAME: Final = 64
MAX_HEADER_VALUE: Final = 4096
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
#: What may be set elsewhere, and the field for it.
_ELSEWHERE: Final = {
    "authorization": "apiKey",
    "x-api-key": "apiKey with auth: x-api-key",
    **{
        provider.version_header: "apiVersion"
        for provider in model_providers.PROVIDERS
        if provider.version_header is not None
    },
}
#: What a request has anyway, and what is between two machines only.
_OWN_HEADERS: Final = frozenset(
    (
        "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "user-agent",
    )
)  # fmt: skip


def header_fault(name: str) -> tuple[str, str] | None:
    """What is wrong with the name of a header, and what to do about it; None when it may be set."""
    if len(name) > MAX_HEADER_NAME or not _HEADER_NAME.match(name):
        return "that is no name of a header", f"Write letters, digits and -, {MAX_HEADER_NAME} at most."
    if (field := _ELSEWHERE.get(name.lower())) is not None:
        return f"the header {name.lower()} is not set here", f"Use {field}."
    if name.lower() in _OWN_HEADERS:
        return f"the header {name.lower()} belongs to the connection", "Leave it out."
    return None


def _header_values(headers: Mapping[str, ValueLike], env: Mapping[str, str]) -> dict[str, str]:
    """The headers with their values, the names in lower case. What `header_fault` refuses is left out: that was
    reported for the document. Raises ModelFault.
    """
    found: dict[str, str] = {}
    for name, value in headers.items():
        if header_fault(name) is not None:
            continue
        at: Path = ("spec", "headers", name)
        text = value if isinstance(value, str) else value.value or ""
        if isinstance(value, ValueSource) and value.value_from is not None:
            text = env.get(value.value_from.env, "")
            if not text.strip():
                raise _not_set(at)
        text = text.strip()
        if len(text) > MAX_HEADER_VALUE or not text.isascii() or not text.isprintable():
            message = f"the value of the header {name.lower()} cannot be sent"
            hint = f"Give at most {MAX_HEADER_VALUE} printable ASCII characters."
            raise ModelFault("E_CONFIG_INVALID_VALUE", message, at, hint)
        found[name.lower()] = text
    return found


#: The longest version of a wire (characters): a date, or a number.
MAX_VERSION: Final = 64


def check_model(document: shape.Document, body: ModelBody, report: Report) -> None:
    """Report what is wrong with a Model by itself."""
    variables.check_value(document, body.api_key, ("spec", "apiKey"), report)
    provider = model_providers.BY_NAME.get(body.provider)
    if body.endpoint is not None and (fault := endpoint_fault("the endpoint", body.endpoint, provider)) is not None:
        report.error("E_CONFIG_INVALID_VALUE", fault[0], document.place("spec", "endpoint"), fault[1])
    names = list(body.headers)
    for name in names:
        at: Path = ("spec", "headers", name)
        variables.check_value(document, body.headers[name], at, report)
        if (fault := header_fault(name)) is not None:
            report.error("E_CONFIG_INVALID_VALUE", fault[0], document.key(*at), fault[1])
    together = None
    if len(names) > MAX_HEADERS:
        together = f"{len(names)} headers, {MAX_HEADERS} at most"
    elif len({name.lower() for name in names}) < len(names):
        together = "a header stands twice: upper and lower case are the same"
    if together is not None:
        report.error("E_CONFIG_INVALID_VALUE", together, document.key("spec", "headers"), "Remove what is too much.")
    _check_version(document, body, report)


def _check_version(document: shape.Document, body: ModelBody, report: Report) -> None:
    version, provider = body.api_version, model_providers.BY_NAME.get(body.provider)
    if version is None or body.provider == "auto":
        return
    if provider is None or provider.version_header is None:
        known = ", ".join(row.name for row in model_providers.PROVIDERS if row.version_header is not None)
        message = f"provider {body.provider} has no apiVersion"
        report.error("E_CONFIG_INVALID_VALUE", message, document.key("spec", "apiVersion"), f"It belongs to {known}.")
    elif not version.strip() or len(version) > MAX_VERSION or not version.isascii() or not version.isprintable():
        place = document.place("spec", "apiVersion")
        report.error("E_CONFIG_INVALID_VALUE", "that is no version", place, "Write for example 2023-06-01.")
