"""A real OAuth server for tests: npm's oidc-provider, and a browser whose person agrees to everything.

It is installed as tests/npm_fixture.py says. Where it cannot be had, the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

from tests import npm_fixture

SOURCES = Path(__file__).parent / "servers" / "oidc"
#: How long the server and one request of the browser may take (seconds).
PATIENCE_S = 20.0


class Provider:
    """The running server. `issuer` is its address."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer

    def control(self, **changes: Any) -> dict[str, Any]:
        """Change how it behaves (`deny`, `ttl`); what it has seen (`token`: requests for tokens)."""
        return _json(f"{self.issuer}/control", json.dumps(changes).encode())

    def introspect(self, token: str) -> bool:
        """Whether the server takes this token."""
        form = f"token={token}&client_id=native".encode()
        return bool(_json(f"{self.issuer}/token/introspection", form)["active"])


@contextmanager
def oidc_provider() -> Iterator[Provider]:
    """Start it, and end it. Skips the test where it cannot be had."""
    copy = npm_fixture.beside(npm_fixture.installed(SOURCES), SOURCES / "server.mjs")
    process = subprocess.Popen(
        ["node", str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), "the OAuth server did not start"
        yield Provider(line)
    finally:
        process.stdin.close()
        process.wait(PATIENCE_S)
        process.stdout.close()


def browse(url: str) -> tuple[int, str]:
    """Open a page as a browser does, with cookies and redirects: the last status and text."""
    return Browser().open(url)


class Browser:
    """One person's browser."""

    def __init__(self) -> None:
        jar = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), jar)

    def open(self, url: str, form: dict[str, str] | None = None) -> tuple[int, str]:
        """Open a page, or send a form."""
        from urllib.parse import urlencode

        data = None if form is None else urlencode(form).encode()
        try:
            with self._opener.open(url, data, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def type_code(self, page: str) -> str:
        """Open the page of a device code that has the code in it, and confirm it; the page that follows."""
        import re

        _, form = self.open(page)
        action = re.search(r'action="([^"]+)"', form)
        fields = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', form))
        assert action is not None, form
        status, text = self.open(action[1], fields)
        action = re.search(r'action="([^"]+)"', text)
        if status == 200 and action is not None:  # the question whether it is the right code
            fields = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', text))
            status, text = self.open(action[1], {**fields, "confirm": "yes"})
        return text


def _json(url: str, data: bytes) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, data, timeout=PATIENCE_S) as answer:
        told: dict[str, Any] = json.loads(answer.read())
        return told
