"""The client that `make conformance` tests: `client.py URL`, with the scenario's name in MCP_CONFORMANCE_SCENARIO.

It is a swarm of one agent that has the server at URL, in a real kernel: `gdn mcp serve` makes the calls as that agent.
So each goes through agent, broker, tool host and worker.

This program is the person as well. It answers what servers ask. In the scenarios of a login it opens each page that
`gdn auth list` shows, and begins a turn then, in which the agent connects again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

BUNDLE: Final = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: none}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mcp-srv}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport: {type: http, endpoint: "URL", oauth: OAUTH}
    attach: {mode: stateful, scope: instance}
    expose: {tools: true, resources: true, prompts: true}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: caller}
spec:
  modelConfig: {modelRef: Model/none}
  extensions: [Extension/mcp-srv]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: conformance}
spec: {entryAgent: Agent/caller, agents: [{ref: Agent/caller}]}
"""
#: How the names of scenarios of a login begin.
LOGIN: Final = "auth/"
#: The document about the client that a scenario knows.
CLIENT_DOCUMENT: Final = "https://conformance-test.local/client-metadata.json"
#: How often the person looks what there is to do, and how long a turn after it begins (seconds).
LOOK_S: Final = 0.4
PAUSE_S: Final = 2.0
#: How many turns the person begins for a server that does not let the agent in.
TURNS: Final = 3
#: What makes an argument of each type.
SAMPLES: Final[dict[str, Any]] = {"string": "x", "number": 1, "integer": 1, "boolean": True, "array": [], "object": {}}


class Served:
    """The agent's tools, through `gdn mcp serve` on standard streams."""

    def __init__(self, folder: Path) -> None:
        words = command(folder, "mcp", "serve", "--agent", "caller", "--tools", "srv__*")
        self._program = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(folder), text=True
        )
        self._number = 0

    def ask(self, method: str, **params: Any) -> Any:
        """The result of a request, or None."""
        self._number += 1
        self._say({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        assert self._program.stdout is not None
        for line in self._program.stdout:
            message = json.loads(line)
            if message.get("id") == self._number:
                return message.get("result")
        return None

    def greet(self) -> None:
        """The handshake."""
        self.ask("initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={"name": "c", "version": "1"})
        self._say({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def close(self) -> None:
        """End the swarm."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(30)

    def _say(self, message: dict[str, Any]) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(message) + "\n")
        self._program.stdin.flush()


class Person:
    """Does what there is to do for a person, until `leave`."""

    def __init__(self, folder: Path, *, logs_in: bool) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._opened: set[str] = set()
        self._thread = threading.Thread(target=self._look, args=(self._log_in if logs_in else self._answer,))
        self._thread.start()

    def leave(self) -> None:
        """Do nothing more."""
        self._over.set()
        self._thread.join()

    def _look(self, act: Any) -> None:
        while not self._over.wait(LOOK_S):
            act()

    def _answer(self) -> None:
        """Accept what servers ask, and leave what has a default as it is."""
        for item in told(self._folder, "approve", "list", "--json").get("items", ()):
            schema = item.get("schema") or {}
            needed = {name: value for name, value in sample(schema, {}).items() if name in schema.get("required", ())}
            answer = command(self._folder, "approve", "answer", item["id"], json.dumps(needed))
            subprocess.run(answer, env=environment(self._folder), stdout=sys.stderr, check=False)

    def _log_in(self) -> None:
        """Open each page once."""
        for row in told(self._folder, "auth", "list", "--json").get("waiting", ()):
            page = row["authorizationUrl"]
            if page in self._opened:
                continue
            self._opened.add(page)
            browser = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                browser.open(page, timeout=20).close()
            except urllib.error.HTTPError as refused:
                refused.close()


def connect(folder: Path, served: Served) -> None:
    """Begin turns until the agent has the server's tools, or has not got them in several."""
    for _ in range(TURNS):
        if (served.ask("tools/list") or {}).get("tools"):
            return
        time.sleep(PAUSE_S)
        told(folder, "send", "caller", "hello", "--instance", "mcp", "--json")


def command(folder: Path, *words: str) -> list[str]:
    """A command on this swarm."""
    return [str(Path(sys.executable).parent / "gdn"), *words, "--bundle", str(folder)]


def told(folder: Path, *words: str) -> dict[str, Any]:
    """What a command says in JSON. Nothing, if it fails."""
    said = subprocess.run(
        command(folder, *words), env=environment(folder), stdout=subprocess.PIPE, text=True, check=False
    )
    found: dict[str, Any] = json.loads(said.stdout or "{}")
    return found


def environment(folder: Path) -> dict[str, str]:
    """The variables of every command on this swarm."""
    state, config = str(folder / "state"), str(folder / "config")
    return {**os.environ, "GOONDAN_STATE_ROOT": state, "XDG_CONFIG_HOME": config, "GOONDAN_TRUST": "1"}


def oauth_of(scenario: str, context: dict[str, Any]) -> Any:
    """`transport.oauth` for a scenario. Its authorization server has a port that nobody knows before."""
    if not scenario.startswith(LOGIN):
        return False
    written: dict[str, Any] = {"hosts": ["localhost:*", "127.0.0.1:*"]}
    if "client_id" in context:
        written |= {"clientId": context["client_id"], "clientSecret": context["client_secret"]}
    if scenario == "auth/basic-cimd":
        written["clientMetadataUrl"] = CLIENT_DOCUMENT
    return written


def main(url: str) -> int:
    """Call each tool of the server, or those that the scenario names."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    with tempfile.TemporaryDirectory(prefix="gdn", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        oauth = json.dumps(oauth_of(scenario, context))
        (folder / "goondan.yaml").write_text(BUNDLE.replace("URL", url).replace("OAUTH", oauth))
        (folder / "state").mkdir(mode=0o700)
        served = Served(folder)
        served.greet()
        person = Person(folder, logs_in=scenario.startswith(LOGIN))
        try:
            if scenario.startswith(LOGIN):
                connect(folder, served)
            tools = (served.ask("tools/list") or {}).get("tools", [])
            schemas = {tool["name"].partition("__")[2]: tool.get("inputSchema", {}) for tool in tools}
            for offered in ("read_resource", "get_prompt"):
                schemas.pop(offered, None)
            named = [(call["name"], call.get("arguments", {})) for call in context.get("toolCalls", ())]
            for tool, arguments in named or [(tool, sample(schemas[tool], schemas)) for tool in schemas]:
                given = {key: value for key, value in arguments.items() if value is not None}
                served.ask("tools/call", name=f"srv__{tool}", arguments=given)
        finally:
            person.leave()
            served.close()
    return 0


def sample(schema: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a schema. One that is called `schema` is that of the tool whose keywords are to be kept."""
    arguments: dict[str, Any] = {}
    for name, value in schema.get("properties", {}).items():
        if name == "schema":
            arguments[name] = others.get("json_schema_2020_12_tool", {})
        elif "enum" in value:
            arguments[name] = value["enum"][0]
        else:
            arguments[name] = value.get("default", SAMPLES.get(value.get("type"), "x"))
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[-1]))
