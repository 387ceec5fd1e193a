"""`gdn record` and `gdn replay` with real kernels: the example, and a swarm whose model is on loopback."""

from __future__ import annotations

from base64 import b64encode

from tests.kernel_fixture import ROOT, sandbox
from tests.process.scripted_model import scripted_model

EXAMPLE = ROOT / "examples" / "recorded"
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: first}
spec: {provider: openai, model: first, endpoint: "BASE", apiKey: {valueFrom: {env: MODEL_KEY}}}
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: second}
spec: {provider: openai, model: second, endpoint: "BASE", apiKey: {valueFrom: {env: MODEL_KEY}}}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: lead}
spec:
  modelConfig: {modelRef: Model/first}
  prompt: {system: Lead.}
  tools: [Tool/bash, Tool/agents]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: worker}
spec:
  modelConfig: {modelRef: Model/first}
  tools: [Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/lead, agents: [{ref: Agent/lead}, {ref: Agent/worker}]}
"""
SECRETS = {"MODEL_KEY": "key-of-the-model-1", "SHOP_TOKEN": "token-of-the-shop-2"}
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
ASKED = {"target": "worker", "input": "touch it", "instanceKey": "w1"}


def test_the_example_is_repeated_without_a_model_and_without_a_key() -> None:
    with sandbox() as kernel:
        result = kernel.gdn("replay", "--bundle", str(EXAMPLE), str(EXAMPLE / "refund.jsonl"), "--json")
        assert (result.status, result.json) == (
            0,
            {"same": True, "turns": 4, "requests": 8, "calls": 4, "difference": None},
        )
        for wrong in (
            ("record", str(EXAMPLE / "refund.jsonl"), "hi"),
            ("replay", "missing"),
            ("replay", "x", "--calls"),
        ):
            assert kernel.gdn(*wrong).status == 2, wrong
        assert kernel.state_dirs == [] or not list(kernel.state_dirs[0].glob("instances/*")), (
            "it leaves no conversation"
        )


def test_a_run_is_recorded_without_secrets_and_another_model_is_asked_without_running_a_tool() -> None:
    with scripted_model() as model, sandbox("", SECRETS) as kernel:
        kernel.bundle.write_text(BUNDLE.replace("BASE", model.base))
        model.scripts["go"] = [
            [("c1", "bash__exec", {"command": f"pwd; echo {SECRETS['SHOP_TOKEN']}; date -Is"})],
            [("c2", "agents__request", ASKED)],
            f"done with {SECRETS['SHOP_TOKEN']}",
        ]
        model.scripts["touch it"] = [[("c1", "bash__exec", {"command": "touch made"})], "touched"]
        (kernel.home / "a.png").write_bytes(PICTURE)
        result = kernel.gdn("record", "run.jsonl", "go", "--attach", "a.png", "--json")
        assert (result.status, result.json["turns"], result.json["requests"], result.json["calls"]) == (0, 2, 5, 3)
        assert result.json["warnings"] == []
        text = (kernel.home / "run.jsonl").read_text()
        for secret in (*SECRETS.values(), str(kernel.home), str(kernel.env["GOONDAN_STATE_ROOT"]), "recorded-"):
            assert secret not in text
        assert list(kernel.state_dirs[0].rglob("recording-*")) == [], "what agents have written down is gone"

        # At another model: the lead says the same, the worker calls something else.
        asked = sum(map(len, model.requests.values()))
        model.scripts["touch it"] = [[("x", "bash__exec", {"command": "touch other"})], "touched"]
        result = kernel.gdn("replay", "run.jsonl", "--model", "Model/second", "--calls", "--json")
        difference = result.json["difference"]
        assert (result.status, difference["agent"], difference["instance"]) == (1, "worker", "w1")
        assert (difference["step"], difference["what"]) == (1, "the model's answer")
        assert difference["came"] == '→ bash__exec {"command": "touch other"}'
        bodies = [body for bodies in model.requests.values() for body in bodies]
        assert asked + 3 <= len(bodies) and [body["model"] for body in bodies[:2]] == ["first", "first"]
        assert {body["model"] for body in model.requests["touch it"]} == {"first", "second"}
        pictures = [body["messages"][1]["content"][1]["image_url"]["url"] for body in model.requests["go"]]
        assert len(pictures) >= 4 and set(pictures) == {f"data:image/png;base64,{b64encode(PICTURE).decode()}"}
        assert "\n***\n" in model.results("go")["c1"]["stdout"], "from the recording: bash has not run again"
