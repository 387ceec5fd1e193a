"""Programs whose writes are recorded: `python -m tests.power.workloads journal|redo|conversation FOLDER STEPS`.

Everything that is promised is written down in FOLDER/promised, one byte for each promise, after the promise was made.
What was written is known without the file: `journal_batches` and `answer_of`.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Final, Literal

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import Append, Message, MessageSource, UserData
from goondan.kernel.broker.journal import store as journal_store
from goondan.kernel.broker.journal.store import JOURNAL_FILE, JournalStore
from goondan.kernel.broker.state.records import DropAnswer, Put, Retire, Write

BOOT: Final = "11111111-2222-3333-4444-555555555555"
PROMISED: Final = "promised"
AT: Final = "2026-01-01T00:00:00Z"
#: The file is closed and opened again after so many steps.
REOPENED_AFTER: Final = 17
#: What the redo file has comes into the tables after so many steps.
FOLDED_AFTER: Final = 4
#: Pages of the log after which it is copied into the file, so that a short run copies some times.
CHECKPOINT_PAGES: Final = 30
#: A week and a day (milliseconds): what is kept long enough goes between steps.
LATER_MS: Final = 8 * 24 * 3600 * 1000


def journal_batches(steps: int) -> list[list[Write]]:
    """What the journal is given: events that come, go on and end, of small and larger size."""
    dice = random.Random(steps)
    open_: list[str] = []
    batches: list[list[Write]] = []
    for number in range(steps):
        batch: list[Write] = []
        for _ in range(dice.randrange(1, 5)):
            if open_ and dice.random() < 0.5:
                subject = open_.pop(dice.randrange(len(open_)))
                answer = dice.randbytes(50) if dice.random() < 0.5 else None
                batch.append(Retire(subject, b"digest", "done", answer))
                if answer is not None and dice.random() < 0.3:
                    batch.append(DropAnswer(subject))
            else:
                subject = f"event:{number}-{len(batch)}"
                open_.append(subject)
                batch.append(Put(subject, dice.randbytes(dice.choice([20, 300, 9000]))))
        batches.append(batch)
    return batches


def answer_of(step: int) -> bytes:
    """The answer of a turn."""
    return b"answer %d" % step


def journal(folder: Path, steps: int) -> None:
    """Write the batches, each as one commit."""
    journal_store.CHECKPOINT_PAGES = CHECKPOINT_PAGES  # type: ignore[misc]
    store = _opened(folder)
    with (folder / PROMISED).open("ab", buffering=0) as promised:
        for number, batch in enumerate(journal_batches(steps)):
            store.commit(batch, number)
            promised.write(b".")
            if number % REOPENED_AFTER == REOPENED_AFTER - 1:
                store.close()
                store = _opened(folder)
            elif number % 10 == 9:
                store.tidy(LATER_MS)
    store.close()


def redo(folder: Path, steps: int) -> None:
    """Promise the batches in the redo file, and bring some at a time into the tables."""
    journal_store.CHECKPOINT_PAGES = CHECKPOINT_PAGES  # type: ignore[misc]
    store = _opened(folder, "process")
    with (folder / PROMISED).open("ab", buffering=0) as promised:
        for number, batch in enumerate(journal_batches(steps)):
            store.promise(batch, number)
            promised.write(b".")
            if number % FOLDED_AFTER == FOLDED_AFTER - 1:
                store.fold()
            if number % REOPENED_AFTER == REOPENED_AFTER - 1:
                store.close()
                store = _opened(folder, "process")
            elif number % 10 == 9:
                store.tidy(LATER_MS)
                store.checkpoint()
    store.close()


def _opened(folder: Path, durability: Literal["power", "process"] = "power") -> JournalStore:
    return JournalStore(str(folder / JOURNAL_FILE), durability=durability, boot_id=BOOT)


def conversation(folder: Path, steps: int) -> None:
    """Turns of two messages each; what is promised is the end of a turn."""
    store = ConversationStore(str(folder), durability="power")
    with (folder / PROMISED).open("ab", buffering=0) as promised:
        for step in range(steps):
            store.adopt(step + 1)
            turn = f"turn{step}"
            with store.write():
                store.begin_turn(f"event{step}", turn, 1, AT)
            for position in range(2):
                with store.write():
                    data = UserData(f"text {step} " * 200)
                    message = Message(f"{turn}.{position}", data, AT, MessageSource("user"))
                    store.append(turn, position, Append(message))
            with store.write(final=True):
                store.finish_turn(f"event{step}", turn, "completed", AT, steps=1, answer=answer_of(step))
            promised.write(b".")
            if step % REOPENED_AFTER == REOPENED_AFTER - 1:
                store.close()
    store.close()


if __name__ == "__main__":
    os.umask(0o077)
    {"journal": journal, "redo": redo, "conversation": conversation}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
