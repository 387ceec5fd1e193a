"""Which requests come in at all: by their head, before a byte of the body is read."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.features.serve.api.rules.callers import Caller, Tokens
from goondan.features.serve.api.rules.heads import Head, Names, judge

TOKEN = "a-token-of-some-length"
NAMES = Names(4321)
TOKENS = Tokens.single(TOKEN, Caller("phone", "talk", ("main",)))
GOOD = {"host": "127.0.0.1:4321", "authorization": f"Bearer {TOKEN}"}


def judged(
    path: str = "/x", more: list[tuple[str, str]] | None = None, names: Names = NAMES, scope: Any = None, **changed: Any
) -> int:
    headers = {**GOOD, **{name.replace("_", "-"): value for name, value in changed.items()}}
    pairs = [*headers.items(), *(more or [])]
    raw, _, query = path.partition("?")
    found = judge(
        {
            "method": "POST", "http_version": "1.1", "raw_path": raw.encode("latin-1"), "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs if value is not None],
        } | (scope or {}),
        names,
        TOKENS.known,
    )  # fmt: skip
    return 200 if isinstance(found, Head) else found.status


def test_who_has_the_token_and_names_this_host_comes_in() -> None:
    assert judged() == 200
    for host in ("localhost:4321", "LOCALHOST:4321", "[::1]:4321"):
        assert judged(host=host) == 200
    assert judged(origin="http://127.0.0.1:4321") == 200
    assert judged(sec_fetch_site="same-origin") == judged(sec_fetch_site="none") == 200
    assert judged(content_length="100") == judged(transfer_encoding="chunked") == 200
    assert judged(authorization=f"bearer  {TOKEN} ") == 200
    assert judged("/agents/%EA%B0%80/x%20y?after=tokens") == 200


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:4321", "127.0.0.1", "127.0.0.1:4322", "127.0.0.1:43210", "10.0.0.1:4321",
     "127.0.0.1:4321.evil.example", "localhost:4321@evil.example", "127.0.0.1:4321,evil.example", "0.0.0.0:4321"],
)  # fmt: skip
def test_another_host_is_refused(host: str | None) -> None:
    assert judged(host=host) == 421


def test_two_hosts_are_refused() -> None:
    assert judged(more=[("Host", "127.0.0.1:4321")]) == 421


def test_names_that_the_owner_has_given_are_hosts_and_origins() -> None:
    named = Names(4321, "0.0.0.0", ["Swarm.example", "other.example:8443"])
    for host in ("swarm.example", "SWARM.example:4321", "other.example:8443", "10.1.2.3:4321", "[2001:db8::1]:4321"):
        assert judged(host=host, names=named) == 200, host
    for host in ("other.example", "other.example:4321", "10.1.2.3", "10.1.2.3:80", "evil.example:4321"):
        assert judged(host=host, names=named) == 421, host
    for origin in ("https://swarm.example", "http://swarm.example:4321", "https://other.example:8443"):
        assert judged(origin=origin, names=named) == 200, origin
    for origin in ("https://10.1.2.3:4321", "https://evil.example", "https://swarm.example.evil.example"):
        assert judged(origin=origin, names=named) == 403, origin


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", "https://127.0.0.1:4321", "http://127.0.0.1", "http://127.0.0.1:43210", "",
     "http://localhost:4321.evil.example", "http://localhost:4321/", "file://", "127.0.0.1:4321"],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    assert judged(origin=origin) == 403
    assert judged(origin="http://127.0.0.1:4321", more=[("origin", origin)]) == 403
    assert judged(origin="http://127.0.0.1:4321", more=[("origin", "http://127.0.0.1:4321")]) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "same-origin, cross-site"])
def test_what_a_page_of_another_site_had_sent_is_refused(site: str) -> None:
    assert judged(sec_fetch_site=site) == 403


@pytest.mark.parametrize(
    "given_",
    [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}2", f"Basic {TOKEN}", TOKEN,
     f"Bearer {TOKEN.upper()}", f"Bearer Bearer {TOKEN}", f"Bearer {TOKEN}, {TOKEN}", "Bearer \xff" * 3],
)  # fmt: skip
def test_without_the_token_nobody_comes_in(given_: str | None) -> None:
    assert judged(authorization=given_) == 401


def test_two_tokens_are_none() -> None:
    assert judged(more=[("Authorization", GOOD["authorization"])]) == 401


@pytest.mark.parametrize("length", ["9" * 40, "-1", "+1", "1e3", "0x10", "", " 1", "1_000", "\xb2"])
def test_a_length_that_is_none_is_refused(length: str) -> None:
    assert judged(content_length=length) == 400


def test_a_head_that_can_be_read_in_two_ways_is_refused() -> None:
    assert judged(content_length="3", transfer_encoding="chunked") == 400
    assert judged(content_length="3", more=[("content-length", "3")]) == 400
    assert judged(transfer_encoding="chunked", more=[("transfer-encoding", "chunked")]) == 400
    assert judged(transfer_encoding="gzip, chunked") == judged(transfer_encoding="identity") == 400
    assert judged(upgrade="websocket") == judged(upgrade="h2c") == 400
    assert judged(content_encoding="gzip") == 415
    assert judged(scope={"http_version": "1.0"}) == 505
    for method in ("HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "CONNECT", "get"):
        assert judged(scope={"method": method}) == 405
    assert judged("/" + "a" * 9000) == judged("/x?" + "a" * 9000) == judged(more=[("a", "b")] * 101) == 400


@pytest.mark.parametrize(
    "path",
    ["/../x", "/a/..", "/%2e%2e/x", "/%2E./x", "/a/./b", "/%00", "/a%0d%0ab", "/%1b[2J", "/%ff", "/%c0%ae", "/a\\b",
     "/%5c", "http://127.0.0.1:4321/x", "x", "*", "", "/\x7f", "/%E2%80%AE"],
)  # fmt: skip
def test_a_path_that_is_no_plain_one_is_refused(path: str) -> None:
    assert judged(path) == 400


@pytest.mark.parametrize(
    "query", ["token=x", "a=b&access_token=x", "ACCESS-TOKEN=x", "%74oken=x", "api_key", "api-key=", "token%20=x"]
)
def test_a_token_in_the_query_is_refused_with_a_sentence(query: str) -> None:
    assert judged("/x?" + query) == 400
