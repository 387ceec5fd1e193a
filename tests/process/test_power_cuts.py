"""What was promised is on the disk when the power fails, at whatever point of a run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel.broker.journal.redo import REDO_SUFFIX
from goondan.kernel.broker.journal.store import JOURNAL_FILE
from tests.power import replay

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace to record a run with")
#: Batches, and turns, of one run: enough for copies of the log and for files that are opened again.
STEPS = 18


@pytest.fixture
def ram() -> Iterator[Path]:
    """A folder without a disk behind it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.parametrize("kind", ["journal", "conversation"])
def test_every_promise_survives_a_power_cut_at_every_sync(ram: Path, kind: str) -> None:
    check = replay.check_journal(STEPS) if kind == "journal" else replay.check_conversation
    calls = replay.trace(kind, STEPS, ram)
    cuts, wrong = replay.replay(calls, check, ram, every_call=False, seed=1)
    assert wrong == []
    assert cuts > 200


def test_with_a_redo_file_a_power_cut_leaves_one_moment_and_a_kill_every_promise(ram: Path) -> None:
    calls = replay.trace("redo", STEPS, ram)
    _, wrong = replay.replay(calls, replay.check_redo(STEPS), ram, every_call=False, seed=1)
    assert wrong == []
    _, wrong = replay.replay(calls, replay.check_killed(STEPS), ram, every_call=False, seed=1, lucks=["all"])
    assert wrong == []
    # The check can fail: the same run, and nothing that it had written to the redo file.
    calls = [call for call in calls if call.name != JOURNAL_FILE + REDO_SUFFIX]
    _, wrong = replay.replay(calls, replay.check_killed(STEPS), ram, every_call=False, seed=1, lucks=["all"])
    assert len(wrong) > STEPS // 2


def test_a_promise_without_a_sync_is_found(ram: Path) -> None:
    """The check can fail: the same run on a disk to which nothing was synced."""
    calls = [call for call in replay.trace("journal", STEPS, ram) if call.kind != "sync"]
    _, wrong = replay.replay(calls, replay.check_journal(STEPS), ram, every_call=False, seed=1)
    assert len(wrong) > STEPS
