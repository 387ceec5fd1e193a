"""The broker's thread that deletes files of large payloads, so that its loop never waits for a disk.

Source: docs/design/wire.md section 7.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from goondan.schemas.system.blob_files import BlobFolder
from goondan.schemas.wire.blobs import KEEP_S

#: How often the keeper looks for files that nobody refers to (seconds).
SWEEP_S: Final = 300.0


class BlobKeeper:
    """Deletes files in the folder at `path`. Its daemon thread starts with the first work."""

    def __init__(self, path: str) -> None:
        self._folder = BlobFolder(path)
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def remove(self, files: list[str]) -> None:
        """Delete these files soon."""
        self._do(lambda: self._folder.remove(files))

    def sweep(self, referenced: frozenset[str]) -> None:
        """Soon delete the old files that are not in `referenced`."""
        self._do(lambda: self._folder.sweep(referenced, KEEP_S))

    def _do(self, work: Callable[[], object]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="blobs", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._work.get()()
