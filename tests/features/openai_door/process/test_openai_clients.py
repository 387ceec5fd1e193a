"""The packages of OpenAI, for Python and Node, against the door of a real kernel."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests import npm_fixture
from tests.features.serve.process.test_gdn_serve import door
from tests.javascript_runtimes import runtime
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until
from tests.process.model_servers import server

SOURCES = Path(__file__).parents[3] / "servers" / "openai"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FORM: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOKENS = """\
alice talk alice-0123456789abcdef main clerk
bob   talk bob-0123456789abcdef   main
eve   look eve-0123456789abcdef   *
"""


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with server("gated_llm") as url:
        yield url


@pytest.fixture(scope="module")
def kernel(model: str) -> Iterator[Sandbox]:
    spec = f'{{provider: openai, model: m, endpoint: "{model}/v1", apiKey: k}}'
    clerk = {"modelConfig": {"modelRef": "Model/console"}, "output": {"schema": FORM}}
    agent = {"apiVersion": "goondan.ai/v1", "kind": "Agent", "metadata": {"name": "clerk"}, "spec": clerk}
    bundle = BUNDLE.replace("{provider: embedded}", spec).replace(
        "agents: [{ref: Agent/main}]", "agents: [{ref: Agent/main}, {ref: Agent/clerk}]"
    )
    with sandbox(f"{bundle}---\n{json.dumps(agent)}\n") as made:
        (made.home / "tokens").write_text(TOKENS)
        (made.home / "tokens").chmod(0o600)
        yield made


@pytest.fixture(scope="module")
def base(kernel: Sandbox) -> Iterator[str]:
    with door(kernel, "--token-file", str(kernel.home / "tokens")) as told:
        yield f"http://127.0.0.1:{told['port']}/v1"


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base, api_key="alice-0123456789abcdef", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def bob(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base, api_key="bob-0123456789abcdef", max_retries=0) as made:
        yield made


def go(model: str) -> None:
    """Let the model go on."""
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{model}/__go").close()


def messages_of(kernel: Sandbox, instance: str) -> list[Any]:
    """The messages of an instance of `main`, as `gdn instance export` has them."""
    return [message["data"] for message in kernel.gdn("instance", "export", "main", instance).json["messages"]]


def test_a_chat_that_goes_on(client: openai.OpenAI, kernel: Sandbox) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Be brief."}]
    instances = set()
    for text in ("one", "two", "three"):
        messages.append({"role": "user", "content": text})
        raw = client.chat.completions.with_raw_response.create(
            model="main", messages=messages, temperature=0.2, max_tokens=100, seed=7
        )
        instances.add(raw.headers["x-goondan-instance"])
        answer = raw.parse()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        messages.append({"role": "assistant", "content": f" {answer.choices[0].message.content}\n"})
    assert messages[-1]["content"] == " three\n"
    [instance] = instances
    said = messages_of(kernel, instance)
    assert [message["role"] for message in said] == ["user", "assistant"] * 3
    assert said[2]["content"] == "two"


def test_the_helpers_of_streams(client: openai.OpenAI, model: str) -> None:
    text = 'think Hm.|wait|I look. |call bash__exec {"command": "echo hi"}|again 20 so it is '
    with client.chat.completions.stream(
        model="main", messages=[{"role": "user", "content": text}], stream_options={"include_usage": True}
    ) as stream:
        pieces = []
        for event in stream:
            if event.type == "content.delta":
                pieces.append(event.delta)
            elif event.type == "chunk" and "reasoning_content" in event.chunk.to_json():
                go(model)
        whole = stream.get_final_completion()
    content = whole.choices[0].message.content
    assert content == "I look. \n\n" + "so it is " * 20
    assert "".join(pieces) == content
    assert whole.usage is not None
    assert (whole.choices[0].message.model_extra or {})["reasoning_content"] == "Hm."
    with client.responses.stream(model="main", input=text) as events:
        go(model)
        deltas = [told.delta for told in events if told.type == "response.output_text.delta"]
        response = events.get_final_response()
    assert response.status == "completed"
    assert response.output_text == "".join(deltas) == content
    assert client.responses.retrieve(response.id).output_text == "so it is " * 20


def test_responses_follow_each_other(client: openai.OpenAI, bob: openai.OpenAI, kernel: Sandbox) -> None:
    one = client.responses.create(model="main", input="one")
    raw = client.responses.with_raw_response.create(model="main", input="two", previous_response_id=one.id)
    two = raw.parse()
    assert (two.output_text, two.previous_response_id) == ("two", one.id)
    said = messages_of(kernel, raw.headers["x-goondan-instance"])
    assert [message["content"] for message in said if message["role"] == "user"] == ["one", "two"]
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(one.id)
    with pytest.raises(openai.BadRequestError):
        bob.responses.create(model="main", input="mine", previous_response_id=one.id)
    client.responses.delete(one.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(one.id)


def test_a_response_in_the_background_outlives_its_door(
    client: openai.OpenAI, kernel: Sandbox, model: str, base: str
) -> None:
    with door(kernel, "--token-file", str(kernel.home / "tokens")) as told:
        first = client.with_options(base_url=f"http://127.0.0.1:{told['port']}/v1")
        begun = first.responses.create(model="main", input="one|wait|two", background=True)
    assert client.responses.retrieve(begun.id).status == "in_progress"
    go(model)
    assert wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == "onetwo"


def test_a_picture_reaches_the_model(client: openai.OpenAI, kernel: Sandbox) -> None:
    url = f"data:image/png;base64,{PNG}"
    raw = client.chat.completions.with_raw_response.create(
        model="main",
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "this"}, {"type": "image_url", "image_url": {"url": url}}],
            }
        ],
    )
    [asked, _] = messages_of(kernel, raw.headers["x-goondan-instance"])
    assert [file["mediaType"] for file in asked["files"]] == ["image/png"]


def test_a_client_that_leaves_cancels_its_turn(client: openai.OpenAI, kernel: Sandbox) -> None:
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "so far|wait"}]
    create = client.with_options(timeout=1.5).chat.completions.create
    for stream in (True, False):
        instance = f"left-{stream}"
        named = {"x-goondan-instance": instance}
        with pytest.raises(openai.APITimeoutError):
            list(create(model="main", messages=asked, stream=stream, extra_headers=named))
        wait_until(lambda instance=instance: "E_CANCELLED" in kernel.gdn("trace", "--instance", instance).out)


def test_in_the_background_and_cancelled(client: openai.OpenAI, model: str) -> None:
    begun = client.responses.create(model="main", input="so far|wait|and on", background=True)
    assert begun.status == "in_progress"
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    begun = client.responses.create(model="main", input="one|two", background=True)
    assert wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == "onetwo"


def test_errors_are_those_of_the_package(client: openai.OpenAI, bob: openai.OpenAI, base: str) -> None:
    hello: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError) as no_model:
        client.chat.completions.create(model="gpt-5", messages=hello)
    assert (no_model.value.code, no_model.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as not_his:
        bob.chat.completions.create(model="clerk", messages=hello)
    assert not_his.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="calls no tools of the program"):
        client.chat.completions.create(
            model="main", messages=hello, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError) as form:
        client.chat.completions.create(model="main", messages=hello, response_format={"type": "json_object"})
    assert form.value.param == "response_format"
    with pytest.raises(openai.NotFoundError, match="nothing is served"):
        client.embeddings.create(model="main", input="hello")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="main", messages=hello, extra_headers={"x-goondan-instance": "a" * 5000})
    for key, status in (("eve-0123456789abcdef", 403), ("nobody-0123456789", 401)):
        with openai.OpenAI(base_url=base, api_key=key, max_retries=0) as other:
            with pytest.raises(openai.APIStatusError) as refused:
                other.chat.completions.create(model="main", messages=hello)
            assert refused.value.status_code == status
            assert refused.value.body["message"]  # type: ignore[index] # the error in OpenAI's form


def test_models_and_the_form_of_an_agent(client: openai.OpenAI, bob: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == ["clerk", "main"]
    assert [model.id for model in bob.models.list()] == ["main"]
    answer = client.chat.completions.create(
        model="clerk",
        messages=[{"role": "user", "content": '{"city": "Seoul"}'}],
        response_format={"type": "json_schema", "json_schema": {"name": "where", "schema": FORM}},
    )
    assert json.loads(answer.choices[0].message.content or "") == {"city": "Seoul"}


def test_it_goes_on_over_a_restart_of_the_door(kernel: Sandbox, base: str) -> None:
    messages: list[ChatCompletionMessageParam] = []
    instances = set()
    key = "bob-0123456789abcdef"
    for text in ("one", "two"):
        with door(kernel, "--token-file", str(kernel.home / "tokens")) as told:
            url = f"http://127.0.0.1:{told['port']}/v1"
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                messages.append({"role": "user", "content": text})
                raw = client.chat.completions.with_raw_response.create(model="main", messages=messages)
                instances.add(raw.headers["x-goondan-instance"])
                messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
    assert len(instances) == 1
    [state] = kernel.state_dirs
    with sqlite3.connect(state / "openai-door.db") as db:
        assert key not in "\n".join(db.iterdump())
    db.close()


def test_the_package_of_node(base: str) -> None:
    program = npm_fixture.beside(npm_fixture.installed(SOURCES), SOURCES / "client.mjs")
    command = [runtime("node"), str(program), base, "alice-0123456789abcdef"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("usage")["total_tokens"] >= 0
    assert told.pop("instance")
    del told["same"]
    assert sorted(told.pop("models")) == ["clerk", "main"]
    assert told == {
        "whole": "one",
        "streamed": "two two two ",
        "pieces": "two two two ",
        "response": "three",
        "deltas": "four four ",
        "final": ["completed", ["message"], True],
        "kept": "four four ",
        "deleted": ["NotFoundError", 404, "response_not_found", "response_id"],
        "model": ["NotFoundError", 404, "model_not_found", "model"],
        "tools": ["BadRequestError", 400, "unsupported_parameter", "tools"],
    }
