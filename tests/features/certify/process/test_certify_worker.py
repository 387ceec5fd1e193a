"""`gdn certify worker`: a worker that is right passes, one that is broken on purpose is caught."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from goondan.features.certify.command import certify_worker
from goondan.features.certify.command.rules import Report
from goondan.kernel.cli import execute
from goondan.schemas.wire.errors import GoondanError
from tests.kernel_fixture import ROOT

WORKER = [sys.executable, "-I", str(Path(__file__).parent / "adapter_worker.py")]
#: What is waited for in vain (seconds).
PATIENCE_S = 6.0
#: fault of adapter_worker.py -> scenarios to play, and what the report says of one that is broken.
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "two-results": (("come in pieces",), "two results of call"),
    "drops-early": (("that come before",), "result.* was due"),
    "serial": (("keeps no other call",), "has a result already"),
    "forgets": (("newest messages",), "output is null"),
    "deaf": (("is cancelled",), "result.* was due"),
    "no-limit": (("over the limit",), "error.* was due"),
    "not-json": (("E_TOOL_BAD_OUTPUT (nan",), "nan as a number"),
    "wrong-code": (("an export that is none",), "code is null"),
    "asks-freely": (("without the permission",), '"ask", "callId": "1"'),
    "any-answer": (("and its answer given",), 'output is "wrong"'),
    "floods": (("a flood",), "50000 log lines"),
    "strict": (("of the future",), "it ended by itself"),
    "loads-anything": (("no such file",), "load_failed.* was due"),
    "one-result": (("what goes on",), "result.* was due"),
    "stays": (("exit is the end",), "its end was due"),
    "inherited": (("close-on-exec",), "descriptor 3 is inherited"),
    "rubbish": (("come in pieces",), "a frame that is none: Expected `str`"),
}


def _tried(fault: str) -> Report:
    words = FAULTS[fault][0] if fault else tuple({word for some, _ in FAULTS.values() for word in some})
    waits_in_vain = fault and fault != "floods"  # whose result comes, after 50,000 lines
    return certify_worker(
        [*WORKER, *([fault] if fault else [])], os.environ, "python", words, PATIENCE_S if waits_in_vain else 30.0
    )


@pytest.fixture(scope="module")
def tried() -> dict[str, Report | GoondanError]:
    """What comes of the worker as it is, and of each fault: most of the time each waits."""

    def one(fault: str) -> Report | GoondanError:
        try:
            return _tried(fault)
        except GoondanError as error:
            return error

    with ThreadPoolExecutor(len(FAULTS) + 1) as pool:
        return dict(zip(["", *FAULTS], pool.map(one, ["", *FAULTS]), strict=True))


def test_a_worker_that_is_right_is_certified(tried: dict[str, Report]) -> None:
    report = tried[""]
    assert [row.seen for row in report.rules if row.outcome != "holds"] == []
    assert report.certified


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "stays"])
def test_a_worker_that_is_broken_on_purpose_is_caught(tried: dict[str, Report], fault: str) -> None:
    report = tried[fault]
    assert not report.certified
    broken = [row for row in report.rules if row.outcome == "broken"]
    assert [row for row in broken if re.search(FAULTS[fault][1], row.seen)], [row.seen for row in broken]


def test_a_worker_that_does_not_end_cannot_be_certified(tried: dict[str, GoondanError]) -> None:
    assert tried["stays"].info.code == "E_CERTIFY"
    assert re.search(
        r"cannot be certified: nothing came for \d+\.\d s, and its end was due$", tried["stays"].info.message
    )


def test_the_python_worker_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import goondan.toolhost.inside as tool;"
        "sys.modules['goondan_tool'] = tool; from goondan.toolhost.inside.worker import main; main()"
    )
    status = execute(["certify", "worker", "--", sys.executable, "-I", "-c", program])
    shown = capsys.readouterr().out
    assert (status, [line for line in shown.splitlines() if "broken " in line]) == (0, [])


@pytest.mark.parametrize(
    ("argv", "entry", "said"),
    [
        (["/nowhere/at/all"], "python", "it ended by itself, and a frame"),
        (["cat"], "python", "it ended by itself, and a frame"),
        (["sleep", "60"], "python", "nothing came for [12].[0-9] s, and a frame"),
        (["sh", "-c", "cat <&3 >&3"], "python", "a frame that is none: "),
        (WORKER, "/nowhere/tool.py", "and a frame"),
    ],
    ids=["nothing", "ends", "silent", "echoes", "no-tool"],
)
def test_a_program_that_is_no_worker_is_one_error(argv: list[str], entry: str, said: str) -> None:
    with pytest.raises(GoondanError) as refused:
        certify_worker(argv, os.environ, entry, [], 1.0)
    assert refused.value.info.code == "E_CERTIFY"
    assert re.search(said, refused.value.info.message)
