"""`api.oauth` in an agent: access tokens for extensions.

The agent keeps no tokens. It asks the kernel, which knows on whose behalf the turn acts. The token goes only to the
extension that asked. From then on it is removed from this process's log, traces and errors. When a person has granted a
request, all extensions of the instance get `auth.granted`.

Source: docs/oauth.md; requirements OAUTH-01, OAUTH-02, EVENTS-09.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from goondan.agentproc.calls.caller import AgentLink, until_answered
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.start.log import KnownSecrets
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, TakeFrame
from goondan.features.oauth.wire import GRANTED_EVENT, REF_PREFIX, Granted, TokenReady, TokenRequest
from goondan.schemas.wire import codec, errors, frames

#: How long the kernel may take to answer (seconds). It is longer than the kernel's own limit, so the kernel's error
#: comes first.
ANSWER_S: Final = 70.0
_FIELDS: Final = frozenset(("oauthAppRef", "scopes", "subject"))


class OAuth(AgentFeature):
    """`api.oauth` in the process of an agent instance. No turn has a part of it."""

    name = "oauth"

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self._tokens = AccessTokens(instance.link, instance.events, instance.secrets)

    @property
    def takes(self) -> Mapping[str, TakeFrame]:
        """`oauth.granted`."""
        return {"oauth.granted": self._tokens.granted}

    @property
    def api(self) -> Mapping[str, Callable[[str], object]]:
        """`api.oauth`."""
        return {"oauth": lambda extension: OAuthApi(self._tokens)}


#: See agentproc/turn/parts.py.
FEATURE: Final = OAuth


class AccessTokens:
    """The requests of one agent instance's extensions to the kernel."""

    def __init__(self, link: AgentLink, events: EventBus, secrets: KnownSecrets) -> None:
        self._link = link
        self._events = events
        self._secrets = secrets

    async def get(self, request: TokenRequest) -> dict[str, Any]:
        """The answer in the form of the specification. Raises GoondanError."""
        frame = frames.Frame("oauth.token", payload=codec.to_raw(request))
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await until_answered(self._link, frame, self._link.post(frame))
        except TimeoutError:
            raise errors.fail("E_OAUTH_UNAVAILABLE", f"no answer within {ANSWER_S:g} s") from None
        answer = codec.from_raw(reply.payload, dict)
        if answer.get("status") == "ready":
            self._secrets.add(codec.from_raw(reply.payload, TokenReady).access_token)
        return answer

    def granted(self, frame: frames.Frame) -> None:
        """Handle `oauth.granted`: a person has agreed. Raises GoondanError E_FRAME_INVALID."""
        news = codec.from_raw(frame.payload, Granted)
        told = {"oauthAppRef": news.oauth_app_ref, "subject": news.subject, "scopes": news.scopes}
        self._events.emit(GRANTED_EVENT, told, emitter="the kernel")


class OAuthApi:
    """`api.oauth`."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: AccessTokens) -> None:
        self._tokens = tokens

    async def get_access_token(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A token: `{oauthAppRef, scopes?, subject?}` -> `{status: "ready", accessToken, tokenType, scopes, subject,
        expiresAt?}`, or `{status: "authorization_required", authorizationUrl, message, scopes, subject, expiresAt,
        userCode?}`.

        `oauthAppRef` is `OAuthApp/NAME` or `{kind, name}`. `scopes` are some of the app's; all of them when left out.
        `subject` can only be the turn's own. Raises GoondanError: E_USAGE, E_OAUTH_APP, E_OAUTH_SCOPE,
        E_OAUTH_SUBJECT, E_OAUTH_SERVER, E_OAUTH_REFUSED, E_OAUTH_KEY, E_OAUTH_UNAVAILABLE, E_FORBIDDEN.
        """
        return await self._tokens.get(read_request(request))


def read_request(request: Mapping[str, Any]) -> TokenRequest:
    """Check the request of an extension. Raises GoondanError E_USAGE."""
    if not isinstance(request, Mapping):
        raise _wrong(f"takes an object, not {type(request).__name__}")
    unknown = sorted(str(name) for name in request if name not in _FIELDS)
    if unknown:
        raise _wrong(f"knows oauthAppRef, scopes and subject, not {', '.join(unknown)[:200]}")
    scopes, subject = request.get("scopes"), request.get("subject")
    if scopes is not None:
        if isinstance(scopes, str) or not hasattr(scopes, "__iter__"):
            raise _wrong("takes scopes as a list of texts")
        scopes = list(scopes)
        if not all(isinstance(scope, str) for scope in scopes):
            raise _wrong("takes scopes as a list of texts")
    if subject is not None and not isinstance(subject, str):
        raise _wrong("takes the subject as a text")
    return TokenRequest(_app_of(request.get("oauthAppRef")), scopes, subject)


def _app_of(ref: Any) -> str:
    if isinstance(ref, str) and ref.startswith(REF_PREFIX) and "/" not in ref[len(REF_PREFIX) :]:
        name: Any = ref[len(REF_PREFIX) :]
    elif isinstance(ref, Mapping) and ref.get("kind") == "OAuthApp":
        name = ref.get("name")
    else:
        name = None
    if not isinstance(name, str) or not name:
        raise _wrong("needs oauthAppRef: OAuthApp/NAME, or {kind: OAuthApp, name: NAME}")
    return name


def _wrong(what: str) -> errors.GoondanError:
    return errors.fail("E_USAGE", f"api.oauth.get_access_token {what}", suggestion="See docs/oauth.md.")
