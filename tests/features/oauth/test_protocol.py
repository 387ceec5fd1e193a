"""What is sent to an OAuth server, and what is believed of its answers."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goondan.features.oauth.process import rules
from goondan.features.oauth.process.http import read_request
from goondan.features.oauth.process.rules import ServerRefused
from goondan.features.oauth.wire import OAuthAppSpec, is_scope, is_subject
from goondan.schemas.wire.errors import GoondanError

APP = OAuthAppSpec(name="a", client_id="an id", client_secret="s/e:c", issuer="https://login.example")


def body(**fields: Any) -> bytes:
    return json.dumps({"access_token": "at", "token_type": "Bearer", **fields}).encode()


def test_the_challenge_is_that_of_the_rfc() -> None:
    # RFC 7636, appendix B
    challenge = rules.challenge_of("dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk")
    assert challenge == "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"


def test_the_page_keeps_its_own_query_and_nobody_puts_ours_into_it() -> None:
    url = rules.authorization_url(
        "https://login.example/a?tenant=x&state=evil&client_id=evil#frag",
        client_id="an id",
        redirect_uri="http://127.0.0.1:1/callback",
        scopes=["a", "b&c=d"],
        state="s",
        challenge="c",
    )
    assert "#" not in url
    assert parse_qs(urlsplit(url).query) == {
        "tenant": ["x"], "response_type": ["code"], "client_id": ["an id"], "state": ["s"], "scope": ["a b&c=d"],
        "redirect_uri": ["http://127.0.0.1:1/callback"], "code_challenge": ["c"], "code_challenge_method": ["S256"],
    }  # fmt: skip


def test_a_client_says_who_it_is_as_the_server_wants() -> None:
    form, headers = rules.with_client(APP, {"a": "1"}, None)
    assert form == {"a": "1"}
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"an+id:s%2Fe%3Ac"
    form, headers = rules.with_client(APP, {}, ["client_secret_post"])
    assert (form, headers) == ({"client_id": "an id", "client_secret": "s/e:c"}, {})
    public = OAuthAppSpec(name="a", client_id="an id")
    assert rules.with_client(public, {}, ["client_secret_basic"]) == ({"client_id": "an id"}, {})


def test_tokens() -> None:
    tokens = rules.read_tokens(200, body(expires_in="60", refresh_token="rt", scope='a b "c'), [])
    assert (tokens.access_token, tokens.lifetime_s, tokens.refresh_token) == ("at", 60.0, "rt")
    assert tokens.scopes == ["a", "b"]
    assert "at" not in repr(tokens)
    assert rules.read_tokens(200, body(token_type="bearer", expires_in=1e300), []).lifetime_s == 366 * 86400
    for odd in (-1, 0, "NaN", "soon", None):
        assert rules.read_tokens(200, body(expires_in=odd), []).lifetime_s is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 100_000, body(token_type="DPoP"), body(access_token="a\r\nX: y"),
        body(access_token=""), body(refresh_token="a b"), body(access_token="x" * 40_000), body(access_token=7),
    ],
)  # fmt: skip
def test_what_is_no_token(data: bytes) -> None:
    with pytest.raises(GoondanError) as refused:
        rules.read_tokens(200, data, [])
    assert refused.value.code == "E_OAUTH_SERVER"


def test_a_refusal_is_told_in_the_servers_words_and_without_secrets() -> None:
    told = json.dumps({"error": "invalid_client", "error_description": "no s3cret-s3cret\n\x1b[2J" + "x" * 9999})
    with pytest.raises(ServerRefused) as refused:
        rules.read_tokens(400, told.encode(), ["s3cret-s3cret"])
    assert refused.value.error == "invalid_client"
    assert refused.value.description.startswith("no ***")
    assert refused.value.description.isprintable()
    assert len(refused.value.description) <= 300
    for status, data in ((503, told.encode()), (400, b"<html>"), (404, b"{}")):
        with pytest.raises(GoondanError, match=f"status {status}") as failed:
            rules.read_tokens(status, data, ["s3cret-s3cret"])
        assert "s3cret" not in str(failed.value)


def test_device_codes() -> None:
    fields = {"device_code": "dc", "user_code": "WDJB", "verification_uri": "https://login.example/d"}
    told = rules.read_device_code(200, json.dumps(fields).encode(), [])
    assert (told.page, told.interval_s, told.lifetime_s) == ("https://login.example/d", 5.0, 600.0)
    assert rules.read_device_code(200, json.dumps({**fields, "interval": 0.001}).encode(), []).interval_s == 1.0
    for changed in (
        {"verification_uri": "javascript:alert(1)"}, {"verification_uri": "http://evil.example/"},
        {"verification_uri": "https://login.example/\x1b[2J"}, {"user_code": ""}, {"user_code": "\x1b[2J"},
        {"device_code": "a b"}, {"verification_uri_complete": "file:///etc/passwd"},
    ):  # fmt: skip
        with pytest.raises(GoondanError):
            rules.read_device_code(200, json.dumps({**fields, **changed}).encode(), [])


# --- metadata -------------------------------------------------------------------------------------------------------


def published(**changes: Any) -> bytes:
    return json.dumps(
        {
            "issuer": "https://login.example",
            "authorization_endpoint": "https://login.example/a",
            "token_endpoint": "https://tokens.example/t",
            **changes,
        }
    ).encode()


def test_what_an_issuer_publishes() -> None:
    found = rules.read_document(APP, published(token_endpoint_auth_methods_supported=["client_secret_post"]))
    assert (found.authorization, found.token) == ("https://login.example/a", "https://tokens.example/t")
    assert found.auth_methods == ["client_secret_post"]
    own = OAuthAppSpec(name="a", client_id="x", issuer=APP.issuer, token_url="https://own.example/t")
    assert rules.read_document(own, published()).token == "https://own.example/t"
    assert rules.document_urls("https://login.example/tenant/") == [
        "https://login.example/tenant/.well-known/openid-configuration",
        "https://login.example/.well-known/oauth-authorization-server/tenant",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"issuer": "https://login.example/"}, {"issuer": "https://evil.example"}, {"issuer": None},
        {"token_endpoint": "http://login.example/t"}, {"token_endpoint": "http://127.0.0.1:9/t"},
        {"token_endpoint": "http://169.254.169.254/t"}, {"authorization_endpoint": "javascript:alert(1)"},
        {"token_endpoint": "https://a@login.example/t"}, {"code_challenge_methods_supported": ["plain"]},
    ],
)  # fmt: skip
def test_what_no_issuer_may_publish(changes: dict[str, Any]) -> None:
    with pytest.raises(GoondanError) as refused:
        rules.read_document(APP, published(**changes))
    assert refused.value.code == "E_OAUTH_SERVER"


# --- the redirect ---------------------------------------------------------------------------------------------------

HOST = "127.0.0.1:5000"


def request(target: str = "/callback?code=c&state=s", host: str | None = HOST, method: str = "GET") -> bytes:
    line = f"Host: {host}\r\n" if host is not None else ""
    return f"{method} {target} HTTP/1.1\r\n{line}Accept: */*\r\n\r\n".encode()


def test_a_redirect_is_read() -> None:
    assert read_request(request(), HOST, "/callback") == {"code": "c", "state": "s"}
    assert read_request(request(host="LOCALHOST:5000"), HOST, "/callback") is not None
    assert read_request(request("/callback"), HOST, "/callback") == {}


@pytest.mark.parametrize(
    "head",
    [
        request("/other?code=c"), request(host="evil.example:5000"), request(host="127.0.0.1"), request(host=None),
        request(method="POST"), request("/callback?state=a&state=b"), request("http://127.0.0.1:5000/callback?a=b"),
        request("/callback?" + "&".join(f"a{n}=1" for n in range(40))), b"\r\n\r\n", b"GET\r\n\r\n",
        request("/callback?state=%ff"), request(host=HOST + "\r\nHost: evil.example"),
    ],
)  # fmt: skip
def test_what_is_no_redirect(head: bytes) -> None:
    assert read_request(head, HOST, "/callback") is None


@given(st.binary(max_size=300))
def test_no_request_breaks_the_listener(head: bytes) -> None:
    found = read_request(head, HOST, "/callback")
    assert found is None or isinstance(found, dict)


#: One of RFC 6749: NQCHAR.
SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,256}")


@given(st.text(max_size=300) | st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=300))
@example("a b")
@example("x" * 256)
@example("x" * 257)
def test_scopes_and_subjects(text: str) -> None:
    assert is_scope(text) == bool(SCOPE.fullmatch(text))
    unseen = [c for c in text if c != " " and unicodedata.category(c)[0] in "CZ"]
    assert is_subject(text) == (0 < len(text) <= 256 and not unseen)
