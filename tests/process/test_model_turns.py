"""Whole turns with real providers: `gdn run` and `gdn send` against model servers on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from sqlite3 import connect

import pytest

from tests.kernel_fixture import Sandbox, sandbox
from tests.process.model_servers import KEY, endpoint, seen, server

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: real}
spec:
  provider: PROVIDER
  model: MODEL
  endpoint: ENDPOINT
  apiKey: {valueFrom: {env: MY_KEY}}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/real}
  prompt: {system: Be brief.}
  tools: [Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""
BOTH = pytest.mark.parametrize("provider", ["anthropic", "openai"])


def swarm(provider: str, base: str, model: str = "m") -> str:
    text = BUNDLE.replace("PROVIDER", provider).replace("MODEL", json.dumps(model))
    return text.replace("ENDPOINT", endpoint(provider, base))


def assert_nothing_holds_the_key(kernel: Sandbox) -> None:
    """Neither a log nor a state file; the bundle names only a variable."""
    for path in kernel.home.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with server("fake_llm") as base:
        yield base


@pytest.fixture(scope="module")
def bad() -> Iterator[str]:
    with server("misbehaving_llm") as base:
        yield base


def output(response: str) -> str:
    """What the command printed, out of "done: <result>"."""
    return str(json.loads(response.removeprefix("done: "))["stdout"])


@BOTH
def test_a_model_calls_a_tool_in_its_jail_and_the_text_comes_back(fake: str, provider: str) -> None:
    with sandbox(swarm(provider, fake), {"MY_KEY": KEY}) as kernel:
        lines = [
            'call bash__exec {"command":"id -u; ls /"}',
            'callN 3 bash__exec {"command":"echo 가"}',
            'steps 2 bash__exec {"command":"ls /home 2>&1 | head -1"}',
            "안녕",
        ]
        result = kernel.gdn("run", input="\n".join(lines) + "\n")
        assert (result.status, result.err) == (0, "")
        first, second, third, last = result.out.splitlines()
        uid, *folders = output(first).splitlines()
        assert uid.isdigit()
        assert "usr" in folders and "sys" not in folders, "that is no jail"
        assert output(second) == "가\n"
        assert "No such file" in output(third) or output(third) == ""
        assert last == "echo: 안녕"
        kernel.detach()
        sent = kernel.gdn("send", lines[0], "--json")
        assert sent.json["status"] == "completed"
        assert output(sent.json["response"]).splitlines() == [uid, *folders]
        assert kernel.gdn("stop").status == 0
        assert_nothing_holds_the_key(kernel)
        if provider == "anthropic":
            assert "wallMs" not in result.out, "the model gives back what it was shown, and receipts are for operators"
            (call,) = kernel.gdn("trace", sent.json["turnId"], "--json").json["steps"][0]["tools"]
            assert call["receipt"]["jail"]["tier"] in ("full", "reduced")
            assert call["receipt"]["call"]["wallMs"] > 0
            (database,) = kernel.home.glob("state/workspaces/*/instances/main/default/conversation.db")
            with closing(connect(database)) as db:
                (detail,) = db.execute("SELECT detail FROM runtime_events WHERE type = 'model.answered'").fetchone()
            tokens = {"inputTokens": 10, "outputTokens": 5}
            assert json.loads(detail) == {"step": 1, "model": "anthropic/m", "finishReason": "tool_use", **tokens}


@pytest.mark.parametrize(
    ("provider", "model", "told"),
    [
        ("anthropic", "broken-args", ["Invalid arguments for tool 'bash__exec': args: they are no JSON"]),
        ("openai", "list-args", ["Invalid arguments for tool 'bash__exec': args: they are no JSON object"]),
        ("openai", "unknown-tool", ["Tool 'no.such' is not available in the current Tool Catalog."]),
        ("anthropic", "same-id", ['"stdout":"1\\n"', '"stdout":"2\\n"']),
    ],
)
def test_calls_that_are_wrong_are_answered_and_the_step_goes_on(
    bad: str, provider: str, model: str, told: list[str]
) -> None:
    with sandbox(swarm(provider, bad, model), {"MY_KEY": KEY}) as kernel:
        result = kernel.gdn("run", input="go\n")
        assert (result.status, result.err) == (0, "")
        answers = result.out.removeprefix("told: ").split(" | ")
        assert len(answers) == len(told)
        for answer, words in zip(answers, told, strict=True):
            assert words in answer


@BOTH
def test_a_failed_model_fails_the_turn_and_the_agent_takes_the_next(bad: str, provider: str) -> None:
    """Refused once for good, then well: one process, one history."""
    with sandbox(swarm(provider, bad, "401:1"), {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        refused = kernel.gdn("send", "one", "--json")
        assert refused.status == 1
        assert (refused.json["status"], refused.json["error"]["code"]) == ("failed", "E_MODEL_FAILED")
        assert "401 that is a 401" in refused.json["error"]["message"]
        assert "apiKey" in refused.json["error"]["suggestion"]
        assert KEY not in refused.out
        agent = kernel.pid("agent")
        answered = kernel.gdn("send", "two", "--json")
        assert (answered.json["status"], answered.json["response"]) == ("completed", "fine")
        assert kernel.pid("agent") == agent
        request = seen(bad)["requests"][-1]["body"]
        texts = [item["content"] for item in request["messages"] if item["role"] == "user"]
        assert "one" in str(texts) and "two" in str(texts)
        assert_nothing_holds_the_key(kernel)


def test_a_turn_that_is_cut_off_ends_its_model_call(bad: str) -> None:
    with sandbox(swarm("openai", bad, "stall"), {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        gone = seen(bad)["gone"].count("stall")
        result = kernel.gdn("send", "go", "--timeout", "1", "--json")
        assert result.status == 1
        assert result.json["error"]["code"] == "E_AGENT_TIMEOUT"
        assert kernel.gdn("stop").status == 0
        assert seen(bad)["gone"].count("stall") == gone + 1


def test_without_the_key_the_bundle_is_refused_and_auto_takes_the_environments(fake: str) -> None:
    with sandbox(swarm("anthropic", fake)) as kernel:
        result = kernel.gdn("run", "--json", input="go\n")
        assert result.status == 2
        assert "E_CONFIG_MISSING_ENV" in result.out
        auto = [
            line for line in swarm("auto", fake).splitlines() if line.split(":")[0] not in ("  endpoint", "  apiKey")
        ]
        kernel.bundle.write_text("\n".join(auto))
        kernel.env |= {"OPENAI_BASE_URL": f"{fake}/v1", "OPENAI_API_KEY": KEY}
        assert kernel.gdn("run", input="go\n").out == "echo: go\n"
