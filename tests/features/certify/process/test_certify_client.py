"""`gdn certify client`: a client that is right passes, one that is broken on purpose is caught, any other program is an
error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from goondan.features.certify.command import certify_client as certify
from goondan.features.certify.command.client import scenarios
from goondan.features.certify.command.rules import Report
from goondan.kernel.cli import execute
from goondan.schemas.wire.errors import GoondanError
from tests.forked_programs import forked
from tests.kernel_fixture import ROOT

CLIENT = [sys.executable, "-I", str(Path(__file__).parent / "adapter_client.py")]
#: What is waited for in vain (seconds). The faults of this file are caught by what does come, or never does.
PATIENCE_S = 6.0
#: fault of adapter_client.py -> scenarios to play, and what the report says of one that is broken.
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "says-hello-once": (("gone after it was accepted",), "a frame .*hello.* was due"),
    "no-ack": (("a question and its answer",), "ack.* was due"),
    "one-ack": (("an answer twice",), "ack.* was due"),
    "new-ids": (("gone after it was accepted",), "a repeat whose id"),
    "longer": (("does not prolong",), "a repeat .* with 20000 of 20000 ms left"),
    "impatient": (("overload: the same event",), "nothing was due"),
    "forgets": (("overload: the same event",), "event.* was due"),
    "no-credit": (("credit bounds",), "events are out, and the credit is"),
    "strict": (("of the future are skipped",), "it ended by itself"),
    "twice": (("an answer twice",), "once more|2 answers to ref 1"),
    "waits": (("is pinged after",), "ping.* was due"),
    "trusts": (("cannot be had",), "E_BLOB_MI.* was due"),
    "old-token": (("started again is read",), "payload.token is"),
    "no-pong": (("a ping is answered",), "pong.* was due"),
    "first-part": (("several parts",), "nothing was due"),
    "reorders": (("oldest first",), "event.* was due"),
    "no-deadline": (("says nothing at all",), "E_AGENT_TIMEOUT.* was due"),
}


@pytest.fixture(scope="module")
def tried() -> dict[str, Report]:
    """What comes of the client as it is, and of each fault: most of the time each waits."""

    def certified(fault: str) -> Report:
        words = FAULTS[fault][0] if fault else tuple({word for some, _ in FAULTS.values() for word in some})
        return certify([*client, *([fault] if fault else [])], os.environ, words, PATIENCE_S if fault else 30.0)

    with forked(Path(CLIENT[-1])) as client, ThreadPoolExecutor(len(FAULTS) + 1) as pool:
        return dict(zip(["", *FAULTS], pool.map(certified, ["", *FAULTS]), strict=True))


def test_a_client_that_is_right_is_certified(tried: dict[str, Report]) -> None:
    report = tried[""]
    assert [row.seen for row in report.rules if row.outcome == "broken"] == []
    assert report.certified
    assert len(report.rules) > 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_that_is_broken_on_purpose_is_caught(tried: dict[str, Report], fault: str) -> None:
    report = tried[fault]
    assert not report.certified
    broken = [row for row in report.rules if row.outcome == "broken"]
    assert [row for row in broken if re.search(FAULTS[fault][1], row.seen)], [row.seen for row in broken]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all cannot be started: No such file or directory"),
        (["/"], "/ cannot be started: Permission denied"),
        (["true"], "it ended by itself, and a connection was due"),
        (["sh", "-c", "echo oh no >&2; exit 3"], "it ended by itself, and a connection was due: oh no"),
        (["sleep", "60"], "nothing came for 1.0 s, and a connection was due"),
        (["yes"], 'a line that is no JSON object: "y"'),
        (["sh", "-c", "head -c 20000000 /dev/zero; sleep 60"], "it wrote a line of more than 4194304 bytes"),
    ],
    ids=lambda value: None,
)
def test_a_program_that_is_no_client_is_one_error(argv: list[str], said: str) -> None:
    with pytest.raises(GoondanError) as refused:
        certify(argv, os.environ, [], 1.0)
    assert refused.value.info.code == "E_CERTIFY"
    assert said in refused.value.info.message


def alive(pid: int) -> bool:
    """Whether a process runs: one that nobody has reaped does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_that_does_not_end_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    argv = ["sh", "-c", f'sleep 300 & echo $! > {child}; exec "$@"', "sh", *CLIENT, "stays"]
    with pytest.raises(GoondanError, match="its end after `close` was due"):
        certify(argv, os.environ, [], 5.0)
    while alive(int(child.read_text())):  # its end is a matter of moments, or the test's time is over
        time.sleep(0.01)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """The programs of all scenarios end, and their folders go; the command says nothing."""
    started = tmp_path / "started"
    argv = ["sh", "-c", f'echo $$ $GOONDAN_RUN_DIR >> {started}; exec "$@"', "sh", *CLIENT]
    command = [sys.executable, "-I", "-m", "goondan.kernel.cli", "certify", "client", "--only", "silence", "--", *argv]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as certificate:
        while not started.exists() or len(started.read_text().splitlines()) < 4:
            time.sleep(0.01)
        certificate.send_signal(signal.SIGINT)
        assert certificate.communicate() == ("", "\n")
    assert certificate.returncode == 130
    for pid, folder in (line.split() for line in started.read_text().splitlines()):
        assert not Path(folder).exists()
        while alive(int(pid)):
            time.sleep(0.01)


