"""Every attempt of attempts.py in real jails: none may get through. docs/sandbox.md has the numbers.

They are made as whoever runs the tests; when that is root, as an ordinary user besides.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import tests.containment.attempts_on_the_kernel  # noqa: F401 # its attempts come to those of the other half
from tests.containment import attempts
from tests.containment.ordinary_user import told_as_user
from tests.containment.tried import HARMLESS, TOOLS, every_attempt
from tests.javascript_runtimes import RUNTIMES

ROOT = Path(__file__).parents[2]
#: How the system refuses, as exceptions of Python.
REFUSALS = {"OSError", "PermissionError", "FileNotFoundError", "ProcessLookupError", "BlockingIOError", "gaierror"}
AS_USER = """
import asyncio, json, os, sys
from contextlib import suppress
from pathlib import Path
from tests.containment.attempts import call
from tests.containment.tried import every_attempt
os.environ["HOST_SECRET"] = "x"
with suppress(OSError):  # a key of this user's, for a minute: its name is for nobody in a jail
    call("keyctl", 15, call("add_key", b"user", b"gdn-test", b"x", 1, -4), 60)
print(json.dumps(asyncio.run(every_attempt(Path(sys.argv[1])))))
"""


def judge(found: dict[str, Any], *isolations: str) -> None:
    assert set(found) == set(isolations)
    for how, outcomes in found.items():
        assert set(outcomes) == set(attempts.ATTEMPTS)
        through = {name: detail for name, (_, verdict, detail) in outcomes.items() if verdict == "done"}
        assert through == {}, how
        # An attempt that fails for a reason of its own proves nothing.
        broken = {name: detail for name, (_, _, detail) in outcomes.items() if detail.split(":")[0] not in REFUSALS}
        assert broken == {}, how


def as_a_child(found: dict[str, Any]) -> dict[str, Any]:
    """What a child of a runtime has found, without that runtime, which is a process beside its own."""
    assert found["instance"]["processes_beside_its_own"] == ["processes", "done", "{2}"]
    found["instance"]["processes_beside_its_own"] = ["processes", "refused", "OSError: nothing there"]
    return found


async def test_no_attempt_gets_out(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    judge(await every_attempt(short_tmp), *TOOLS)


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_no_attempt_gets_out_of_a_javascript_runtime(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    judge(as_a_child(await every_attempt(short_tmp, only="instance", runtime=runtime)), "instance")


async def test_no_attempt_gets_out_of_a_call_as_on_linux_6_1(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Landlock of version 2, without its rules for TCP, devices, signals and abstract sockets."""
    monkeypatch.setenv("HOST_SECRET", "x")
    found = await every_attempt(short_tmp, only="call", facts=lambda facts: replace(facts, landlock=2))
    assert found["call"]["signal_to_init"][2] == "OSError: nothing came in"
    judge(found, "call")


def test_no_attempt_gets_out_of_an_ordinary_users_jails(short_tmp: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the test before has just shown it")
    judge(told_as_user(AS_USER, short_tmp), *TOOLS)


def test_no_attempt_gets_out_of_a_runtime_of_an_ordinary_user(short_tmp: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the test before has just shown it")
    tries = AS_USER.replace("(Path(sys.argv[1]))", "(Path(sys.argv[1]), only='instance', runtime='node')")
    judge(as_a_child(told_as_user(tries, short_tmp)), "instance")


def test_the_document_shows_the_table() -> None:
    """What each tier must refuse: `HARMLESS` is what may get through in the reduced one, and that is all."""
    groups = Counter(group for group, _ in attempts.ATTEMPTS.values())
    through = Counter(attempts.ATTEMPTS[name][0] for name in HARMLESS)
    assert sum(groups.values()) >= 80
    text = " ".join((ROOT / "docs/sandbox.md").read_text(encoding="utf-8").split())
    listed, _, rest = text.partition("Attempts by way out: ")[2].partition(". None gets through `full`. ")
    assert {group: int(number) for group, number in (one.rsplit(" ", 1) for one in listed.split(", "))} == groups
    assert sorted(through.elements()) == ["persistence", "privileges"]
    assert rest.startswith("Two get through `reduced`, one of privileges and one of persistence.")
