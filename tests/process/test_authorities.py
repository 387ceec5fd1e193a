"""One rule for the authorities that are trusted: in agents, in `gdn`, for OAuth, and in MCP workers."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.agentproc.http.route import tls_context as of_agents
from goondan.schemas.bundle.launch import ServerSpec, ToolSpec
from tests.mcp_fixture import Asker, Web
from tests.toolhost_fixture import bench

PEM = Path(__file__).parent.parent / "servers" / "model.test.pem"
#: What OpenSSL calls that certificate in a folder.
HASHED = "b9eddd39.0"


def of_gdn() -> ssl.SSLContext:
    opener: Any = import_module("goondan.features.model_servers.api")._opener(here=False)
    contexts = [context for one in opener.handlers if (context := getattr(one, "_context", None)) is not None]
    assert isinstance(contexts[0], ssl.SSLContext)
    return contexts[0]


def of_oauth() -> ssl.SSLContext:
    client: Any = import_module("goondan.features.oauth.process.http")._make(trust_env=False)
    context: ssl.SSLContext = client._transport._pool._ssl_context
    return context


def of_workers() -> ssl.SSLContext:
    certificates: Any = import_module("goondan.features.mcp.jail.http").certificates
    certificates.cache_clear()
    try:
        context: ssl.SSLContext = certificates()
        return context
    finally:
        certificates.cache_clear()


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


def system(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """This folder is the system's."""
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None, capath=str(folder)))


async def accepts(context: ssl.SSLContext) -> bool:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(PEM)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="model.test")
        except ssl.SSLCertVerificationError:
            return False
        writer.close()
        return True


@pytest.mark.parametrize(
    "made",
    [
        of_agents,
        pytest.param(of_gdn, marks=pytest.mark.feature("model_servers")),
        pytest.param(of_oauth, marks=pytest.mark.feature("oauth")),
        pytest.param(of_workers, marks=pytest.mark.feature("mcp")),
    ],
)
async def test_an_authority_is_trusted_by_all_that_the_system_or_the_environment_names(
    made: Callable[[], ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, empty = tmp_path / "certs", tmp_path / "empty"
    for one in (folder, empty):
        one.mkdir()
    (folder / HASHED).symlink_to(PEM)
    system(monkeypatch, empty)
    assert not await accepts(made()), "certifi alone does not know it"
    system(monkeypatch, folder)
    assert await accepts(made())
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    if os.path.exists(os.environ["SSL_CERT_FILE"]):
        assert not await accepts(made()), "what the environment names takes the place of the system's"
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    assert await accepts(made())
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("SSL_CERT_DIR", str(folder))
    assert await accepts(made())


@pytest.mark.feature("mcp")
async def test_a_worker_behind_its_walls_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_tmp: Path
) -> None:
    """An HTTPS server of MCP on this machine, whose certificate only a folder of the system knows."""
    key, own, folder = tmp_path / "key.pem", tmp_path / "own.pem", tmp_path / "certs"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words, *names, "-keyout", key, "-out", own], check=True, capture_output=True)
    hashed = subprocess.run(["openssl", "x509", "-hash", "-noout", "-in", own], check=True, capture_output=True).stdout
    folder.mkdir()
    (folder / f"{hashed.decode().strip()}.0").symlink_to(own)
    system(monkeypatch, folder)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own, key)
    web = Web()
    async with await asyncio.start_server(web, "127.0.0.1", 0, ssl=tls) as listening:
        endpoint = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}/web"
        server = ServerSpec(
            extension="web",
            transport="http",
            worker="mcp",
            endpoint=endpoint,
            headers={"Authorization": "Bearer k-4711"},
            tools=True,
        )
        async with bench(ToolSpec(name="web", entry="", root="", exports=[], server=server)) as made:
            listing = await Asker(made).ask("web")
        await asyncio.gather(*web.tasks)
    assert [tool["export"] for tool in listing["tools"]] == ["echo"], listing
