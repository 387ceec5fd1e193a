"""The tool host that is played for one scenario: a socket, and the COMMAND with its other end as descriptor 3.

Steps (worker.yaml): `host` sends a frame; `worker` waits for one of its type and call, whatever comes between. What
is left at the end, beside news, is not due.

The rules hold in every scenario. Each is decided from what was seen.

Source: docs/certify.md; schemas/WORKER.md.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.features.certify.command.playing import Differs, NotOffered, Player, Program
from goondan.features.certify.command.rules import Names, Scenario, Trace, short
from goondan.schemas.worker.worker_frames import WorkerFrame

#: One read of the socket (bytes).
READ_BYTES: Final = 1 << 18
#: What a frame may have beyond its output (bytes).
FRAME_SLACK: Final = 64 << 10
#: Frames that may come at any time.
NEWS: Final = frozenset(("log", "progress"))

_decode: Final = msgspec.msgpack.Decoder(WorkerFrame).decode


class Host(Player):
    """One scenario: the socket, the program, and what was seen."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        entry: str,
        scenario: Scenario,
        stopping: threading.Event,
        wait: float,
    ) -> None:
        """Raises GoondanError E_CERTIFY when the program cannot be started."""
        super().__init__(scenario, stopping, wait, Names())
        self._frames: list[dict[str, Any]] = []
        self._buffer, self._waiting, self._limit = bytearray(), bytearray(), 1 << 20
        self._open = self._reads = True
        self.folder = tempfile.mkdtemp(prefix="gdn-certify-")
        self.names.known |= {"$entry": entry, "$folder": os.path.dirname(entry), "$workdir": self.folder}
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            passed = {name: env[name] for name in ("PATH", "HOME") if name in env}
            more = {"TMPDIR": self.folder, "LANG": "C.UTF-8"}
            self.program = Program(argv, passed | more, channel=theirs.fileno())
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def close(self) -> None:
        """Close the socket and remove the folder."""
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what is seen

    def look(self, seconds: float) -> None:
        """Take what the program sends and prints within some time; return as soon as there is something."""
        poller = select.poll()
        if self._open:
            poller.register(self._socket, select.POLLIN * self._reads | select.POLLOUT * bool(self._waiting))
        for fd, events in self.program.polled():
            poller.register(fd, events)
        poller.poll(max(0, seconds) * 1000)
        self._put(b"")
        with suppress(ValueError):
            self.program.tail = (self.program.tail + b"\n".join(self.program.lines()))[-READ_BYTES:]
        with suppress(BlockingIOError, ConnectionError):
            while self._open and self._reads:
                data = self._socket.recv(READ_BYTES)
                self._open = bool(data)
                self._buffer += data
                self._take()

    def _take(self) -> None:
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if size > self._limit + FRAME_SLACK:
                self.see("odd", f"a frame of {size} bytes")
                raise Differs(f"it sent a frame of {size} bytes, and outputLimit is {self._limit}")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            try:
                _decode(body)  # which knows the fields of each frame
                frame = msgspec.msgpack.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.see("odd", f"a frame that is none: {error}")
                continue
            self.see("got", frame)
            self._frames.append(frame)

    # Nothing is ever `undue` before the end: results come when they come.

    def end(self) -> None:
        """Close the socket, and look that it ends, and that nothing but news is left."""
        left = [frame for frame in self._frames if frame["type"] not in NEWS]
        if left:
            raise Differs(f"it sent {short(left[0])}, and nothing was due")
        self.step_hangup(True)
        self.step_ended(True)

    # --- steps

    def _put(self, data: bytes) -> None:
        self._waiting += data
        with suppress(BlockingIOError, ConnectionError):
            while self._waiting and self._socket.fileno() >= 0:
                del self._waiting[: self._socket.send(self._waiting[:READ_BYTES])]

    def step_host(self, frame: dict[str, Any]) -> None:
        """It is sent a frame."""
        filled = self.names.fill(frame)
        if frame["type"] == "init":
            self._limit = frame.get("outputLimit", self._limit)
        self.see("sent", filled)
        body = msgspec.msgpack.encode(filled)
        self._put(len(body).to_bytes(4, "little") + body)

    def step_slowly(self, frames: list[dict[str, Any]]) -> None:
        """It is sent frames in pieces of some bytes, whose ends are not theirs."""
        data = bytearray()
        for frame in frames:
            self.see("sent", filled := self.names.fill(frame))
            data += len(body := msgspec.msgpack.encode(filled)).to_bytes(4, "little") + body
        for at in range(0, len(data), 7):
            self._put(bytes(data[at : at + 7]))
            self.look(0.001)

    def step_many(self, many: dict[str, Any]) -> None:
        """Frames with `$n` from 1 to `times`: all are sent, then all are awaited."""
        for kind, step in (("host", self.step_host), ("worker", self.step_worker)):
            for number in range(1, many["times"] * (kind in many) + 1):
                self.names.known |= {"$n": str(number), "$number": number}
                step(many[kind])

    def step_worker(self, wanted: dict[str, Any]) -> None:
        """It sends this frame: the next one of its type and call."""
        found: list[dict[str, Any]] = []
        about = {key: self.names.fill(wanted[key]) for key in ("type", "callId") if key in wanted}

        def there() -> bool:
            if about["type"] == "result" and any(frame["type"] == "load_failed" for frame in self._frames):
                raise Differs(f"it could not load the tool: {short(self._frames[-1])}")
            found.extend([one for one in self._frames if about.items() <= one.items()][:1])
            return bool(found)

        self.until(there, f"a frame {short(wanted)}")
        self._frames.remove(found[0])
        if (text := self.names.differs(wanted, found[0])) is not None:
            raise Differs(f"it sent {short(found[0])}, and {short(wanted)} was due: {text}")

    def step_silent(self, call: str) -> None:
        """There is no result of a call yet."""
        if any(frame["type"] == "result" and frame.get("callId") == call for frame in self._frames):
            raise Differs(f"call {call} has a result already")

    def step_reads(self, reads: bool) -> None:
        """The host reads, or does not."""
        self._reads = reads

    def step_cloexec(self, _: Any) -> None:
        """Programs that it starts do not inherit descriptor 3. Of a COMMAND that starts the worker nobody knows."""
        place = f"/proc/{self.program.pid}"
        try:
            mine = os.readlink(f"{place}/fd/3").startswith("socket:")
            with open(f"{place}/fdinfo/3") as file:
                flags = int(next(line for line in file if line.startswith("flags:")).split()[1], 8)
        except OSError:
            raise NotOffered from None
        if not mine or not flags & os.O_CLOEXEC:
            raise Differs("descriptor 3 is inherited by the programs that a handler starts")

    def step_hangup(self, _: Any) -> None:
        """The host closes its end."""
        self._open = False
        self._socket.close()

    def step_ended(self, _: Any) -> None:
        """It ends by itself, its end of the socket with it."""
        self.until(self.program.ended, "its end")


