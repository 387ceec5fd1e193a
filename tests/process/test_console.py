"""The console of `gdn run`: its commands never reach the model, and it says which conversation goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox
from tests.process.scripted_model import ScriptedModel, scripted_model
from tests.process.terminal import Terminal


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with scripted_model() as made:
        made.otherwise = "fine"
        yield made


@pytest.fixture(scope="module")
def kernel(model: ScriptedModel) -> Iterator[Sandbox]:
    """A swarm that runs, whose model is the scripted one. Each test talks in instances of its own."""
    spec = f'{{provider: openai, model: m, endpoint: "{model.base}", apiKey: k}}'
    with sandbox(BUNDLE.replace("{provider: embedded}", spec), {"GOONDAN_TRUST": "1"}) as made:
        made.detach()
        yield made


@pytest.mark.feature("edits")
def test_commands_never_reach_the_model_and_every_other_line_does(kernel: Sandbox, model: ScriptedModel) -> None:
    lines = [
        "/help",
        "hello",
        "/etc/hosts is what?",
        "/history",
        "/undo",
        "/history 5",
        "/undo 3",
        "/new side",
        "other",
    ]
    talked = kernel.gdn("run", input="\n".join([*lines, "/tools", "/model", "/tokens"]) + "\n")
    assert talked.status == 1, "one line was wrong"
    assert list(model.requests) == ["hello", "/etc/hosts is what?", "other"]
    out = talked.out
    assert "These lines never reach the model:" in out
    assert "embedded" not in out
    before, after = out.split("took back '/etc/hosts is what?' (2 messages); 2 messages left\n")
    assert before.endswith("user       /etc/hosts is what?\nassistant  fine\n")
    assert after.startswith("user       hello\nassistant  fine\nmain/side begins; /new side comes back to it\nfine\n")
    assert "tools:\n  bash__exec  " in after
    assert f"main talks to openai, m at {model.base}" in after
    assert "main/side: 2 messages; tokens: " in after
    assert "/undo takes nothing [E_USAGE]" in talked.err

    again = kernel.gdn("run", "--instance", "side", input="again\n")
    assert "main/side goes on: 2 messages since 2" in again.err
    assert [message["content"] for message in model.requests["again"][0]["messages"][-3:]] == ["other", "fine", "again"]
    fresh = kernel.gdn("run", "--new", "--json", input="anew\n/history\n")
    assert [answer["response"] for answer in fresh.json["answers"]] == ["fine", "user       anew\nassistant  fine"]
    assert fresh.err == ""
    assert kernel.gdn("run", "--new", "--instance", "k").status == 2


def test_a_picture_goes_with_the_next_message_and_with_no_other(kernel: Sandbox, model: ScriptedModel) -> None:
    (kernel.home / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    talked = kernel.gdn(
        "run", "--instance", "shown", input="/attach a.png\nlook\nthen\n/attach goondan.yaml\n/history 4\n"
    )
    assert "with the next message: a.png (image/png)\n" in talked.out
    assert "[E_FILE_INVALID]" in talked.err
    assert "user       look [a.png]\n" in talked.out
    kinds = [part["type"] for part in model.requests["look"][0]["messages"][-1]["content"]]
    assert sorted(kinds) == ["image_url", "text"]
    assert model.requests["then"][0]["messages"][-1]["content"] == "then"


def test_a_swarm_that_runs_detached_is_joined_and_goes_on(kernel: Sandbox, model: ScriptedModel) -> None:
    pid = kernel.pid("supervisor")
    piped = kernel.gdn("run", "--instance", "joined", input="hello\n")
    assert (piped.status, piped.out) == (0, "fine\n")
    assert "joined the swarm that runs already" in piped.err
    with Terminal(kernel, "run", "--instance", "joined") as terminal:
        terminal.read_until("joined the swarm that runs already")
        terminal.read_until("main/joined goes on: 2 messages")
        terminal.read_until("> ")
        terminal.type("/history\r")
        terminal.read_until("user       hello")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert kernel.pid("supervisor") == pid
    refused = kernel.gdn("run", "--watch", "--json", input="")
    assert (refused.status, refused.json["error"]["code"]) == (2, "E_USAGE")
