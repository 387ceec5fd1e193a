"""Web addresses as browsers read them: one spelling, relative references, and what is none."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goondan.toolhost.base.goondan_base.web_address import BadAddress, WebAddress


@pytest.mark.requirement("HTTP-01")
@pytest.mark.parametrize(
    ("text", "href"),
    [
        ("http://Example.ORG", "http://example.org/"),
        (" HTTP://example.org:80/a/../b/./c?q#f ", "http://example.org/b/c?q#f"),
        ("https:\\\\example.org:443\\a", "https://example.org/a"),
        ("http:example.org", "http://example.org/"),
        ("http://example.org/a b?c d#e f", "http://example.org/a%20b?c%20d#e%20f"),
        ("http://example.org/안", "http://example.org/%EC%95%88"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://0x7F000001/", "http://127.0.0.1/"),
        ("http://127.1/", "http://127.0.0.1/"),
        ("http://2130706433/", "http://127.0.0.1/"),
        ("http://[::FFFF:127.0.0.1]:8080/", "http://[::ffff:7f00:1]:8080/"),
        ("http://u:p@example.org/", "http://u:p@example.org/"),
        ("http://example.org/%2e%2e/a%2Fb", "http://example.org/a%2Fb"),
        ("ht\ntp://exam\tple.org/", "http://example.org/"),
    ],
)
def test_one_spelling(text: str, href: str) -> None:
    assert WebAddress(text).href == href


def test_what_is_asked_for_holds_no_secret_and_no_fragment() -> None:
    address = WebAddress("http://user:pass@example.org:8080/a?b#c")
    assert address.request == "http://example.org:8080/a?b"
    assert address.credentials == "dXNlcjpwYXNz"
    assert WebAddress("http://example.org/").credentials is None


@pytest.mark.parametrize(
    ("reference", "href"),
    [
        ("/x", "http://a.example:81/x"),
        ("x", "http://a.example:81/b/x"),
        ("../x", "http://a.example:81/x"),
        ("?y", "http://a.example:81/b/c?y"),
        ("#z", "http://a.example:81/b/c?q#z"),
        ("//other.example/x", "http://other.example/x"),
        ("https://other.example", "https://other.example/"),
        ("", "http://a.example:81/b/c?q"),
    ],
)
def test_references(reference: str, href: str) -> None:
    base = WebAddress("http://a.example:81/b/c?q#f")
    assert WebAddress(reference, base).href == href


@pytest.mark.parametrize(
    "text",
    ["", "a", "//a", "http://", "http:///", "http://[::1", "http://[::1%lo]/", "http://a:99999/", "http://a:x/",
     "http://1.2.3.4.5/", "http://256.1.1.1/", "http://a b/", "http://a%00/", "http://:80/", "http://u@/", "1http://a/"],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    with pytest.raises(BadAddress):
        WebAddress(text)


def test_another_scheme_is_said_and_nothing_more() -> None:
    assert WebAddress("file:///etc/passwd").scheme == "file"
    assert WebAddress("localhost:8080/x").scheme == "localhost"


ODD = st.text("htps:/\\@#?.%0123456789abx[]", max_size=40)


def assert_one_spelling(address: WebAddress) -> None:
    again = WebAddress(address.href)
    assert again.href == address.href
    assert again.request == address.request
    assert address.request.isascii()
    assert not any(c <= " " for c in address.request)


@example("http:0%3A")
@given(st.text(max_size=60) | ODD.map("http://".__add__))
def test_any_text_has_one_spelling_or_none(text: str) -> None:
    with suppress(BadAddress):
        address = WebAddress(text)
        if address.scheme in ("http", "https"):
            assert_one_spelling(address)


@given(
    st.sampled_from(["http://a", "https://B.example:443", "HTTP://1.2.3.4:80", "http:0%31", "http://[::1]", "http:/a"]),
    st.sampled_from(["/", "?", "#", "/x?", "/../", "\\"]),
    st.text(max_size=40) | ODD,
)
def test_an_address_has_one_spelling_whatever_follows_its_host(host: str, mark: str, rest: str) -> None:
    assert_one_spelling(WebAddress(host + mark + rest))
