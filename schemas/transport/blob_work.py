"""Reading and writing large payloads beside an event loop: in threads, which are there only once they are needed.

Source: docs/design/wire.md section 7; PROTOCOL.md "Large payloads".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from goondan.schemas.system.blob_files import BlobFolder
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Blob

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

#: Payloads that one link reads or writes at once: the disk is the limit, and each is in memory.
_THREADS: Final = 2

T = TypeVar("T")


class BlobWork:
    """The file work of one link. Callbacks come in the loop that was running when the work was asked for."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def write(
        self,
        folder: str | None,
        payload: memoryview,
        sync: bool,
        done: Callable[[Blob | None, GoondanError | None], None],
    ) -> None:
        """BlobFolder.write; `done` gets its result or its error."""
        self._run(lambda: _at(folder).write(payload, sync=sync), done)

    def read(
        self,
        folder: str | None,
        blob: Blob,
        remove: bool,
        done: Callable[[bytes | None, GoondanError | None], None],
    ) -> None:
        """BlobFolder.read; `done` gets its result or its error."""
        self._run(lambda: _at(folder).read(blob, remove=remove), done)

    def touch(self, folder: str | None, blob: Blob) -> None:
        """BlobFolder.touch."""
        self._run(lambda: _at(folder).touch(blob), _ignore)

    def remove(self, folder: str | None, blob: Blob) -> None:
        """BlobFolder.remove."""
        self._run(lambda: _at(folder).remove([blob.file]), _ignore)

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself, and nobody is told."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[], T], done: Callable[[T | None, GoondanError | None], None]) -> None:
        if self._closed:
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # most processes never need one

            self._pool = ThreadPoolExecutor(_THREADS, "blobs")
        loop = asyncio.get_running_loop()

        def finished(future: asyncio.Future[T]) -> None:
            if self._closed or future.cancelled():
                return
            error = future.exception()
            if error is None:
                done(future.result(), None)
            elif isinstance(error, GoondanError):
                done(None, error)
            else:
                done(None, fail("E_INTERNAL", f"the payload's file met an unexpected {type(error).__name__}"))

        loop.run_in_executor(self._pool, work).add_done_callback(finished)


def _at(folder: str | None) -> BlobFolder:
    if folder is None:
        raise fail("E_BLOB_UNAVAILABLE", "this process has no access to the folder of large payloads")
    return BlobFolder(folder)


def _ignore(result: object, error: GoondanError | None) -> None:
    """Best effort: the sweep finds what is left."""
