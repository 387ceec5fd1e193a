"""The client that `make conformance` tests: `client.py URL`, with the scenario's name in MCP_CONFORMANCE_SCENARIO.

It is a swarm of one agent that has the server at URL, in a real kernel: `gdn mcp serve` makes the calls as that agent.
So each goes through agent, broker, tool host and worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

BUNDLE: Final = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: none}
spec: {provider: auto}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mcp-srv}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport: {type: http, endpoint: "URL"}
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
#: What makes an argument of each type.
SAMPLES: Final[dict[str, Any]] = {"string": "x", "number": 1, "integer": 1, "boolean": True, "array": [], "object": {}}


class Served:
    """The agent's tools, through `gdn mcp serve` on standard streams."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "GOONDAN_STATE_ROOT": str(folder / "state"), "GOONDAN_TRUST": "1"}
        words = ["mcp", "serve", "--agent", "caller", "--tools", "srv__*"]
        self._program = subprocess.Popen(
            self._gdn(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment, text=True
        )
        self._number = 0
        self._over = threading.Event()
        self._person = threading.Thread(target=self._answer_questions, daemon=True)

    def _gdn(self, words: list[str]) -> list[str]:
        return [str(Path(sys.executable).parent / "gdn"), *words, "--bundle", str(self._folder)]

    def _answer_questions(self) -> None:
        """Be the person that servers ask: accept, and leave what has a default as it is."""
        while not self._over.wait(0.5):
            words = self._gdn(["approve", "list", "--json"])
            listed = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False)
            for item in json.loads(listed.stdout or "{}").get("items", ()):
                schema = item.get("schema") or {}
                needed = {
                    name: value for name, value in sample(schema, {}).items() if name in schema.get("required", ())
                }
                answer = self._gdn(["approve", "answer", item["id"], json.dumps(needed)])
                subprocess.run(answer, env=self._environment, stdout=sys.stderr, check=False)

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
        self._person.start()

    def close(self) -> None:
        """End the swarm."""
        self._over.set()
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(30)

    def _say(self, message: dict[str, Any]) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(message) + "\n")
        self._program.stdin.flush()


def main(url: str) -> int:
    """Call each tool of the server, or those that the scenario names."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    with tempfile.TemporaryDirectory(prefix="gdn", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "goondan.yaml").write_text(BUNDLE.replace("URL", url))
        (folder / "state").mkdir(mode=0o700)
        served = Served(folder)
        try:
            served.greet()
            tools = (served.ask("tools/list") or {}).get("tools", [])
            schemas = {tool["name"].partition("__")[2]: tool.get("inputSchema", {}) for tool in tools}
            for offered in ("read_resource", "get_prompt"):
                schemas.pop(offered, None)
            named = [(call["name"], call.get("arguments", {})) for call in context.get("toolCalls", ())]
            for tool, arguments in named or [(tool, sample(schemas[tool], schemas)) for tool in schemas]:
                given = {key: value for key, value in arguments.items() if value is not None}
                served.ask("tools/call", name=f"srv__{tool}", arguments=given)
        finally:
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
