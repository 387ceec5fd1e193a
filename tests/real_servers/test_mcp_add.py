"""`gdn mcp add NAME` for each server that is known by its name, and one call of it through an agent.

The packages come from the registries of this machine's npm and pip. Nothing is typed but the name and the consent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

pytestmark = [
    pytest.mark.skipif("GOONDAN_MCP_SERVERS" not in os.environ, reason="make mcp-servers runs it"),
    pytest.mark.timeout(900),
]
#: What npm and pip need to know where the registries are.
OURS: Final = ("PIP_", "NPM_", "NODE_", "SSL_", "HTTP", "NO_PROXY", "ALL_PROXY")
BROWSERS: Final = ("/usr/lib/chromium/chromium", "google-chrome", "chromium-browser")
ADA: Final = {"name": "Ada", "entityType": "person", "observations": ["drinks tea"]}
THOUGHT: Final = {"thought": "Tea.", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
#: Server -> a tool, its arguments, and what the answer has: any of these. WORK is the workdir.
CALLS: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "filesystem": ("list_directory", {"path": "WORK"}, ("tea.txt",)),
    "memory": ("create_entities", {"entities": [ADA]}, ("drinks tea",)),
    "everything": ("echo", {"message": "hello"}, ("Echo: hello",)),
    "sequential-thinking": ("sequentialthinking", THOUGHT, ("thoughtHistoryLength",)),
    "git": ("git_log", {"repo_path": "WORK"}, ("Message: Tea",)),
    "time": ("get_current_time", {"timezone": "UTC"}, ("UTC",)),
    "sqlite": ("create_table", {"query": "CREATE TABLE tea (name TEXT)"}, ("created",)),
    "calculator": ("calculate", {"expression": "6*7"}, ("42",)),
    # Without a network behind the machine they say so.
    "fetch": ("fetch", {"url": "https://example.com/"}, ("Example Domain", "robots.txt")),
    "brave-search": ("brave_web_search", {"query": "tea"}, ("fetch failed", "401", "422", "token")),
    # A browser runs outside of the jail, on port 9222. Without one the server says so.
    "chrome-devtools": ("new_page", {"url": "data:text/html,<h1>tea</h1>"}, ("tea</h1>", "9222")),
}


@contextmanager
def browser(folder: Path) -> Iterator[None]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        yield
        return
    words = ["--headless", "--no-sandbox", "--remote-debugging-port=9222", f"--user-data-dir={folder}"]
    with subprocess.Popen([found, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def place() -> Iterator[Sandbox]:
    own = {name: value for name, value in os.environ.items() if name.upper().startswith(OURS)}
    with sandbox(BUNDLE, {**own, "BRAVE_API_KEY": "no-real-key-4711"}) as made:
        made.here = made.home
        work = made.home.parent / "work"
        work.mkdir()
        (work / "tea.txt").write_text("green\n")
        for words in (["init", "-q", "-b", "main"], ["add", "tea.txt"], ["commit", "-q", "-m", "Tea"]):
            identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
            subprocess.run(["git", *identity, *words], cwd=work, check=True)
        for name in CALLS:
            added = made.gdn("mcp", "add", name, "--write", timeout=300)
            assert added.status == 0, (name, added.err)
        with browser(made.home.parent / "profile"):
            made.detach()
            yield made


@pytest.mark.parametrize("name", CALLS)
def test_a_known_server_is_added_by_its_name_and_called_through_an_agent(place: Sandbox, name: str) -> None:
    tool, arguments, expected = CALLS[name]
    work = str(place.home.parent / "work")
    said = f"/{name}__{tool} {json.dumps(arguments).replace('WORK', work)}"

    def answered() -> str | None:
        told = place.gdn("send", "--workdir", work, said, timeout=120).out
        return told if any(part in told for part in expected) else None

    wait_until(answered, 60, f"{name}: {expected}")  # a browser takes a moment to listen


def test_all_of_them_are_connected(place: Sandbox) -> None:
    rows = place.gdn("mcp", "list", "--json").json
    assert {row["server"]: row["state"] for row in rows} == dict.fromkeys(CALLS, "connected")