# --- the rules that hold in every scenario, each decided from what was seen -------------------------------------------


#: How many levels of maps and arrays an output may have.
MAX_DEPTH: Final = 60
#: How much news a host forgives at once, and again in each second.
NEWS_AT_ONCE, NEWS_PER_S = 20_000, 2_000

Found = list[str] | None


def _got(trace: Trace, *kinds: str) -> Iterator[dict[str, Any]]:
    return (seen.what for seen in trace if seen.kind == "got" and (not kinds or seen.what["type"] in kinds))


def frames(trace: Trace) -> Found:
    """What is no frame of the protocol."""
    found = [seen.what for seen in trace if seen.kind == "odd"]
    return found if found or any(_got(trace)) else None


def results(trace: Trace) -> Found:
    """Results of calls that were never made, and more than one of a call."""
    made = [seen.what["callId"] for seen in trace if seen.kind == "sent" and seen.what["type"] == "call"]
    told = list(_got(trace, "result"))
    last = [what["callId"] for what in told if not (what["status"] == "pending" and what.get("continues"))]
    found = [f"a result of call {short(call)}, which was never made" for call in last if call not in made]
    return found + [f"two results of call {call}" for call in made if last.count(call) > 1] if told else None


def errors(trace: Trace) -> Found:
    """Results without what their status says: an error, or a handle that can be printed."""
    told = list(_got(trace, "result"))
    wrong = [what for what in told if what["status"] == "error" and not what.get("error")]
    for what in (one for one in told if one["status"] == "pending"):
        handle = what.get("handle")
        wrong += [] if isinstance(handle, str) and 1 <= len(handle) <= 1024 and handle.isprintable() else [what]
    return [short(what) for what in wrong] if told else None


def values(trace: Trace) -> Found:
    """Outputs that are not JSON, or too deep."""
    told = [what["output"] for what in _got(trace, "result") if "output" in what]
    return [text for value in told if (text := _no_json(value, MAX_DEPTH)) is not None] if told else None


def _no_json(value: Any, levels: int) -> str | None:
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        keys = all(isinstance(key, str) for key in value) if isinstance(value, dict) else True
        if levels == 0 or not keys:
            return "a key that is no text" if levels else f"more than {MAX_DEPTH} levels"
        return next((text for item in items if (text := _no_json(item, levels - 1)) is not None), None)
    if isinstance(value, float):
        return None if value - value == 0 else f"{value} as a number"
    return None if value is None or isinstance(value, bool | int | str) else f"a {type(value).__name__}"


def asks(trace: Trace) -> Found:
    """Questions without the permission, of no open call, or under the number of an open one."""
    found, may, calls, open_ = [], False, set(), set()
    for seen in trace:
        kind = seen.what["type"] if seen.kind in ("sent", "got") else ""
        if kind == "init":
            may = "agents" in seen.what.get("permissions", [])
        elif kind == "call":
            calls.add(seen.what["callId"])
        elif kind == "answer":
            open_.discard((seen.what["callId"], seen.what["askId"]))
        elif kind == "ask":
            asked = (seen.what.get("callId"), seen.what.get("askId"))
            if not may or asked[0] not in calls or asked in open_:
                found.append(short(seen.what))
            open_.add(asked)
    return found if found or may else None


def news(trace: Trace) -> Found:
    """More log lines and progress than a host forgives."""
    times = [seen.at for seen in trace if seen.kind == "got" and seen.what["type"] in ("log", "progress")]
    most = NEWS_AT_ONCE + NEWS_PER_S * (times[-1] - times[0]) if times else 0
    return ([f"{len(times)} log lines"] if len(times) > most else []) if times else None


JUDGES: Final = (frames, results, errors, values, asks, news)
