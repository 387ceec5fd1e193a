"""The MCP extension of the specification (v0.9, section 11.3), translated line by line into a bundle's own extension.

Its server is a program that answers three questions on a pipe: what the specification leaves out as "actual
implementation needed". It runs as the example has it, as a child of the agent, without a jail: an extension of the
bundle's own is trusted code. The bundled extension `mcp` (docs/mcp.md) is what to use.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.machine.messages import ToolData
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.codec import from_raw
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, the_answer

SERVER = """\
import json, os, sys
tools = [{"name": "greet", "description": "Greets.",
          "inputSchema": {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}}]
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked["method"], asked.get("params", {})
    if method == "tools/list": told = tools
    elif method == "resources/list": told = [{"uri": "note://1", "name": "one", "mimeType": "text/plain"}]
    elif method == "prompts/list": told = []
    else: told = {"said": os.environ["GREETING"] + " " + params["arguments"]["who"]}
    print(json.dumps(told), flush=True)
"""

#: The example. What is after `register` stands in for its "actual implementation needed" lines.
EXAMPLE = """\
import json
import os
import subprocess


async def register(api):
    state = api.ext_state()
    config = api.extension.spec.config

    if not config:
        api.logger.warn("MCP Extension: config is missing")
        return

    state.tools = []
    state.resources = []
    state.prompts = []
    state.connected = False

    # stateful: connect while the extension is registered
    if config["attach"]["mode"] == "stateful":
        connect(config, state, api.logger)

    # the tools go into the catalog
    if config["expose"].get("tools"):

        async def step_tools(ctx):
            # stateless: connect at each step
            if config["attach"]["mode"] == "stateless":
                connect(config, state, api.logger)
            mcp_tools = [
                {
                    "name": f"mcp.{tool['name']}",
                    "description": tool["description"],
                    "parameters": tool["inputSchema"],
                    "source": {"type": "mcp", "extension": api.extension.metadata.name},
                }
                for tool in state.tools
            ]
            return {**ctx, "toolCatalog": [*ctx.tool_catalog, *mcp_tools]}

        api.pipelines.mutate("step.tools", step_tools)

    # the resources go into the blocks
    if config["expose"].get("resources"):

        async def step_blocks(ctx):
            if len(state.resources) > 0:
                blocks = [*ctx.blocks]
                blocks.append(
                    {"type": "mcp.resources", "items": state.resources, "source": api.extension.metadata.name}
                )
                return {**ctx, "blocks": blocks}
            return ctx

        api.pipelines.mutate("step.blocks", step_blocks)

    # the handlers of the tools
    for tool in state.tools:

        async def handler(ctx, input, name=tool["name"]):
            return invoke_mcp_tool(state, name, input, api.logger)

        api.tools.register(
            {
                "name": f"mcp.{tool['name']}",
                "description": tool["description"],
                "parameters": tool["inputSchema"],
                "handler": handler,
                "metadata": {"source": "mcp", "mcpServer": api.extension.metadata.name},
            }
        )

    # the end
    def cleanup(payload):
        if state.process:
            state.process.kill()
            state.process.communicate()
            state.connected = False

    api.events.on("extension.cleanup", cleanup)


def connect(config, state, logger):
    if config["transport"]["type"] == "stdio":
        connect_stdio(config, state, logger)
    elif config["transport"]["type"] == "http":
        raise NotImplementedError("this test has no http")


def connect_stdio(config, state, logger):
    command = config["transport"].get("command")
    if not command or len(command) == 0:
        raise RuntimeError("MCP stdio transport requires command")
    state.process = subprocess.Popen(
        command,
        env={**os.environ, **config["transport"].get("env", {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    state.connected = True
    state.tools = ask(state.process, "tools/list")
    if config["expose"].get("resources"):
        state.resources = ask(state.process, "resources/list")
    if config["expose"].get("prompts"):
        state.prompts = ask(state.process, "prompts/list")
    logger.info(f"MCP connected: {' '.join(command)}")


def invoke_mcp_tool(state, tool_name, input, logger):
    logger.debug(f"MCP tool call: {tool_name}", input)
    return ask(state.process, "tools/call", {"name": tool_name, "arguments": input})


def ask(process, method, params=None):
    process.stdin.write(json.dumps({"method": method, "params": params or {}}).encode() + b"\\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())
"""


@pytest.fixture
def example(tmp_path: Path) -> ExtensionSpec:
    (tmp_path / "server.py").write_text(SERVER)
    entry = tmp_path / "mcp" / "index.py"
    entry.parent.mkdir()
    entry.write_text(EXAMPLE)
    return of_config(
        entry,
        {
            "transport": {
                "type": "stdio",
                "command": [sys.executable, "-I", str(tmp_path / "server.py")],
                "env": {"GREETING": "hello"},
            },
            "attach": {"mode": "stateful", "scope": "instance"},
            "expose": {"tools": True, "resources": True, "prompts": True},
        },
    )


def of_config(entry: Path, config: dict[str, Any] | None) -> ExtensionSpec:
    """An Extension of v0.9 with this config: its tools are in the registry only."""
    resource = {
        "apiVersion": "agents.example.io/v1alpha1",
        "kind": "Extension",
        "metadata": {"name": "mcp-github"},
        "spec": {"runtime": "node", "entry": "./extensions/mcp/index.py", "config": config},
    }
    return ExtensionSpec(
        name="mcp-github", entry=str(entry), resource=resource, config=config or {}, exposes_tools=False
    )


async def test_the_example_of_the_specification(make: Make, example: ExtensionSpec) -> None:
    model = FakeModel(wants(("a", "mcp__greet", {"who": "world"})), says("done"))
    runner: TurnRunner = make(FakeLink(), model, extensions=[example])
    await runner.load_extensions()
    state = runner.instance.extensions._loaded["mcp-github"].state
    assert state.connected and isinstance(state.process, subprocess.Popen)
    await runner.run(event_frame("e1", "go"))
    (item,) = [item for item in model.requests[0].tools if item.name == "mcp__greet"]
    assert (item.source.type, item.source.name) == ("mcp", "mcp-github")
    (block,) = model.requests[0].blocks
    assert block == {
        "type": "mcp.resources",
        "items": [{"uri": "note://1", "name": "one", "mimeType": "text/plain"}],
        "source": "mcp-github",
    }
    told = model.requests[1].messages[-1].data
    assert isinstance(told, ToolData)
    output = told.content[0].result.output
    assert output is not None and from_raw(output, dict) == {"said": "hello world"}
    process = state.process
    await runner.close()
    assert process.returncode == -9
    assert not state.connected


async def test_the_example_without_a_command_or_a_config(
    make: Make, link: FakeLink, example: ExtensionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = of_config(Path(example.entry), {**example.config, "transport": {"type": "stdio"}})
    runner: TurnRunner = make(link, FakeModel(), extensions=[wrong])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None and "MCP stdio transport requires command" in error.message
    without = make(FakeLink(), FakeModel(), extensions=[of_config(Path(example.entry), None)])
    await without.load_extensions()
    assert "MCP Extension: config is missing" in caplog.text
