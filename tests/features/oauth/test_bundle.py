"""OAuthApps of a bundle: what is wrong with them, and the client that they describe."""

from __future__ import annotations

import pytest

from goondan.features.oauth.bundle import OAuthAppBody
from goondan.kernel.bundle.rules.plan import build_plan, difference
from goondan.kernel.trust.policy import hidden_folders
from goondan.schemas.worker.logins import is_redirect
from tests.unit.kernel.bundle.conftest import GOOD, Look

URLS = "authorizationUrl: 'https://a.example/a', tokenUrl: 'https://a.example/t'"


def app(spec: str) -> str:
    head = "apiVersion: agents.example.io/v1alpha1\nkind: OAuthApp\nmetadata: {name: cal}\n"
    return f"{head}spec: {{clientId: c, {spec}}}\n---\n{GOOD}"


@pytest.mark.parametrize(
    ("spec", "code", "path"),
    [
        ("authorizationUrl: 'https://a.example/a'", "E_CONFIG_MISSING_FIELD", "spec"),
        ("flow: deviceCode, tokenUrl: 'https://a.example/t'", "E_CONFIG_MISSING_FIELD", "spec"),
        ("flow: clientCredentials, tokenUrl: 'https://a.example/t'", "E_CONFIG_MISSING_FIELD", "spec"),
        ("flow: password, issuer: 'https://a.example'", "E_CONFIG_INVALID_VALUE", "spec.flow"),
        ("issuer: 'http://a.example'", "E_CONFIG_INVALID_VALUE", "spec.issuer"),
        ("issuer: 'https://a.example/?x=1'", "E_CONFIG_INVALID_VALUE", "spec.issuer"),
        ("issuer: 'https://u:p@a.example'", "E_CONFIG_INVALID_VALUE", "spec.issuer"),
        (f"{URLS}, revocationUrl: 'file:///x'", "E_CONFIG_INVALID_VALUE", "spec.revocationUrl"),
        (f"{URLS}, scopes: ['a b']", "E_CONFIG_INVALID_VALUE", "spec.scopes[0]"),
        (f"{URLS}, redirectUri: 'https://a.example/cb'", "E_CONFIG_INVALID_VALUE", "spec.redirectUri"),
        (f"{URLS}, redirectUri: 'http://127.0.0.1:0/cb'", "E_CONFIG_INVALID_VALUE", "spec.redirectUri"),
        (f"{URLS}, clientSecret: {{}}", "E_CONFIG_INVALID_VALUE", "spec.clientSecret"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(look: Look, spec: str, code: str, path: str) -> None:
    assert [(problem.code, problem.path) for problem in look(app(spec)).errors] == [(code, path)]


def test_where_redirects_can_be_listened_for() -> None:
    for uri in ("http://127.0.0.1:8765/callback", "http://localhost/x", "http://127.0.0.1"):
        assert is_redirect(uri)
    for uri in (
        "https://127.0.0.1/x", "http://evil.example/x", "http://127.0.0.1.evil.example/", "http://127.0.0.1:0/x",
        "http://127.0.0.1/x?a=b", "http://a@127.0.0.1/x", "http://0.0.0.0/x", "http://127.0.0.1:99999/",
    ):  # fmt: skip
        assert not is_redirect(uri)


def test_a_client_with_its_secret(look: Look) -> None:
    spec = (
        f"{URLS}, clientSecret: {{valueFrom: {{env: SECRET}}}}, scopes: [a, b, a], redirectUri: 'http://localhost:9/x'"
    )
    found = look(app(spec), env={"SECRET": "s3cret-s3cret"}).checked.parts["oauth"]["cal"]
    assert (found.client_secret, found.scopes, found.fault) == ("s3cret-s3cret", ["a", "b"], None)
    assert "s3cret" not in repr(found)
    local = look(app("issuer: 'http://127.0.0.1:8080/realm'"))
    assert local.errors == []
    assert local.checked.parts["oauth"]["cal"].issuer == "http://127.0.0.1:8080/realm"


def test_a_variable_that_is_not_set_keeps_the_app_from_working_and_nothing_else(look: Look) -> None:
    seen = look(app(f"{URLS}, clientSecret: {{valueFrom: {{env: SECRET}}}}"), env={})
    assert seen.errors == []
    assert seen.checked.parts["oauth"]["cal"].fault == "the environment variable SECRET is not set"


def test_another_app_is_a_change_for_which_nothing_restarts(look: Look) -> None:
    def plan(spec: str):  # type: ignore[no-untyped-def]
        return build_plan(look(app(spec)).checked, bundle="/b", state_dir="/s", revision="r", documents=[])

    change = difference(plan(URLS), plan(f"{URLS}, scopes: [a]"))
    assert (change.quiet, change.agents, change.whole) == (True, [], None)


def test_no_tool_sees_the_folder_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GOONDAN_KEY_FILE", raising=False)
    assert "/home/ann/.config/goondan/keys" in hidden_folders(None)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/c")
    assert {"/c/goondan/keys", "/home/ann/.config/goondan/keys"} <= set(hidden_folders(None))
    monkeypatch.setenv("GOONDAN_KEY_FILE", "/k/key")
    assert "/k" not in hidden_folders(None)  # too near to the root to be anybody's own
    monkeypatch.setenv("GOONDAN_KEY_FILE", "/k/ann/key")
    assert "/k/ann" in hidden_folders(None)
    monkeypatch.setenv("GOONDAN_KEY_FILE", "/home/ann/key")
    assert "/home/ann" not in hidden_folders(None)


def test_every_field_of_an_app_has_been_thought_about() -> None:
    """As tests/unit/kernel/trust/test_corpus.py has it for all other kinds: a new field may be a power."""
    asked = {"authorizationUrl", "tokenUrl", "deviceAuthorizationUrl", "revocationUrl", "issuer"}  # TokenServer
    secret = {"clientId", "clientSecret"}  # Variable, TokenServer
    nothing = {"scopes", "flow", "redirectUri"}
    assert set(OAuthAppBody.__struct_encode_fields__) == asked | secret | nothing
