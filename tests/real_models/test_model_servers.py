"""Whole turns against llama.cpp's server and the proxy of LiteLLM, from their packages (`make test-models`).

llama.cpp has a model of random numbers: it says nonsense, calls no tool and rarely stops by itself. What a turn needs
sense for goes through LiteLLM to a scripted model.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.models.model_providers import BY_NAME
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until
from tests.process.model_servers import SERVERS, seen, server

INSTALLED = os.environ.get("GOONDAN_MODEL_SERVERS")
pytestmark = [
    pytest.mark.skipif(INSTALLED is None, reason="make test-models installs the servers"),
    pytest.mark.timeout(300),
]
FOLDER = Path(INSTALLED or "/nonexistent")
WINDOW = 4096
#: A context in which an answer takes minutes.
LONG_WINDOW = 131_072
KEY = "sk-0123456789abcdef0123456789abcdef"
#: How long a server may take to start (seconds). LiteLLM takes ten on a busy machine.
START_S = 90.0
PROVIDERS = pytest.mark.parametrize("provider", list(BY_NAME))


def base_url(provider: str, root: str) -> str:
    """The endpoint as each provider's bundles write it."""
    return root if provider == "anthropic" else f"{root}/v1"


@contextmanager
def running(model: dict[str, Any], tools: str = "[Tool/bash]") -> Iterator[Sandbox]:
    """A kernel whose agent has this model."""
    bundle = BUNDLE.replace("{provider: embedded}", json.dumps(model)).replace("[Tool/bash]", tools)
    with sandbox(bundle) as kernel:
        kernel.detach()
        yield kernel


def limit(provider: str, tokens: int) -> dict[str, int]:
    """The params for an answer of at most so many tokens."""
    return {"max_output_tokens" if provider == "responses" else "max_tokens": tokens}


