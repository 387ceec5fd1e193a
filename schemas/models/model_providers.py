"""The model providers: one row for each, and how often and how long a model may be asked. Nothing of a provider is
anywhere else but in the module that speaks its wire.

The kernel checks bundles and finds keys with this table, an agent finds its server and its module. `embedded`, the
console that needs no server, `replay`, which answers from a recorded run, and `auto`, which chooses, are no rows.

Source: docs/design/turns.md section 6; docs/decisions/107; docs/design/bundle.md section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta, Struct

# --- limits -----------------------------------------------------------------------------------------------------------

#: The longest patience that a Model may ask for (seconds).
MAX_RETRY_S: Final = 86_400
#: The largest limit of a Model.
MAX_LIMIT: Final = 10**9
#: Models that are asked in place of one that does not answer.
MAX_FALLBACKS: Final = 8

_Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class ModelLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What the server of a Model allows. All agents of the kernel keep it together."""

    max_concurrent: Annotated[_Limit | None, Meta(description="Requests at once.")] = None
    requests_per_minute: Annotated[_Limit | None, Meta(description="Requests in any minute.")] = None
    tokens_per_minute: Annotated[_Limit | None, Meta(description="Tokens, read and written, in any minute.")] = None


class ModelRetry(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """How long a Model is asked again that does not answer, within the time of the turn (seconds)."""

    busy_s: Annotated[
        float, Meta(ge=0, le=MAX_RETRY_S, description="A server that is busy or out of reach, or that refuses.")
    ] = 60.0
    loading_s: Annotated[float, Meta(ge=0, le=MAX_RETRY_S, description="A server that says it loads its model.")] = (
        300.0
    )


# --- providers --------------------------------------------------------------------------------------------------------

#: The most tokens of an answer where nobody says how many. Every model since 2024 allows this value.
DEFAULT_MAX_TOKENS: Final = 8192


class ModelProvider(Struct, frozen=True, kw_only=True):
    """One provider, whose models are asked over HTTP."""

    #: The name in a Model document. The module `goondan.agentproc.providers.<name>` speaks its wire
    #: (agentproc/http/__init__.py says what it has to have).
    name: str
    #: Base URL of its own server. Requests go there when a Model names no endpoint. A key without an endpoint goes to
    #: this origin only.
    server: str
    #: The environment variable that has the user's key by custom.
    key_variable: str
    #: The environment variable that has another base URL for `auto`.
    url_variable: str
    #: The model of `auto` when there is a key.
    auto_model: str
    #: Whether `url_variable` alone makes `auto` choose this provider, because others run servers with the same wire.
    auto_by_url: bool = False
    #: The parameter with which a request to its own server limits the tokens of an answer.
    limit_param: str = "max_tokens"
    #: The same for other servers that speak its wire.
    limit_elsewhere: str = "max_tokens"
    #: The limit of `auto` for its own server. A model that reasons needs more, because reasoning counts.
    auto_tokens: int = DEFAULT_MAX_TOKENS
    #: Ends that the path of an endpoint never has, because each request adds them.
    added: tuple[str, ...] = ()
    #: The header of a request that has the version of the wire; None: there is none.
    version_header: str | None = None
    #: The version of the wire that is spoken.
    version: str = ""
    #: What is added to the base URL to ask for the list of models; "": there is no list.
    listing: str = "/models"


#: In the order in which `auto` looks for their keys.
PROVIDERS: Final[tuple[ModelProvider, ...]] = (
    ModelProvider(
        name="anthropic",
        server="https://api.anthropic.com",
        key_variable="ANTHROPIC_API_KEY",
        url_variable="ANTHROPIC_BASE_URL",
        auto_model="claude-sonnet-5-5",
        added=("/v1", "/v1/messages"),
        version_header="anthropic-version",
        version="2026-10-21",
        listing="/v1/models",
    ),
    ModelProvider(
        name="openai",
        server="https://api.openai.com/v1",
        key_variable="OPENAI_API_KEY",
        url_variable="OPENAI_BASE_URL",
        auto_model="gpt-5.5",
        auto_by_url=True,
        limit_param="max_completion_tokens",
        auto_tokens=32_768,
        added=("/chat/completions",),
    ),
    ModelProvider(  # has the key of the row before it, so `auto` never comes here
        name="responses",
        server="https://api.openai.com/v1",
        key_variable="OPENAI_API_KEY",
        url_variable="OPENAI_BASE_URL",
        auto_model="gpt-5.5",
        limit_param="max_output_tokens",
        limit_elsewhere="max_output_tokens",
        auto_tokens=32_768,
        added=("/responses",),
    ),
)
BY_NAME: Final[Mapping[str, ModelProvider]] = {provider.name: provider for provider in PROVIDERS}
#: The params by which any of them limits an answer.
LIMIT_PARAMS: Final = tuple(
    dict.fromkeys(name for provider in PROVIDERS for name in (provider.limit_elsewhere, provider.limit_param))
)


def limit_param(provider: str, endpoint: str | None) -> str:
    """The param that limits an answer of this provider's server, or of the one at `endpoint`. A provider without a
    server has the usual one.
    """
    from goondan.schemas.models.origins import origin_of  # every program reads this table, and few resolve a model

    row = BY_NAME.get(provider)
    if row is None:
        return "max_tokens"
    own = endpoint is None or origin_of(endpoint) == origin_of(row.server)
    return row.limit_param if own else row.limit_elsewhere


#: How a key is sent: as `authorization: Bearer KEY`, or as `x-api-key: KEY`.
KeyHeader = Literal["bearer", "x-api-key"]

if TYPE_CHECKING:  # a Literal can be made of a table, but not for mypy
    ServingProvider = str
    NamedProvider = str
else:
    #: What serves an agent, and what a Model document may name. Decoding refuses everything else.
    ServingProvider = Literal[(*BY_NAME, "embedded", "replay")]
    NamedProvider = Literal[(*BY_NAME, "embedded", "replay", "auto")]
