"""`python -m tests.power.replay [--steps N] [--cuts sync|call]`: cut the power at every point of a run, and look.

The journal, its redo file (`durability: process`) and a conversation are written by programs of their own under strace.
Then the disk is cut at each sync (before and after it) or at each call, in each kind of luck (disk.py), and what is
left is opened as the next start does. Everything that was promised must be there, nothing else that was not written,
and a cut alone is never called corruption. Exit status 1 if that does not hold somewhere.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from goondan.agentproc.conversation.store import ConversationStore
from goondan.kernel.broker.journal.store import JOURNAL_FILE, JournalStore
from goondan.kernel.broker.state.records import Item, Write
from tests.power import workloads
from tests.power.disk import LUCK, Call, Disk, Luck, record
from tests.unit.kernel.broker.memory_journal import MemoryJournal

LATER_BOOT: Final = "99999999-2222-3333-4444-555555555555"
#: Looks at what is left in a folder after so many promises. Raises what it finds wrong.
Check = Callable[[Path, int], None]


def check_journal(steps: int) -> Check:
    """Every promised batch is there, and of the others only the next one, whole."""
    batches = workloads.journal_batches(steps)

    def check(folder: Path, promised: int) -> None:
        store = JournalStore(str(folder / JOURNAL_FILE), durability="power", boot_id=LATER_BOOT)
        try:
            # Two moments may have the same records: what ended tells them apart.
            moments = [_after(batches[:count]) for count in (promised, promised + 1)]
            assert any(_agree(store, moment, batches[: promised + 1]) for moment in moments), (
                f"{promised} batches were promised, and what is there is of no such moment"
            )
            store.commit([], 0)
        finally:
            store.close()

    return check


def check_redo(steps: int) -> Check:
    """After a loss of power what is there is of one moment, a whole one: with `process` none of them is promised."""
    return _check_moments(steps, LATER_BOOT, lambda promised: range(promised + 2))


def check_killed(steps: int) -> Check:
    """After the end of the process every promised batch is there, in the redo file or in the tables."""
    return _check_moments(steps, workloads.BOOT, lambda promised: range(promised, promised + 2))


def _check_moments(steps: int, boot_id: str, allowed: Callable[[int], range]) -> Check:
    batches = workloads.journal_batches(steps)
    moments = [_after(batches[:count]) for count in range(steps + 1)]
    rows = [list(moment.rows()) for moment in moments]

    def check(folder: Path, promised: int) -> None:
        store = JournalStore(str(folder / JOURNAL_FILE), durability="process", boot_id=boot_id)
        try:
            there = list(store.rows())
            found = [
                number
                for number in allowed(promised)
                if number <= steps and rows[number] == there and _agree(store, moments[number], batches[: promised + 1])
            ]
            assert found, (
                f"{promised} batches were promised, and what is there is of none of the moments that it may be"
            )
            store.promise([], 0)
            store.fold()
        finally:
            store.close()

    return check


def _after(batches: list[list[Write]]) -> MemoryJournal:
    journal = MemoryJournal()
    for batch in batches:
        journal.append([Item(tuple(batch))])
    return journal


def _agree(store: JournalStore, moment: MemoryJournal, batches: list[list[Write]]) -> bool:
    subjects = {write.subject for batch in batches for write in batch}
    ended = [(store.find_ended(subject), moment.find_ended(subject)) for subject in subjects]
    return list(store.rows()) == list(moment.rows()) and all(
        (one and one.digest) == (other and other.digest) for one, other in ended
    )


def check_conversation(folder: Path, promised: int) -> None:
    """Every turn whose end was promised is there with its answer and its messages."""
    store = ConversationStore(str(folder), durability="power")
    try:
        for step in range(promised):
            turn = store.find_turn(f"event{step}")
            assert turn is not None
            assert (turn.status, turn.answer) == ("completed", workloads.answer_of(step))
        messages = [message.id for message in store.load_messages()]
        assert messages[: 2 * promised] == [f"turn{step}.{position}" for step in range(promised) for position in (0, 1)]
        assert store.adopt(10**9) == 10**9
    finally:
        store.close()


def trace(kind: str, steps: int, folder: Path) -> list[Call]:
    """What the program of that name does on its disk."""
    work = folder / "work"
    work.mkdir()
    command = [sys.executable, "-m", "tests.power.workloads", kind, str(work), str(steps)]
    return record(command, work, folder / "strace")


def replay(
    calls: list[Call], check: Check, folder: Path, *, every_call: bool, seed: int, lucks: Sequence[Luck] = LUCK
) -> tuple[int, list[str]]:
    """Cut at each point; returns how many cuts were made, and what was wrong after which."""
    disk, dice, cuts, wrong = Disk(), random.Random(seed), 0, []
    calls = [call for call in calls if not call.name.endswith("-shm")]  # SQLite makes it anew
    for number, call in enumerate(calls):
        before = call.kind == "sync" or every_call
        after = call.kind == "sync" or call.name == workloads.PROMISED
        for moment, wanted in (("before", before), ("after", after)):
            if moment == "after":
                disk.play(call)
            promised = len(disk.seen(workloads.PROMISED))
            for luck in lucks if wanted else ():
                cuts += 1
                left = folder / "left"
                left.mkdir()
                for name, content in disk.cut(luck, dice).items():
                    (left / name).write_bytes(content)
                try:
                    check(left, promised)
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    wrong.append(f"{moment} call {number} ({call.kind} {call.name}), luck {luck}: {what}")
                shutil.rmtree(left)
    return cuts, wrong


def main(arguments: list[str] | None = None) -> int:
    """Record and replay all; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.power.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="batches, and turns, that are written")
    parser.add_argument("--cuts", choices=["sync", "call"], default="call", help="where the power is cut")
    parser.add_argument("--seed", type=int, default=1, help="of the luck")
    options = parser.parse_args(arguments)
    failed = False
    killed: tuple[Luck, ...] = ("all",)  # the page cache outlives a process
    for kind, check, lucks in (
        ("journal", check_journal(options.steps), LUCK),
        ("redo", check_redo(options.steps), LUCK),
        ("redo", check_killed(options.steps), killed),
        ("conversation", check_conversation, LUCK),
    ):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
            began = time.monotonic()
            calls = trace(kind, options.steps, Path(name))
            every = options.cuts == "call"
            cuts, wrong = replay(calls, check, Path(name), every_call=every, seed=options.seed, lucks=lucks)
            syncs = sum(call.kind == "sync" for call in calls)
            took = time.monotonic() - began
            what = f"{kind}, killed" if lucks is killed else kind
            print(f"{what}: {len(calls)} calls, {syncs} syncs, {cuts} cuts, {len(wrong)} wrong, {took:.1f} s")
            for text in wrong[:10]:
                print(f"  {text}")
            failed = failed or bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