@contextmanager
def llama_cpp(folder: Path, window: int) -> Iterator[str]:
    command = [str(FOLDER / "llama-cpp/bin/python"), str(SERVERS / "llama_cpp.py"), str(folder), str(window)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_cpp(tmp_path_factory.mktemp("llama"), WINDOW) as root:
        yield root


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    with server("narrow_llm", str(WINDOW)) as root:
        yield root


@pytest.fixture(scope="module")
def litellm(tmp_path_factory: pytest.TempPathFactory, narrow: str, llama: str) -> Iterator[str]:
    """The proxy in front of a scripted model, one with a small context, and llama.cpp."""
    folder = tmp_path_factory.mktemp("litellm")
    with server("fake_llm") as fake:
        upstreams = {"fake": fake, "narrow": narrow, "random": llama}
        models = [
            {
                "model_name": name,
                "litellm_params": {"model": f"openai/{name}", "api_base": f"{root}/v1", "api_key": "none"},
            }
            for name, root in upstreams.items()
        ]
        config = {
            "model_list": models,
            "general_settings": {"master_key": KEY},
            "litellm_settings": {
                "use_chat_completions_url_for_anthropic_messages": True
            },  # else it needs /v1/responses
        }
        (folder / "config.json").write_text(json.dumps(config))
        environment = {**os.environ, "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        port = free_port()
        command = [str(FOLDER / "litellm/bin/litellm"), "--config", str(folder / "config.json"), "--host", "127.0.0.1"]
        with (folder / "proxy.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port)], stdout=log, stderr=log, env=environment, cwd=folder
            )
            root = f"http://127.0.0.1:{port}"
            try:
                wait_until(lambda: answers(f"{root}/health/liveliness"), START_S, "LiteLLM answers")
                yield root
            finally:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port that nobody listens on now: LiteLLM does not say which one it has taken."""
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@PROVIDERS
def test_an_answer_streams_and_is_cut_off_at_its_limit(llama: str, provider: str) -> None:
    model: dict[str, Any] = {
        "provider": provider,
        "model": "random",
        "endpoint": base_url(provider, llama),
        "params": limit(provider, 24),
    }
    with running(model) as kernel:
        sent = kernel.gdn("send", "hello", "--json")
        assert (sent.status, sent.json["status"], sent.json["cutOff"]) == (3, "completed", True), sent
        assert sent.json["response"]
        (call,) = [step["model"] for step in kernel.gdn("trace", sent.json["turnId"], "--json").json["steps"]]
        assert call["outputTokens"] == 24
        assert 0 < call["inputTokens"] < 4000


@PROVIDERS
@pytest.mark.parametrize("told", ["by the server", "wrongly by the bundle"])
def test_a_conversation_that_is_longer_than_the_context_goes_on(llama: str, provider: str, told: str) -> None:
    model: dict[str, Any] = {
        "provider": provider,
        "model": "random",
        "endpoint": base_url(provider, llama),
        "params": limit(provider, 24),
    }
    if told != "by the server":
        model["contextTokens"] = 1_000_000
    with running(model) as kernel:
        refused, shown = 0, ""
        for number in range(20):
            sent = kernel.gdn("send", f"{number} " + "word " * 80, "--instance", "long", "--json")
            assert sent.json["status"] == "completed", (number, sent.json)
            shown = kernel.gdn("trace", sent.json["turnId"]).out
            refused += shown.count("E_CONTEXT_OVERFLOW")
        assert "messages left out" in shown
        assert refused <= (1 if told == "by the server" else 4)


def test_an_answer_has_the_form_that_was_asked_for(llama: str) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    params = {"response_format": form, "max_tokens": 200}
    model: dict[str, Any] = {"provider": "openai", "model": "random", "endpoint": f"{llama}/v1", "params": params}
    with running(model, tools="[]") as kernel:  # this server takes no form beside tools
        sent = kernel.gdn("send", "which color?", "--json")
        assert (sent.status, sent.json["status"]) == (0, "completed"), sent.out
        assert json.loads(sent.json["response"])["color"] in ("red", "blue")


@PROVIDERS
def test_a_cancelled_answer_frees_the_server(tmp_path: Path, provider: str) -> None:
    with llama_cpp(tmp_path, LONG_WINDOW) as root:
        model: dict[str, Any] = {"provider": provider, "model": "random", "endpoint": base_url(provider, root)}
        model["params"] = limit(provider, LONG_WINDOW - 2000)
        with running(model) as kernel:
            event = kernel.gdn("send", "--no-wait", "go on for ever").out.strip()
            wait_until(lambda: busy(root), what="the server works on the answer")
            assert kernel.gdn("cancel", event).status == 0
            wait_until(lambda: not busy(root), what="the server has given the answer up")


def busy(root: str) -> bool:
    """Whether a slot of llama.cpp's server works."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{root}/slots", timeout=5) as response:
        return any(slot["is_processing"] for slot in json.load(response))


# --- LiteLLM ----------------------------------------------------------------------------------------------------------


@PROVIDERS
def test_a_tool_is_called_through_the_proxy(litellm: str, provider: str) -> None:
    model: dict[str, Any] = {
        "provider": provider,
        "model": "fake",
        "endpoint": base_url(provider, litellm),
        "apiKey": {"value": KEY},
    }
    with running(model) as kernel:
        assert kernel.gdn("send", "hello").out == "echo: hello\n"
        sent = kernel.gdn("send", 'call bash__exec {"command": "echo from the jail"}', "--json")
        assert sent.json["status"] == "completed", sent.json
        assert "from the jail" in sent.json["response"]


# The proxy passes requests of `responses` on as they are, and the scripted model speaks chat completions only.
@pytest.mark.parametrize("provider", [name for name in BY_NAME if name != "responses"])
def test_a_long_conversation_goes_on_through_the_proxy(litellm: str, narrow: str, provider: str) -> None:
    model: dict[str, Any] = {
        "provider": provider,
        "model": "narrow",
        "endpoint": base_url(provider, litellm),
        "apiKey": {"value": KEY},
    }
    before = len(seen(narrow)["refused"])
    with running(model) as kernel:
        for number in range(12):
            text = "run seq 1 20000" if number % 3 == 1 else f"{number} " + "a word and another one, " * 80
            sent = kernel.gdn("send", text, "--instance", "long", "--json")
            assert sent.json["status"] == "completed", (number, sent.json)
    told = seen(narrow)
    assert told["faults"] == []
    assert len(told["refused"]) - before <= 2


@PROVIDERS
def test_llama_cpp_through_the_proxy(litellm: str, provider: str) -> None:
    model: dict[str, Any] = {
        "provider": provider,
        "model": "random",
        "endpoint": base_url(provider, litellm),
        "apiKey": {"value": KEY},
    }
    with running({**model, "params": limit(provider, 24)}) as kernel:
        sent = kernel.gdn("send", "hello", "--json")
        assert (sent.status, sent.json["cutOff"]) == (3, True), sent
