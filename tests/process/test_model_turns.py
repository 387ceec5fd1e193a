"""Whole turns with real providers against model servers on loopback: tools, files, answers of a form, and failures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from sqlite3 import connect

import pytest

from goondan.schemas.bundle.address import blobs_dir, instance_dir
from tests.kernel_fixture import Sandbox, sandbox, wait_until
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
  tools: [Tool/bash, Tool/file-system]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""
OUTPUT = """\
  output:
    schema:
      type: object
      properties: {city: {type: string}, degrees: {type: number}}
      required: [city, degrees]
      additionalProperties: false
"""
SEOUL = {"city": "서울", "degrees": 21.5}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9 + b"!"
PDF = b"%PDF-1.7\n" + b"page " * 300
BOTH = pytest.mark.parametrize("provider", ["anthropic", "openai"])
ALL = pytest.mark.parametrize("provider", ["anthropic", "openai", "responses"])


def swarm(provider: str, base: str, model: str = "m") -> str:
    text = BUNDLE.replace("PROVIDER", provider).replace("MODEL", json.dumps(model))
    return text.replace("ENDPOINT", endpoint(provider, base))


def assert_nothing_holds_the_key(kernel: Sandbox) -> None:
    """Neither a log nor a state file; the bundle names only a variable."""
    for path in kernel.home.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


def running(base: str, agents: dict[str, tuple[str, str, str]]) -> Iterator[Sandbox]:
    """A kernel with these agents, each with a model of its own: by name its provider, its model, and more fields."""
    documents = []
    for agent, (provider, model, more) in agents.items():
        declared = swarm(provider, base, model).partition("---\napiVersion: goondan.ai/v1\nkind: Swarm")[0] + more
        declared = declared.replace("name: real", f"name: {agent}").replace("Model/real", f"Model/{agent}")
        documents.append(declared.replace("name: main", f"name: {agent}"))
    refs = ", ".join(f"{{ref: Agent/{agent}}}" for agent in agents)
    whole = "apiVersion: goondan.ai/v1\nkind: Swarm\nmetadata: {name: swarm}\n"
    whole += f"spec: {{entryAgent: Agent/{next(iter(agents))}, agents: [{refs}]}}\n"
    with sandbox("---\n".join([*documents, whole]), {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        yield kernel


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with server("fake_llm") as base:
        yield base


@pytest.fixture(scope="module")
def told(fake: str) -> Iterator[Sandbox]:
    """A kernel whose models do what they are told, in the ways of all vendors; each test has instances of its own."""
    agents = {provider: (provider, "m", "") for provider in ("anthropic", "openai", "responses")}
    for provider, via in product(tuple(agents), ("auto", "tool")):
        agents[f"{provider}-{via}"] = (provider, "m", f"{OUTPUT}    via: {via}\n")
    yield from running(fake, {**agents, "blind": ("openai", "blind", "")})


@pytest.fixture(scope="module")
def bad() -> Iterator[str]:
    with server("misbehaving_llm") as base:
        yield base


def output(response: str) -> str:
    """What the command printed, out of "done: <result>"."""
    return str(json.loads(response.removeprefix("done: "))["stdout"])


@ALL
def test_a_model_calls_a_tool_in_its_jail_and_the_text_comes_back(told: Sandbox, provider: str) -> None:
    lines = [
        'call bash__exec {"command":"id -u; ls /"}',
        'callN 3 bash__exec {"command":"echo 가"}',
        f'steps 2 bash__exec {{"command":"ls {told.home}/goondan.yaml 2>/dev/null | wc -l"}}',
        "안녕",
    ]
    first, second, third, last = (told.gdn("send", provider, line, "--instance", "talk").out.strip() for line in lines)
    uid, *folders = output(first).splitlines()
    assert uid.isdigit()
    assert "usr" in folders and "sys" not in folders, "that is no jail"
    assert output(second) == "가\n"
    assert output(third) == "0\n"
    assert last == "echo: 안녕"
    sent = told.gdn("send", provider, lines[0], "--json")
    assert sent.json["status"] == "completed"
    assert output(sent.json["response"]).splitlines() == [uid, *folders]
    cut = told.gdn("send", provider, "cut think hello")
    assert (cut.status, cut.out) == (3, "echo: hello | thoughts: 0\n")
    assert "the answer was cut off at the model's limit of tokens" in cut.err
    assert "They say" not in cut.err
    shown = told.gdn("send", provider, "cut think hello", "--reasoning", "--json")
    assert (shown.status, shown.json["status"], shown.json["cutOff"]) == (3, "completed", True)
    assert shown.json["reasoning"] == "They say: hello"
    asked = told.gdn("send", provider, 'think call bash__exec {"command":"echo 1"}', "--reasoning")
    assert (asked.status, asked.out.partition("|")[2]) == (0, " thoughts: 1\n")
    assert asked.err == 'They say: call bash__exec {"command":"echo 1"}\n'
    assert_nothing_holds_the_key(told)
    if provider == "anthropic":
        assert "wallMs" not in first + second + third, (
            "the model gives back what it was shown, and receipts are for operators"
        )
        (call,) = told.gdn("trace", sent.json["turnId"], "--json").json["steps"][0]["tools"]
        assert call["receipt"]["jail"]["tier"] in ("full", "reduced")
        assert call["receipt"]["call"]["wallMs"] > 0
        (database,) = told.home.glob("state/workspaces/*/instances/anthropic/default/conversation.db")
        with closing(connect(database)) as db:
            (detail,) = db.execute("SELECT detail FROM runtime_events WHERE type = 'model.answered'").fetchone()
        tokens = {"inputTokens": 10, "outputTokens": 5}
        assert json.loads(detail) == {"step": 1, "model": "anthropic/m", "finishReason": "tool_use", **tokens}


@pytest.fixture(scope="module")
def misled(bad: str) -> Iterator[Sandbox]:
    """A kernel whose models do something wrong; each test talks to agents of its own."""
    alive = "  policy: {stallTimeoutS: 1}\n"
    wrong = {
        "broken-args": ("anthropic", "broken-args", ""),
        "list-args": ("openai", "list-args", ""),
        "unknown-tool": ("openai", "unknown-tool", ""),
        "same-id": ("anthropic", "same-id", ""),
        "once-anthropic": ("anthropic", "401:1", ""),
        "once-openai": ("openai", "401:1", ""),
        "stall": ("openai", "stall", ""),
        "alive-anthropic": ("anthropic", "keepalive:1", alive),
        "alive-openai": ("openai", "keepalive:1", alive),
        "small": ("openai", "well", "  policy: {conversationMb: 16}\n"),
    }
    yield from running(bad, wrong)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("broken-args", ["Invalid arguments for tool 'bash__exec': args: they are no JSON"]),
        ("list-args", ["Invalid arguments for tool 'bash__exec': args: they are no JSON object"]),
        ("unknown-tool", ["Tool 'no.such' is not available in the current Tool Catalog."]),
        ("same-id", ['"stdout":"1\\n"', '"stdout":"2\\n"']),
    ],
)
def test_calls_that_are_wrong_are_answered_and_the_step_goes_on(misled: Sandbox, agent: str, words: list[str]) -> None:
    result = misled.gdn("send", agent, "go")
    assert (result.status, result.err) == (0, "")
    answers = result.out.removeprefix("told: ").split(" | ")
    assert len(answers) == len(words)
    assert all(word in answer for word, answer in zip(words, answers, strict=True)), answers


@pytest.mark.feature("dead_letters")
@BOTH
def test_a_failed_model_fails_the_turn_and_the_agent_takes_the_next(misled: Sandbox, bad: str, provider: str) -> None:
    """Refused once for good, then well: one process, one history."""
    agent = f"once-{provider}"

    def pid() -> int:
        return int(next(row["pid"] for row in misled.ps() if (row["role"], row["name"]) == ("agent", agent)))

    refused = misled.gdn("send", agent, "one", "--json")
    assert refused.status == 1
    assert (refused.json["status"], refused.json["error"]["code"]) == ("failed", "E_MODEL_FAILED")
    assert "401 that is a 401" in refused.json["error"]["message"]
    assert "apiKey" in refused.json["error"]["suggestion"]
    assert KEY not in refused.out
    before = pid()
    answered = misled.gdn("send", agent, "two", "--json")
    assert (answered.json["status"], answered.json["response"]) == ("completed", "fine")
    first = refused.json["eventId"]
    listed = misled.gdn("dead", "list", "--json")
    assert KEY not in listed.out
    (letter,) = [row for row in listed.json["events"] if row["eventId"] == first]
    assert letter["cause"].startswith("E_MODEL_FAILED: ")
    again = misled.gdn("dead", "requeue", first, "--json").json["newEventId"]
    ended = lambda: misled.gdn("trace", again, "--json").json.get("status") == "completed"
    wait_until(ended, what="the answer to the message that was kept")
    assert pid() == before
    request = seen(bad)["requests"][-1]["body"]
    texts = [item["content"] for item in request["messages"] if item["role"] == "user"]
    assert "one" in str(texts) and "two" in str(texts)
    assert_nothing_holds_the_key(misled)


@BOTH
def test_a_server_that_only_keeps_the_connection_alive_does_not_hold_a_turn(misled: Sandbox, provider: str) -> None:
    agent = f"alive-{provider}"
    stalled = misled.gdn("send", agent, "go", "--timeout", "30", "--json")
    assert stalled.status == 1
    error = stalled.json["error"]
    assert error["code"] == "E_TURN_STALLED"
    assert f"the model {provider}/keepalive:1, which has sent no content since 20" in error["message"]
    sent = misled.gdn("send", agent, "again", "--timeout", "30", "--json")
    assert (sent.status, sent.json["response"]) == (0, "fine")


def test_a_message_beyond_the_conversations_size_is_refused_and_the_next_one_answered(misled: Sandbox) -> None:
    refused = misled.gdn("send", "small", "-", "--json", input="x" * (5 << 20))
    assert refused.status == 1
    error = refused.json["error"]
    assert error["code"] == "E_STORE_FULL"
    assert "limit 16 MiB" in error["message"]
    assert "policy.conversationMb" in error["suggestion"]
    sent = misled.gdn("send", "small", "again", "--json")
    assert (sent.status, sent.json["response"]) == (0, "fine")
    (folder,) = misled.home.glob("state/workspaces/*/instances/small/default")
    assert sum(path.stat().st_size for path in folder.glob("conversation.db*")) < 16 << 20


def test_a_turn_that_is_cut_off_ends_its_model_call(misled: Sandbox, bad: str) -> None:
    gone = seen(bad)["gone"].count("stall")
    result = misled.gdn("send", "stall", "go", "--timeout", "1", "--json")
    assert result.status == 1
    assert result.json["error"]["code"] == "E_AGENT_TIMEOUT"
    wait_until(lambda: seen(bad)["gone"].count("stall") == gone + 1, what="the model's server to be left alone")


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


# --- pictures and PDFs, from a message and from tools


def described(media_type: str, content: bytes) -> str:
    return f"{media_type} {len(content)} {hashlib.sha256(content).hexdigest()[:8]}"


@ALL
def test_a_model_gets_the_files_of_a_message_and_those_that_a_tool_returns(
    told: Sandbox, provider: str, tmp_path: Path
) -> None:
    (tmp_path / "cat.txt").write_bytes(PNG)  # what it is says the content
    (tmp_path / "paper.pdf").write_bytes(PDF)
    both = ("--attach", str(tmp_path / "cat.txt"), "--attach", str(tmp_path / "paper.pdf"))
    sent = told.gdn("send", provider, "look", "--instance", "eye", *both)
    known = [described("image/png", PNG), described("application/pdf", PDF)]
    assert sent.out.strip() == f"echo: look [files: {', '.join(known)}]"
    (state,) = told.state_dirs
    assert len(os.listdir(Path(instance_dir(str(state), provider, "eye"), "files"))) == 2
    wait_until(lambda: not any(os.listdir(blobs_dir(str(state)))))

    again = told.gdn("send", provider, "again", "--instance", "eye")  # they are part of the conversation
    assert again.out.strip() == f"echo: again [files: {', '.join(known)}]"

    work = tmp_path / "work"
    work.mkdir()
    (work / "dog.png").write_bytes(PNG + b"dog")
    read = 'call file-system__read {"path":"dog.png"}'
    told.gdn("send", provider, read, "--instance", "tool", "--workdir", str(work))
    seen = told.gdn("send", provider, "and?", "--instance", "tool").out.strip()
    assert seen == f"echo: and? [files: {described('image/png', PNG + b'dog')}]"


def test_a_model_that_cannot_see_fails_one_turn_and_the_conversation_goes_on(told: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    refused = told.gdn("send", "blind", "look", "--attach", str(tmp_path / "cat.png"), "--json")
    assert refused.status == 1
    assert json.loads(refused.out)["error"]["code"] == "E_MODEL_CANNOT_SEE"
    assert told.gdn("send", "blind", "hi").out.strip() == "echo: hi"
    (tmp_path / "cat.bmp").write_bytes(b"BM" + PNG)
    for wrong in ("cat.bmp", "gone.png"):
        said = told.gdn("send", "blind", "look", "--attach", str(tmp_path / wrong))
        assert said.status != 0
        assert wrong in said.err


# --- answers of a form, in the vendors' ways and by the tool `answer`


@ALL
@pytest.mark.parametrize("via", ["auto", "tool"])
def test_an_answer_fits_its_schema_or_is_asked_for_again_once(told: Sandbox, provider: str, via: str) -> None:
    agent, value = f"{provider}-{via}", json.dumps(SEOUL)
    first = told.gdn("send", agent, f"form {value}", "--json").json
    assert (first["object"], json.loads(first["response"])) == (SEOUL, SEOUL)
    mended = told.gdn("send", agent, f"misform {value}", "--json").json
    assert mended["object"] == SEOUL
    assert mended["usage"]["modelCalls"] == 2
    failed = told.gdn("send", agent, 'form {"city": 1}', "--json").json
    assert failed["error"]["code"] == "E_OUTPUT_INVALID"
    assert "answer.degrees: required property is missing" in failed["error"]["message"]
    assert "object" not in failed
    assert json.loads(told.gdn("send", agent, f"form {value}").out) == SEOUL
