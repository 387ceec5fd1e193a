"""Programs that nobody here wrote, in front of the door: the proxy of LiteLLM, and `llm`, a chat program for terminals.

`make test-models` installs them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.features.serve.process.test_gdn_serve import door
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until
from tests.process.model_servers import server
from tests.real_models.test_model_servers import START_S, answers, free_port

INSTALLED = os.environ.get("GOONDAN_MODEL_SERVERS")
pytestmark = [
    pytest.mark.skipif(INSTALLED is None, reason="make test-models installs the programs"),
    pytest.mark.timeout(300),
]
FOLDER = Path(INSTALLED or "/nonexistent")
TOKEN = "alice-0123456789abcdef"
KEY = "sk-0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with server("gated_llm") as model:
        spec = f'{{provider: openai, model: m, endpoint: "{model}/v1", apiKey: k}}'
        with sandbox(BUNDLE.replace("{provider: embedded}", spec)) as made:
            (made.home / "tokens").write_text(f"alice talk {TOKEN} main\n")
            (made.home / "tokens").chmod(0o600)
            yield made


@pytest.fixture(scope="module")
def base(kernel: Sandbox) -> Iterator[str]:
    with door(kernel, "--token-file", str(kernel.home / "tokens")) as told:
        yield f"http://127.0.0.1:{told['port']}/v1"


@pytest.fixture(scope="module")
def proxy(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of LiteLLM's proxy, which has the agent as its one model."""
    folder = tmp_path_factory.mktemp("litellm")
    upstream = {"model": "openai/main", "api_base": base, "api_key": TOKEN}
    config = {
        "model_list": [{"model_name": "assistant", "litellm_params": upstream}],
        "general_settings": {"master_key": KEY},
    }
    (folder / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    port = free_port()
    command = [str(FOLDER / "litellm/bin/litellm"), "--config", str(folder / "config.json"), "--host", "127.0.0.1"]
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            root = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{root}/health/liveliness"), START_S, "LiteLLM answers")
            with openai.OpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0) as client:
                yield client
        finally:
            process.kill()
            process.wait()


def instances(kernel: Sandbox) -> list[str]:
    """The instances that there are, the newest first."""
    rows = kernel.gdn("instance", "list", "--json").json
    return [row["instanceKey"] for row in rows if row["agent"] == "main"]


def said_in(kernel: Sandbox) -> list[list[str]]:
    """What was said to the agent, by instance."""
    exported = [kernel.gdn("instance", "export", "main", key).json for key in instances(kernel)]
    messages = [[message["data"] for message in one["messages"]] for one in exported]
    return [[data["content"] for data in one if data["role"] == "user"] for one in messages]


def test_a_conversation_through_the_proxy_of_litellm(proxy: openai.OpenAI, kernel: Sandbox) -> None:
    messages: list[ChatCompletionMessageParam] = []
    for text in ("lite one", "lite two"):
        messages.append({"role": "user", "content": text})
        answer = proxy.chat.completions.create(model="assistant", messages=messages, temperature=0.5)
        assert answer.choices[0].message.content == text
        messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": "again 30 three "})
    stream = proxy.chat.completions.create(
        model="assistant", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "three " * 30
    assert any(piece.usage for piece in pieces)
    assert ["lite one", "lite two", "again 30 three "] in said_in(kernel)


def test_the_proxy_passes_errors_on(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="calls no tools of the program"):
        proxy.chat.completions.create(
            model="assistant",
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        )


def test_responses_through_the_proxy(proxy: openai.OpenAI) -> None:
    one = proxy.responses.create(model="assistant", input="lite one")
    assert one.output_text == "lite one"
    with proxy.responses.stream(model="assistant", input="again 3 two ", previous_response_id=one.id) as events:
        assert events.get_final_response().output_text == "two two two "


def test_llm_talks_and_goes_on(base: str, kernel: Sandbox, tmp_path: Path) -> None:
    models = [
        {"model_id": "assistant", "model_name": "main", "api_base": base, "api_key_name": "door", "can_stream": True}
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    (tmp_path / "keys.json").write_text(json.dumps({"door": TOKEN}))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def llm(*words: str) -> str:
        command = [str(FOLDER / "llm/bin/llm"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert llm("-m", "assistant", "-s", "Be brief.", "llm one").endswith("The message:\n\nllm one")  # as it was told
    assert llm("-c", "llm two") == "llm two"
    assert llm("-c", "--no-stream", "again 2 three ") == "three three"
    [said] = [said for said in said_in(kernel) if said[0].endswith("llm one")]
    assert said[1:] == ["llm two", "again 2 three "]
