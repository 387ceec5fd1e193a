"""`gdn mcp add`: packages of registries on loopback, installed in a jail, without scripts, from nowhere else."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_fixture import BUNDLE, Result, Sandbox, sandbox

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
SERVER = "print('hello from the package')\n"


@pytest.fixture
def place() -> Iterator[Sandbox]:
    with sandbox(BUNDLE) as made:
        yield made


def add(place: Sandbox, *arguments: str, **variables: str) -> Result:
    place.env |= variables
    return place.gdn("mcp", "add", *arguments, timeout=50)


# --- pip


def wheel(folder: Path, *, script: str = "hello = hello_mcp:main") -> None:
    """A package with one program."""
    folder.mkdir()
    info = "hello_mcp-1.2.3.dist-info"
    files = {
        "hello_mcp.py": f"def main():\n    {SERVER}",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: hello-mcp\nVersion: 1.2.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{script}\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / "hello_mcp-1.2.3-py3-none-any.whl", "w") as made:
        for name, text in (*files.items(), (f"{info}/RECORD", record + f"{info}/RECORD,,\n")):
            made.writestr(name, text)


def test_a_python_package_is_pinned_and_started_by_its_own_python(place: Sandbox, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": "/dev/null"}
    folder = place.bundle.parent
    asked = ("--write", "--env", "API_TOKEN", "--net", "h.example:443", "--", "uvx", "hello-mcp", "${WORKDIR}")
    done = add(place, "hello", *asked, **own)
    assert done.status == 0, done.err
    text = place.bundle.read_text()
    named = BUNDLE.replace("spec:\n  modelConfig", "spec:\n  extensions: [Extension/mcp-hello]\n  modelConfig")
    assert text.startswith(named), "the entry agent has it, and nothing else is changed"
    for part in (
        'command: ["./mcp/hello/venv/bin/python", "./mcp/hello/venv/bin/hello", "${WORKDIR}"]', "scope: agent",
        'API_TOKEN: "${API_TOKEN}"', 'allow: ["h.example:443"]',
    ):  # fmt: skip
        assert part in text, part
    assert (folder / "mcp/hello/requirements.txt").read_text().startswith("hello-mcp==1.2.3 --hash=sha256:")
    assert (folder / "mcp/.gitignore").read_text() == "*\n"
    ran = subprocess.run(
        ["mcp/hello/venv/bin/python", "mcp/hello/venv/bin/hello"], cwd=folder, capture_output=True, text=True
    )
    assert ran.stdout == "hello from the package\n"
    again = add(place, "hello", "--", "uvx", "hello-mcp")
    assert "E_INIT" in again.err, "what is there is not touched without --replace"
    path = place.env["PATH"]
    broken = add(place, "hello", "--replace", "--json", "--", "npx", "-y", "x", PATH="/nowhere")
    place.env["PATH"] = path
    assert broken.json["error"]["code"] == "E_MCP_INSTALL"
    assert (folder / "mcp/hello/venv/bin/hello").exists(), "what was there before is back"
    place.env["API_TOKEN"] = "x"
    checked = place.gdn("validate", str(place.bundle))
    assert checked.status == 0, checked.err + checked.out
    assert not place.ps(), "no kernel is left"


# --- npm


def package(name: str, **more: Any) -> bytes:
    told = {"name": name, "version": "2.0.1", "bin": {"server": "dist/index.js"}, **more}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as made:
        for path, text in (
            ("package.json", json.dumps(told)),
            ("dist/index.js", "#!/usr/bin/env node\nconsole.log('hi')\n"),
        ):
            entry = tarfile.TarInfo(f"package/{path}")
            entry.size = len(text)
            made.addfile(entry, io.BytesIO(text.encode()))
    return data.getvalue()


@contextmanager
def registry(elsewhere: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A registry with the package @t/server. If there is another host, the package would like to have @t/other, whose
    tarball lies there. Its URL, and what was asked.
    """
    asked: list[str] = []
    data = package("@t/server", scripts={"install": "touch /tmp/ran; touch $INIT_CWD/ran; touch ran"})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            told = other if "other" in self.path else described
            body = data if self.path.endswith(".tgz") else json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        digest = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        version: dict[str, Any] = {
            "name": "@t/server", "version": "2.0.1", "bin": {"server": "dist/index.js"}, "hasInstallScript": True,
            "scripts": {"install": "touch ran"}, "dist": {"tarball": f"{url}/server-2.0.1.tgz", "integrity": digest},
        }  # fmt: skip
        if elsewhere is not None:
            version["optionalDependencies"] = {"@t/other": "1.0.0"}
        described = {"name": "@t/server", "dist-tags": {"latest": "2.0.1"}, "versions": {"2.0.1": version}}
        foreign = {
            "name": "@t/other",
            "version": "1.0.0",
            "dist": {"tarball": f"{elsewhere}/x.tgz", "integrity": digest},
        }
        other = {"name": "@t/other", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": foreign}}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield url, asked
        finally:
            server.shutdown()


@needs_npm
def test_an_npm_package_is_pinned_runs_no_script_and_comes_from_its_registry_only(place: Sandbox) -> None:
    folder = place.bundle.parent
    with registry() as (elsewhere, reached), registry(elsewhere) as (url, asked):
        done = add(place, "mine", "--json", "--", "npx", "-y", "@t/server", "--flag", npm_config_registry=url)
    assert done.status == 0, done.out + done.err
    told = done.json
    assert (told["version"], told["scriptsNotRun"]) == ("2.0.1", ["@t/server"])
    transport = told["document"]["spec"]["config"]["transport"]
    assert transport["command"][1:] == ["./mcp/mine/node_modules/@t/server/dist/index.js", "--flag"]
    assert json.loads((folder / "mcp/mine/package.json").read_text())["dependencies"] == {"@t/server": "2.0.1"}
    assert (folder / "mcp/mine/node_modules/@t/server/dist/index.js").is_file()
    assert not list(folder.rglob("ran"))
    assert asked
    assert reached == [], "the jail reaches no other host"
    assert not (folder / "mcp/mine/node_modules/@t/other").exists()
    assert place.bundle.read_text() == BUNDLE, "nothing is written without --write"


def test_what_installs_nothing_is_refused_before_anything_starts(place: Sandbox) -> None:
    for words in (
        ("x", "--", "node", "server.js"), ("x", "--", "npx", "git+https://h.example/x"), ("bash", "--", "uvx", "p"),
        ("X Y", "--", "uvx", "p"), ("x", "--env", "A-B", "--", "uvx", "p"), ("x", "--net", "nohost", "--", "uvx", "p"),
        ("x",),
    ):  # fmt: skip
        done = place.gdn("mcp", "add", *words)
        assert done.status in (1, 2), words
        assert "E_USAGE" in done.err or "E_INIT" in done.err
    (place.bundle.parent / "mcp").symlink_to("/tmp")
    linked = place.gdn("mcp", "add", "--dir", str(place.bundle.parent), "x", "--", "uvx", "p")
    assert "is a link" in linked.err
