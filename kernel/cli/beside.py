"""What runs beside a kernel: commands of features that `gdn run` starts with it, and the doors of a swarm.

A row of the table of features names such commands (`beside`), and `gdn run --NAME[=VALUE]` starts `gdn NAME` with the
words that `BESIDE` of the feature's `command` makes of the value. The program has a session of its own and the log
`NAME.log`, and ends with its kernel. It prints one document when it is ready, as its command does with --json. What
goes wrong until then is an error of `gdn run`.

Source: docs/design/features.md section 2.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

import msgspec

from goondan.features import FEATURES, parts
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.spawn import command, environment, start_program
from goondan.kernel.start import import_whole
from goondan.kernel.traces.logs import open_log
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import ErrorPayload

#: How long such a program may take until it is ready (seconds).
READY_S: Final = 30.0
#: The longest document that it prints (bytes).
MAX_DOCUMENT: Final = 64 << 10


class _Failed(msgspec.Struct):
    """What a command with --json prints when it fails."""

    #: Why.
    error: ErrorPayload


def doors() -> list[ModuleType]:
    """The ways into a swarm of all features, in the order of their table."""
    return parts("door")


def offered() -> Mapping[str, str]:
    """What may run beside a kernel: names, each with its line of help."""
    return {name: line for feature in FEATURES for name, line in feature.beside.items()}


def words_of(name: str, value: str) -> list[str]:
    """The words behind `gdn` that start it. Raises GoondanError for a value that it does not take."""
    feature = next(one.name for one in FEATURES if name in one.beside)
    module = import_whole(f"goondan.features.{feature}.command")
    return [name, *module.BESIDE[name](value)]


def start(place: BundleTarget, words: list[str]) -> dict[str, Any]:
    """Start it beside the kernel of this place, which is ready. Returns what it says of itself. Raises GoondanError."""
    reading, writing = os.pipe()
    log: int | None = None
    try:
        log = open_log(f"{place.state_dir}/logs/{words[0]}.log")
        pid = start_program(
            command("goondan.kernel.cli", [*words, "--bundle", place.bundle, "--json"]),
            env=environment(os.environ),
            output_fd=writing,
            errors_fd=log,
        )
    except OSError as error:
        os.close(reading)
        raise fail("E_STATE", f"gdn {words[0]} could not be started: {error}") from None
    finally:
        os.close(writing)
        if log is not None:
            os.close(log)
    try:
        return _told(reading, f"gdn {words[0]}")
    except GoondanError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(reading)


def _told(reading: int, name: str) -> dict[str, Any]:
    """Its document. Raises GoondanError: the error that it says, or that it says nothing."""
    data = b""
    until = time.monotonic() + READY_S
    while b"\n" not in data and len(data) < MAX_DOCUMENT:
        if not select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            raise fail("E_KERNEL_SLOW", f"{name} was not ready within {READY_S:g} s; `gdn logs` says more")
        chunk = os.read(reading, MAX_DOCUMENT)
        if not chunk:
            break
        data += chunk
    with suppress(msgspec.DecodeError):
        raise GoondanError(msgspec.json.decode(data, type=_Failed).error)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise fail("E_INTERNAL", f"{name} ended before it was ready; `gdn logs` says more") from None
