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
from goondan.kernel.cli.attach import ticks_of
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.start import import_whole
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import ErrorPayload

#: How long such a program may take until it is ready (seconds).
READY_S: Final = 30.0
#: The longest document that it prints (bytes).
MAX_DOCUMENT: Final = 64 << 10
#: How a program finds the screen of a person.
_SCREEN: Final = ("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "BROWSER")


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


def words_of(wished: Mapping[str, str]) -> list[list[str]]:
    """The words behind `gdn` that start what is wished: names, each with its value. They are in the order of the table,
    because a later one may use an earlier one. Raises GoondanError for a value that one does not take.
    """
    rows = [(feature.name, name) for feature in FEATURES for name in feature.beside if name in wished]
    modules = [(import_whole(f"goondan.features.{feature}.command"), name) for feature, name in rows]
    return [[name, *module.BESIDE[name](wished[name])] for module, name in modules]


def start(place: BundleTarget, words: list[str]) -> dict[str, Any]:
    """Start it beside the kernel of this place, which is ready. Returns what it says of itself. Raises GoondanError.

    A record in the state says that it runs, for `gdn ps`.
    """
    from goondan.kernel.spawn import command, environment, start_program  # `gdn ps` needs none of these
    from goondan.kernel.traces.logs import open_log

    reading, writing = os.pipe()
    log: int | None = None
    try:
        log = open_log(f"{place.state_dir}/logs/{words[0]}.log")
        pid = start_program(
            command("goondan.kernel.cli", [*words, "--bundle", place.bundle, "--json"]),
            # Features have settings of their own, and the keys of models are none of them. One may open a browser.
            env=environment(os.environ, [*_SCREEN, *(name for name in os.environ if name.startswith("GOONDAN_"))]),
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
        document = _told(reading, f"gdn {words[0]}")
        text = str(document.get("text", "")).partition("#")[0]  # what comes behind may be for this terminal alone
        record = Beside(words[0], pid, ticks_of(pid), text, rfc3339(time.time()))
        with suppress(OSError), open(_record(place.state_dir, words[0]), "wb") as file:
            file.write(msgspec.json.encode(record))
        return document
    except GoondanError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(reading)


class Beside(msgspec.Struct):
    """What runs beside a kernel, as its record in the state says."""

    #: The name of its command.
    name: str
    #: Its process.
    pid: int
    #: When that began (ticks since the machine did): another process may have the number later.
    ticks: int
    #: What it says of itself.
    text: str
    #: When it was ready: RFC 3339.
    since: str


def running(state_dir: str) -> list[Beside]:
    """What runs beside the kernel of a workspace."""
    found = []
    for name in offered():
        with suppress(OSError, msgspec.DecodeError), open(_record(state_dir, name), "rb") as file:
            one = msgspec.json.decode(file.read(MAX_DOCUMENT), type=Beside)
            if 0 < ticks_of(one.pid) == one.ticks:
                found.append(one)
    return found


def _record(state_dir: str, name: str) -> str:
    return f"{state_dir}/beside-{name}.json"


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
