"""To which servers a key may be sent."""

from __future__ import annotations

import pytest

from goondan.schemas.models.origins import is_open, key_may_go, origin_of

VENDOR = "https://api.vendor.test/v1"


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://API.Vendor.test/v1?x#y", "https://api.vendor.test:443"),
        ("http://127.0.0.1:11434/v1", "http://127.0.0.1:11434"),
        ("http://[::1]/v1", "http://[::1]:80"),
        ("https://api.vendor.test@evil.test/v1", "https://evil.test:443"),
        ("https://api.vendor.test:443@evil.test:444/", "https://evil.test:444"),
        ("ftp://a.test", None),
        ("https://", None),
        ("https://a.test:port", None),
        ("nonsense", None),
    ],
)
def test_origins(url: str, origin: str | None) -> None:
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    ("origin", "opened"),
    [
        ("https://a.test:443", False),
        ("http://a.test:80", True),
        ("http://192.168.1.2:80", True),
        ("http://127.0.0.1:80", False),
        ("http://127.9.9.9:80", False),
        ("http://[::1]:80", False),
        ("http://localhost:80", False),
        ("http://evil.localhost:80", True),
        ("http://127.0.0.1.evil.test:80", True),
        ("http://0.0.0.0:80", True),
    ],
)
def test_who_can_read_on_the_way(origin: str, opened: bool) -> None:
    assert is_open(origin) is opened


@pytest.mark.parametrize(
    ("url", "key_origin", "may"),
    [
        ("https://api.vendor.test/v1/models", None, True),
        ("http://api.vendor.test/v1/models", None, False),
        ("https://api.vendor.test:444/v1", None, False),
        ("https://api.vendor.test.evil.test/v1", None, False),
        ("https://evil.test/v1", None, False),
        ("http://127.0.0.1:8000/v1", None, True),
        ("https://evil.test/v1", "https://evil.test:443", True),
        ("https://evil.test:8443/v1", "https://evil.test:443", False),
        ("http://evil.test/v1", "https://evil.test:443", False),
        ("https://api.vendor.test/v1", "https://evil.test:443", False),
        ("http://127.0.0.1:9/v1", "https://evil.test:443", False),
        ("nonsense", None, False),
    ],
)
def test_where_a_key_may_go(url: str, key_origin: str | None, may: bool) -> None:
    assert key_may_go(url, key_origin, VENDOR) is may
