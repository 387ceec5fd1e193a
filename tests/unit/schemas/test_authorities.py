"""Which hosts are asked without a proxy."""

from __future__ import annotations

import pytest

from goondan.schemas.system.authorities import skips_proxy


@pytest.mark.parametrize(
    ("listed", "host", "port", "skips"),
    [
        ("", "example.com", None, False),
        ("*", "example.com", None, True),
        ("example.com", "example.com", 443, True),
        ("example.com", "api.example.com", 443, True),
        (".example.com", "api.example.com", 443, True),
        ("*.example.com", "api.example.com", 443, True),
        ("*.EXAMPLE.com", "Api.Example.COM", 443, True),
        ("*.example.com", "badexample.com", 443, False),
        ("example.com:8443", "example.com", 8443, True),
        ("example.com:8443", "example.com", 443, False),
        ("10.0.0.0/8", "10.1.2.3", 80, True),
        ("10.0.0.0/8", "11.1.2.3", 80, False),
        ("10.0.0.0/8", "example.com", 80, False),
        ("10.1.2.3", "10.1.2.3", 80, True),
        ("10.1.2.3:80", "10.1.2.3", 80, True),
        ("10.1.2.3:80", "10.1.2.3", 81, False),
        ("2001:db8::1", "2001:db8::1", 443, True),
        ("2001:db8::1", "[2001:db8:0::1]", 443, True),
        ("[2001:db8::1]", "2001:db8::1", 443, True),
        ("[2001:db8::1]:443", "2001:db8::1", 443, True),
        ("[2001:db8::1]:443", "2001:db8::1", 444, False),
        ("2001:db8::/32", "2001:db8:5::9", 443, True),
        ("10.0.0.0/8", "2001:db8::1", 443, False),
        ("other.test, *.example.com 10.0.0.0/8", "a.example.com", None, True),
        (", ,", "example.com", None, False),
        (".", "example.com", None, False),
    ],
)
def test_what_goes_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, listed: str, host: str, port: int | None, skips: bool
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, listed)
        assert skips_proxy(host, port) is skips
        monkeypatch.delenv(name)