def test_the_command_prints_a_table_or_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "a question and its answer"]
    assert execute(["certify", "client", *words, "--", *CLIENT]) == 0
    shown = capsys.readouterr().out
    assert "  holds        a question and its answer  C-ANSWER-1 C-ANSWER-2\n" in shown
    assert shown.splitlines()[-1].endswith(" hold")
    assert execute(["certify", "client", "--json", *words, "--", *CLIENT]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["certified"], document["kind"], document["command"]) == (True, "client", CLIENT)
    assert document["rules"][0].keys() == {"section", "rule", "ids", "outcome", "seen"}
    assert execute(["certify", "client", "--json", "--", "/nowhere/at/all", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E_CERTIFY"
    assert execute(["certify", "client", "--only", "no such thing", "--", "x", "--json"]) == 2
    assert "no scenario has 'no such thing'" in capsys.readouterr().err


def test_every_scenario_and_rule_has_a_name_of_its_own() -> None:
    tried, rules = scenarios()
    names = [scenario.name for scenario in tried] + [rule.text for rule in rules]
    assert len(names) == len(set(names)) > 90


#: A client that can be told one thing that is odd: a frame after its welcome, or a line.
ODD = """\
import json, os, sys, zmq, msgspec

def main():
    place, what = os.environ["GOONDAN_RUN_DIR"], json.loads(sys.argv[1])
    pack = msgspec.msgpack.encode
    link = zmq.Context.instance().socket(zmq.DEALER)
    link.setsockopt(zmq.PROBE_ROUTER, 1)
    link.setsockopt(zmq.LINGER, 0)
    link.connect(f"ipc://{place}/clients.sock")
    link.recv()
    hello = {"token": open(f"{place}/client.token").read(), "incarnation": "me", "versions": [1]}
    link.send(pack({"type": "hello", "id": "1", "payload": hello}))
    for line in ({"ready": True}, *what.get("first", [])):
        print(json.dumps(line), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "close":
            break
        if "line" in what:
            print(json.dumps({"ref": told["ref"], **what["line"]}), flush=True)
        else:
            link.recv()  # the welcome
            link.send(pack({"type": "event", "id": "2", "to": "coder", "eventId": "e", **what["frame"]}))

if __name__ == "__main__":
    main()
"""
#: What it is told, and what the report says.
ODDITIES: list[tuple[dict[str, Any], str]] = [
    ({"frame": {"eventId": ["e"]}}, "Expected `str | null`, got `array`"),
    ({"frame": {"replyTo": "q"}}, "Expected `object | null`, got `str`"),
    ({"frame": {"blob": {"file": "a\0b", "size": 1, "digest": ""}}}, "null byte"),
    ({"frame": {"eventId": None}}, "eventId null"),
    ({"line": {"ref": [1]}}, "a line whose ref is no text"),
    ({"first": [{"error": {"code": ["E"]}}]}, "a line with the error E_TOKEN_INVALID was due"),
    ({"line": {"ref": "\ud800"}}, r"a line about ref .\\ud800., which was never asked"),
    ({"line": {"unsupported": True}}, "it cannot ask, and a client that asks nothing is none"),
]


def test_what_a_client_cannot_do_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    program = [sys.executable, "-I", str(tmp_path / "odd.py"), json.dumps({"line": {"unsupported": True}})]
    report = certify(program, os.environ, ["live events are told"], PATIENCE_S)
    assert (report.certified, report.rules[0].outcome) == (True, "not offered")


def test_whatever_breaks_the_rules_is_in_the_report(tmp_path: Path) -> None:
    def certified(what: dict[str, Any]) -> Report:
        words = ["for good is the end (E_TOKEN" if "first" in what else "a question and its answer"]
        return certify([*program, json.dumps(what)], os.environ, words, PATIENCE_S)

    (tmp_path / "odd.py").write_text(ODD)
    with forked(tmp_path / "odd.py") as program, ThreadPoolExecutor(len(ODDITIES)) as pool:
        reports = list(pool.map(certified, [what for what, _ in ODDITIES]))
    for (what, said), report in zip(ODDITIES, reports, strict=True):
        assert not report.certified, what
        shown = [row.seen for row in report.rules if row.outcome == "broken"]
        assert [one for one in shown if re.search(said, one)], (what, shown)
        assert "\n".join(shown).encode()
