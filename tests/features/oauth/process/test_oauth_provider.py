"""The holder of tokens against a real OAuth server, over real sockets: flows, refreshing, revocation.

It runs in the test's process with a clock of the test, so that nothing waits for a token to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from goondan.features.oauth.process.authority import Authority
from goondan.features.oauth.process.vault import Vault, read_or_make
from goondan.features.oauth.wire import (
    AuthorizationRequired,
    GrantedNews,
    ListOrder,
    LoginOrder,
    OAuthAppSpec,
    RevokeOrder,
    TokenOrder,
    TokenReady,
    WaitOrder,
)
from goondan.schemas.wire.errors import GoondanError
from tests.oidc_fixture import Browser, Provider, browse, oidc_provider

SCOPES = ["calendar.read", "calendar.write"]


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with oidc_provider() as running:
        yield running


@dataclass
class Held:
    """A holder of tokens, and what it said."""

    folder: Path
    issuer: str
    offset: float = 0.0
    news: list[GrantedNews] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authority = self.make()

    def make(self) -> Authority:
        """One as after a start: it knows what is on disk."""
        made = Authority(self._vault, self.news.append, clock=self.now)
        made.serve(
            {
                "calendar": self.app("calendar"),
                "device": self.app("device", flow="deviceCode"),
                "machine": self.app(
                    "machine", flow="clientCredentials", client_id="machine", client_secret="a secret+with signs"
                ),
                "elsewhere": self.app("elsewhere", issuer=f"{self.issuer}/"),
            }
        )
        return made

    def app(self, name: str, **changes: Any) -> OAuthAppSpec:
        values: dict[str, Any] = {"client_id": "native", "scopes": SCOPES, "issuer": self.issuer, **changes}
        return OAuthAppSpec(name=name, **values)

    def now(self) -> float:
        import time

        return time.time() + self.offset

    def _vault(self) -> Vault:
        return Vault(f"{self.folder}/state/oauth", f"{self.folder}/state", self.key)

    @property
    def key(self) -> bytes:
        return read_or_make(f"{self.folder}/keys/oauth.key", f"{self.folder}/state")

    async def ask(self, app: str = "calendar", subject: str = "ann", scopes: list[str] | None = None) -> Any:
        return await self.authority.carry_out(TokenOrder(app, subject, "main", "k", scopes))

    async def token(self, app: str = "calendar", **more: Any) -> TokenReady:
        answer = await self.ask(app, **more)
        assert isinstance(answer, TokenReady), answer
        return answer

    async def agree(self, app: str = "calendar", subject: str = "ann", scopes: list[str] | None = None) -> None:
        """Ask, and have a person agree."""
        asked = await self.ask(app, subject, scopes)
        assert isinstance(asked, AuthorizationRequired), asked
        status, text = await asyncio.to_thread(browse, asked.authorization_url)
        assert status == 200, text


@pytest.fixture
async def held(provider: Provider, tmp_path: Path) -> AsyncIterator[Held]:
    provider.control(deny=False, ttl=3600)
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "keys").mkdir(mode=0o700)
    made = Held(tmp_path, provider.issuer)
    yield made
    await made.authority.close()


async def test_a_person_agrees_in_a_browser_and_the_token_is_real(held: Held, provider: Provider) -> None:
    asked = await held.ask()
    assert isinstance(asked, AuthorizationRequired)
    assert asked.authorization_url.startswith(f"{provider.issuer}/auth?")
    assert "code_challenge_method=S256" in asked.authorization_url
    assert (asked.scopes, asked.subject, asked.user_code) == (SCOPES, "ann", None)
    assert "gdn auth login calendar --subject ann" in asked.message
    again = await held.ask()
    assert again.authorization_url == asked.authorization_url  # one page for all who ask meanwhile
    waiting = asyncio.create_task(held.authority.carry_out(WaitOrder("calendar", "ann")))
    status, text = await asyncio.to_thread(browse, asked.authorization_url)
    assert (status, "can be closed" in text) == (200, True)
    assert (await waiting)["scopes"] == SCOPES
    token = await held.token()
    assert (token.token_type, token.subject, token.scopes) == ("Bearer", "ann", SCOPES)
    assert token.expires_at is not None
    assert provider.introspect(token.access_token)
    assert [(one.app, one.subject, one.scopes, one.instances) for one in held.news] == [
        ("calendar", "ann", SCOPES, [("main", "k")])
    ]
    assert isinstance(await held.ask(subject="bob"), AuthorizationRequired)  # nobody else's


async def test_a_redirect_counts_once(held: Held) -> None:
    asked = await held.ask()
    uri = await held.authority._redirects.open(None)
    status, _ = await asyncio.to_thread(browse, f"{uri}?code=x&state=made-up")
    assert status == 400
    assert not held.authority._register.find("calendar", "ann").over  # type: ignore[union-attr]
    state = asked.authorization_url.partition("state=")[2].partition("&")[0]
    status, _ = await asyncio.to_thread(browse, f"{uri}?code=made-up&state={state}&iss={held.issuer}")
    assert status == 400
    with pytest.raises(GoondanError) as refused:
        await held.authority.carry_out(WaitOrder("calendar", "ann"))
    assert refused.value.code == "E_OAUTH_REFUSED"
    status, _ = await asyncio.to_thread(browse, asked.authorization_url)
    assert status == 400  # its state has been used


@pytest.mark.parametrize("issuer", ["https://evil.example", None])
async def test_a_redirect_of_another_issuer_brings_no_token(held: Held, issuer: str | None) -> None:
    asked = await held.ask()
    uri = await held.authority._redirects.open(None)
    state = asked.authorization_url.partition("state=")[2].partition("&")[0]
    told = f"&iss={issuer}" if issuer else ""
    status, _ = await asyncio.to_thread(browse, f"{uri}?code=x&state={state}{told}")
    assert status == 400
    with pytest.raises(GoondanError, match="the redirect is not from"):
        await held.authority.carry_out(WaitOrder("calendar", "ann"))


async def test_one_who_refuses(held: Held, provider: Provider) -> None:
    provider.control(deny=True)
    asked = await held.ask()
    status, text = await asyncio.to_thread(browse, asked.authorization_url)
    assert (status, "not agreed" in text) == (400, True)
    with pytest.raises(GoondanError, match="access_denied: not today"):
        await held.authority.carry_out(WaitOrder("calendar", "ann"))
    assert held.news == []


async def test_twenty_ask_while_a_token_ends_and_it_is_refreshed_once(held: Held, provider: Provider) -> None:
    provider.control(ttl=600)
    await held.agree()
    first = await held.token()
    held.offset = 590
    before = provider.control()["token"]
    tokens = await asyncio.gather(*(held.token() for _ in range(20)))
    assert provider.control()["token"] == before + 1
    assert len({token.access_token for token in tokens}) == 1
    assert tokens[0].access_token != first.access_token
    assert provider.introspect(tokens[0].access_token)
    held.offset = 1180  # and the refresh token that came with it is the one that is used now
    third = await held.token()
    assert third.access_token != tokens[0].access_token
    await held.authority.close()
    held.authority = held.make()  # another process has it all
    assert (await held.token()).access_token == third.access_token


async def test_a_refresh_token_that_the_server_forgot_ends_as_an_authorization(held: Held, provider: Provider) -> None:
    await held.agree()
    vault = held._vault()
    grant = vault.load("calendar", "ann")
    assert grant is not None
    await held.authority._revoke_there(grant)  # as if by somebody else
    held.offset = 4000
    asked = await held.ask()
    assert isinstance(asked, AuthorizationRequired)
    assert "does not accept the token" in asked.message
    (row,) = (await held.authority.carry_out(ListOrder()))["grants"]
    assert (row["status"], row["refreshable"]) == ("login_required", False)


async def test_more_scopes_need_another_agreement_that_keeps_the_old_ones(held: Held) -> None:
    await held.agree(scopes=["calendar.read"])
    assert (await held.token(scopes=["calendar.read"])).scopes == ["calendar.read"]
    asked = await held.ask(scopes=["calendar.write"])
    assert isinstance(asked, AuthorizationRequired)
    assert sorted(asked.scopes) == SCOPES
    assert (await held.token(scopes=["calendar.read"])).scopes == ["calendar.read"]  # meanwhile
    await asyncio.to_thread(browse, asked.authorization_url)
    assert sorted((await held.token()).scopes) == SCOPES
    with pytest.raises(GoondanError) as refused:
        await held.ask(scopes=["admin"])
    assert refused.value.code == "E_OAUTH_SCOPE"


async def test_a_code_that_is_typed_elsewhere(held: Held, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.features.oauth.process.rules._INTERVALS", (0.1, 0.1))  # the person is quick
    asked = await held.authority.carry_out(LoginOrder("device", "ann"))
    assert asked.user_code
    assert asked.user_code in asked.message
    waiting = asyncio.create_task(held.authority.carry_out(WaitOrder("device", "ann")))
    await asyncio.to_thread(Browser().type_code, asked.authorization_url)
    assert (await waiting)["scopes"] == SCOPES
    assert provider.introspect((await held.token("device")).access_token)


async def test_an_app_with_tokens_of_its_own(held: Held, provider: Provider) -> None:
    token = await held.token("machine", subject="app", scopes=["calendar.read"])
    assert token.scopes == ["calendar.read"]
    before = provider.control()["token"]
    again = await held.token("machine", subject="app", scopes=["calendar.read"])
    assert again.access_token == token.access_token
    assert provider.control()["token"] == before
    held.offset = 3590
    assert (await held.token("machine", subject="app")).access_token != token.access_token


async def test_revoked_is_revoked_at_the_server_too(held: Held, provider: Provider) -> None:
    await held.agree()
    token = await held.token()
    done = await held.authority.carry_out(RevokeOrder("calendar", "ann"))
    assert done == {"revoked": True, "server": "revoked"}
    assert not provider.introspect(token.access_token)
    assert isinstance(await held.ask(), AuthorizationRequired)
    assert (await held.authority.carry_out(RevokeOrder("calendar", "bob")))["revoked"] is False


async def test_an_issuer_that_does_not_name_itself_as_the_bundle_does(held: Held) -> None:
    with pytest.raises(GoondanError, match="of another issuer"):
        await held.ask("elsewhere")


async def test_nothing_readable_lies_on_disk(held: Held) -> None:
    await held.agree()
    token = await held.token()
    grant = held._vault().load("calendar", "ann")
    assert grant is not None
    assert grant.refresh_token
    files = [path for path in (held.folder / "state").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
        data = path.read_bytes()
        for secret in (token.access_token, grant.refresh_token, "ann", "calendar"):
            assert secret.encode() not in data
