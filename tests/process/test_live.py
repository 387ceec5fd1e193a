"""Answers seen while they are made: a real kernel, a model that waits in the middle, a person at a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import termios
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until
from tests.process.model_servers import server
from tests.process.terminal import STATUS, Terminal, finished


class Model:
    """The gated server, and its gate."""

    def __init__(self, base: str) -> None:
        self.base = base
        self._before = 0
        self._before = self.waits()

    def go(self) -> None:
        """Open one wait."""
        self._get("__go")

    def waits(self) -> int:
        """How many waits were reached since this was made."""
        return int(self._get("__seen")["reached"]) - self._before

    def _get(self, path: str) -> Any:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.base}/{path}") as response:
            return json.load(response)


@contextmanager
def swarm(base: str) -> Iterator[Sandbox]:
    """A bundle whose model is the gated one."""
    spec = f'{{provider: openai, model: m, endpoint: "{base}/v1", apiKey: k}}'
    with sandbox(BUNDLE.replace("{provider: embedded}", spec)) as made:
        yield made


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with server("gated_llm") as url:
        yield url


@pytest.fixture
def model(base: str) -> Model:
    return Model(base)


@pytest.fixture
def stopped(base: str) -> Iterator[Sandbox]:
    """No kernel runs yet."""
    with swarm(base) as made:
        yield made


@pytest.fixture(scope="module")
def running(base: str) -> Iterator[Sandbox]:
    """One kernel for the tests that only send."""
    with swarm(base) as made:
        made.detach()
        yield made


def test_send_shows_the_text_before_the_turn_ends(running: Sandbox, model: Model) -> None:
    with Terminal(running, "send", "one |two |wait|three") as terminal:
        terminal.read_until("one two ")
        assert terminal.process.poll() is None
        assert model.waits() == 1
        model.go()
        assert terminal.wait() == 0
        assert terminal.rest() == "three\n"


SLOW = "---\n" + documents(
    "Tool slow {entry: ./slow.py, exports: [{name: walk, description: Walk., parameters: {type: object}}]}",
)
SLOW_MODULE = """\
import os, time

def walk(ctx, input):
    ctx.progress(1, 4, "a quarter")
    while not os.path.exists("go"):
        time.sleep(0.02)
    return "there"

