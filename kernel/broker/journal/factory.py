"""Opens the journal of a state directory in the way that its durability asks for."""

from __future__ import annotations

import os
import time
from typing import Final

from goondan.kernel.broker.journal.committer import Committer, InlineJournal
from goondan.kernel.broker.journal.group import GroupWriter
from goondan.kernel.broker.journal.interface import Journal, Store
from goondan.kernel.broker.journal.reserve import Reserve
from goondan.kernel.broker.journal.store import JOURNAL_FILE, Durability, JournalStore
from goondan.schemas.wire.errors import GoondanError

#: The file whose space is freed when the disk is full.
RESERVE_FILE: Final = "kernel.reserve"
#: In the folder of the kernel's locks: remembers that there was a journal.
WITNESS_FILE: Final = "kernel/journal"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """What names the machine's present boot."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def open_store(state_dir: str, durability: Durability, *, accept_loss: bool = False) -> Store:
    """The journal's store of `state_dir`: which kind it is, is decided here and nowhere else. Raises GoondanError: see
    JournalStore.
    """
    path, witness = os.path.join(state_dir, JOURNAL_FILE), os.path.join(state_dir, WITNESS_FILE)
    while True:
        try:
            return JournalStore(
                path, durability=durability, boot_id=boot_id(), accept_loss=accept_loss, witness=witness
            )
        except GoondanError as error:
            if error.info.code != "E_DISK_FULL" or not release_reserve(state_dir):
                raise


def release_reserve(state_dir: str) -> bool:
    """Free a part of the reserve, because a start has to write a little. False when nothing of it is left."""
    return Reserve(os.path.join(state_dir, RESERVE_FILE)).release()


def start(store: Store, state_dir: str) -> Journal:
    """Begin to write. The store belongs to the journal from now on."""
    writer = GroupWriter(store, Reserve(os.path.join(state_dir, RESERVE_FILE)), wall_ms)
    return Committer(store, writer) if store.durability == "power" else InlineJournal(store, writer)


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