handlers = {"walk": walk}
"""


def test_run_shows_steps_tools_their_progress_and_text_as_they_come(
    stopped: Sandbox, model: Model, tmp_path: Path
) -> None:
    text = stopped.bundle.read_text().replace("tools: [Tool/bash]", "tools: [Tool/bash, Tool/slow]")
    stopped.bundle.write_text(text + SLOW)
    (stopped.home / "slow.py").write_text(SLOW_MODULE)
    with Terminal(stopped, "run", "--workdir", str(tmp_path)) as terminal:
        terminal.read_until("> ")
        call = 'call bash__exec {"command":"sleep 0.9"}'
        terminal.type(f"let me |see|{call}|found |wait|it\r")
        terminal.read_until("let me see\n")
        assert "step" not in terminal.read_until("working, bash__exec, 1 s")
        terminal.read_until("found ")
        model.go()
        assert terminal.read_until("> ") == "it\n> "
        terminal.type("call slow__walk {}|arrived\r")
        terminal.read_until("working, slow__walk, 25% a quarter, ")
        (tmp_path / "go").touch()
        terminal.read_until("arrived\n")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    stopped.assert_clean()


def test_a_model_call_that_a_stop_interrupts_goes_on_at_the_next_start(stopped: Sandbox, model: Model) -> None:
    stopped.detach()
    message = ("send", "one |wait|two", "--event-id", "kept")
    waiting = stopped.popen(*message)
    wait_until(lambda: model.waits() == 1)
    late = stopped.gdn("send", "later", "--event-id", "late", "--timeout", "0.2")
    assert "the message late" in late.err and "--event-id late" in late.err
    assert stopped.gdn("stop").status == 0
    _, err = waiting.communicate(timeout=30)
    assert b"the message kept is kept, and its turn goes on" in err and b"[E_KERNEL_STOPPED]" in err
    left = stopped.gdn("trace", "kept")
    assert "interrupted since 2" in left.out and "running" not in left.out
    assert "it talks to openai, m at" in stopped.gdn("run", "--detach").out
    wait_until(lambda: model.waits() == 2, what="nobody asks, and the model is asked again")
    model.go()
    model.go()
    assert stopped.gdn(*message).out == "one two\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_line_typed_ahead_is_queued_and_never_mixes_into_the_answer(
    running: Sandbox, model: Model, term: str
) -> None:
    end = "\r" if term == "xterm" else "\n"
    with Terminal(running, "run", "--instance", term, term=term) as terminal:
        terminal.read_until("> ")
        call = 'call bash__exec {"command":"true"}'
        terminal.type(f"{call}|wait|open |wait|closed{end}")
        terminal.read_until("bash__exec command=true, ok, ")
        wait_until(lambda: model.waits() == 1)
        terminal.type("first|!\n")
        terminal.read_until("(queued: first|!)\n")
        model.go()
        terminal.read_until("open ")
        terminal.type("second\npart")
        wait_until(lambda: model.waits() == 2)
        model.go()
        assert STATUS.sub("", terminal.read_until("(queued: second)\n")) == "closed\n(queued: second)\n"
        terminal.read_until("> first|!\nfirst!\n> second\nsecond\n")
        terminal.read_until("> ")
        terminal.type(f"\x15|wait|{end}")  # instead of what was typed and not sent
        wait_until(lambda: model.waits() == 3)
        terminal.type("never\n")
        terminal.read_until("(queued: never)\n")
        terminal.type("\x03")
        terminal.read_until("(dropped: never)\n")
        terminal.read_until("cancelled\n")
        model.go()  # for the connection that nobody reads any more
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "never" not in terminal.rest()


def test_what_is_streamed_is_the_answer_and_pipes_get_it_once(running: Sandbox, model: Model) -> None:
    text = "again 3000 토큰 "
    with Terminal(running, "send", text) as terminal:
        assert terminal.wait() == 0
        assert terminal.rest() == "토큰 " * 3000 + "\n"
    assert running.gdn("send", text).out == "토큰 " * 3000 + "\n"
    assert running.gdn("send", text, "--json").json["response"] == "토큰 " * 3000


def test_an_answer_that_begins_anew_is_marked_and_pipes_stay_exact(running: Sandbox, model: Model) -> None:
    with Terminal(running, "send", "half|wait|cut|whole") as terminal:
        terminal.read_until("half")
        model.go()
        wait_until(lambda: model.waits() == 2)
        model.go()
        assert terminal.wait() == 0
        assert terminal.rest() == "\n(the answer begins anew)\nhalfwhole\n"
    model.go()
    model.go()
    process = running.popen("send", "half|wait|cut|whole ", stdin=subprocess.DEVNULL)
    assert finished(process) == (0, "halfwhole \n")


def test_an_agent_that_dies_in_the_middle_begins_anew(running: Sandbox, model: Model) -> None:
    with Terminal(running, "send", "first |wait|second") as terminal:
        terminal.read_until("first ")
        os.kill(running.pid("agent"), signal.SIGKILL)
        wait_until(lambda: model.waits() == 2)
        model.go()
        model.go()
        assert terminal.wait() == 0
        assert terminal.rest() == "\n(the answer begins anew)\nfirst second\n"


def test_a_broker_that_dies_in_the_middle_costs_news_but_no_text(running: Sandbox, model: Model) -> None:
    with Terminal(running, "send", "first |wait|second |wait|third") as terminal:
        terminal.read_until("first ")
        broker = running.pid("broker")
        os.kill(broker, signal.SIGKILL)
        wait_until(lambda: running.ps() and running.pid("broker") != broker)
        model.go()
        wait_until(lambda: model.waits() == 2)
        model.go()
        assert terminal.wait() == 0
        assert terminal.rest() == "second third\n"


def test_reasoning_is_seen_on_a_terminal_and_elsewhere_only_when_asked_for(running: Sandbox, model: Model) -> None:
    said = "think Which one?|think  That one.|The |answer"
    with Terminal(running, "send", said) as terminal:
        assert terminal.wait() == 0
    assert b"\x1b[2mWhich one?" in terminal.shown, "it is dimmed"
    assert terminal.rest() == "(reasoning)\nWhich one? That one.\n\nThe answer\n"
    piped = running.gdn("send", said)
    assert (piped.out, piped.err) == ("The answer\n", "")


def test_a_client_that_does_not_read_slows_nobody(running: Sandbox, model: Model) -> None:
    with Terminal(running, "send", "start|wait|again 40000 0123456789abcdef") as slow:
        slow.read_until("start")
        slow.signal(signal.SIGSTOP)
        model.go()
        assert running.gdn("send", "next", "--json", timeout=20).json["response"] == "next"
        slow.signal(signal.SIGCONT)
        assert slow.wait() == 0
        assert slow.rest() == "0123456789abcdef" * 40000 + "\n"


def test_a_model_cannot_speak_to_the_terminal(running: Sandbox, model: Model) -> None:
    evil = "\x1b]0;title\x07 \x1b[2J\x9b31m \u202eturned\r\n"
    with Terminal(running, "send", f"a{evil}|b") as terminal:
        assert terminal.wait() == 0
    assert b"\x1b]" not in terminal.shown and b"\x1b[2J" not in terminal.shown and b"\xc2\x9b" not in terminal.shown
    assert r"a\x1b]0;title\x07 \x1b[2J\x9b31m \u202eturned" in terminal.rest()
    piped = running.gdn("send", f"a{evil}|b").out
    assert piped == "a\\x1b]0;title\\x07 \\x1b[2J\\x9b31m \\u202eturned\nb\n", "most pipes end at a terminal"
    assert running.gdn("send", "--raw", f"a{evil}|b").out == f"a{evil}b\n"


def test_a_model_cannot_speak_to_the_terminal_of_piped_input_either(running: Sandbox) -> None:
    read, write = os.pipe()
    with Terminal(running, "run", "--instance", "piped", stdin=read) as terminal:
        os.close(read)
        os.write(write, b"a\x1b[2J\x07b\n")
        os.close(write)
        assert terminal.wait() == 0
        joined = "joined the swarm that runs already; it goes on when you leave\n"
        assert terminal.rest() == f"{joined}a\\x1b[2J\\x07b\n"


def test_no_colour_and_dumb_terminals(running: Sandbox, model: Model) -> None:
    for env, term in (({"NO_COLOR": "1"}, "xterm"), ({}, "dumb")):
        with Terminal(running, "send", "one|wait|two", term=term, env=env) as terminal:
            terminal.read_until("one")
            model.go()
            assert terminal.wait() == 0
        assert b"\x1b[2m" not in terminal.shown
        assert term != "dumb" or terminal.shown == b"onetwo\r\n"


def test_status_alone_where_the_answer_goes_to_a_file(running: Sandbox, model: Model) -> None:
    with Terminal(running, "send", "one|wait|two", stdout=subprocess.PIPE) as terminal:
        assert "one" not in terminal.read_until("working")
        model.go()
        assert finished(terminal.process) == (0, "onetwo\n")


# --- the editor


def test_lines_are_edited_recalled_and_sent_as_one(running: Sandbox) -> None:
    with Terminal(running, "run", "--instance", "edited") as terminal:
        for keys, shown in (
            ("first\x1b\rsecond\\\rthird\r", "\nfirst\nsecond\nthird\n"),
            ("junk\x03\x1b[200~pasted\nlines\x1b[201~\r", "\npasted\nlines\n"),
            (" secret\r", "\n secret\n"),
            ("wrong\x15right\r", "\nright\n"),
        ):
            terminal.read_until("> ")
            terminal.type(keys)
            terminal.read_until(shown)
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    (history,) = running.home.glob("state/workspaces/*/history")
    assert history.stat().st_mode & 0o777 == 0o600
    kept = [json.loads(line) for line in history.read_text().splitlines()]
    assert kept[-3:] == ["first\nsecond\nthird", "pasted\nlines", "right"], "and what other tests have typed"
    with Terminal(running, "run", "--instance", "edited") as terminal:
        terminal.read_until("> ")
        terminal.type("\x1b[A")
        terminal.read_until("right")
        terminal.type("\r")
        terminal.read_until("\nright\n")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_cancels_the_turn_and_the_conversation_goes_on_unless_it_comes_again(
    stopped: Sandbox, model: Model
) -> None:
    with Terminal(stopped, "run") as terminal:
        terminal.read_until("> ")
        terminal.type("never|wait|said\r")
        wait_until(lambda: model.waits() == 1)
        terminal.type("\x03")
        terminal.read_until("cancelled")
        terminal.read_until("> ")
        model.go()  # the server does not look whether anybody still listens
        terminal.type("other\r")
        assert "said" not in terminal.read_until("\nother\n")
        terminal.read_until("> ")
        terminal.type('call bash__exec {"command":"echo > begun; sleep 613"}\r')
        begun = "state/workspaces/*/instances/main/default/workspace/begun"
        wait_until(lambda: list(stopped.home.glob(begun)))
        os.kill(stopped.pid("agent"), signal.SIGSTOP)  # so that it does not end its turn
        terminal.type("\x03")
        terminal.read_until("Ctrl-C again ends the conversation")
        terminal.type("\x03")
        assert terminal.wait() == 130
    stopped.assert_clean()


def test_a_kernel_that_is_lost_gives_the_terminal_back(stopped: Sandbox) -> None:
    with Terminal(stopped, "run") as terminal:
        before = termios.tcgetattr(terminal.leader)
        terminal.read_until("> ")
        os.kill(stopped.pid("supervisor"), signal.SIGKILL)
        assert terminal.wait() == 1
        assert "[E_KERNEL_LOST]" in terminal.rest()
        assert termios.tcgetattr(terminal.leader)[3] == before[3], "echo and lines as they were"
