"""Makes forked agents quick and small: work that is done once, before the first request.

In the fork server: what this module imports. In `warm_up`: a log, which an agent only gives its name; a few agents that
live from their hello to their end and run a turn that has no effect, because CPython 3.11 writes into code objects
until it has specialised them and libraries build caches at their first use; mapping the libraries' files, because a
page that only one process maps counts as its own. Only memory stays of it: the loop is asyncio's own and closed, the
folder is removed, no socket was opened, no thread was started. That is true after each of its steps, so an agent can be
forked between two of them.

At the end, `fill_pools` and `fill_heap` fill the holes that all this has left in memory. The new objects of an agent
would go into the holes, and copy a page of the fork server for each hole. Now they lie together, in new pages. Code
that runs is copied to one place for the same reason (`_lay_together`).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import signal
import ssl
import sys
from asyncio import base_events, selector_events, sslproto
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Final

import uvloop  # noqa: F401
from msgspec import Raw, structs

from goondan.agentproc.providers import embedded  # noqa: F401
from goondan.agentproc.providers.base import Provider
from goondan.agentproc.start import app, log
from goondan.agentproc.turn.parts import kinds
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ModelSpec
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.system.directories import remove_tree
from goondan.schemas.transport import Transport
from goondan.schemas.transport.link import transport_class
from goondan.schemas.wire import errors, frames
from goondan.schemas.wire.codec import FrameError, decode, encode, from_raw, to_raw

#: How many lives of an agent are played, after a first one. Code is specialised after eight runs.
ROUNDS: Final = 8
#: How many are played with each real model. A turn asks it twice, and everything else is warm by then.
MODEL_ROUNDS: Final = 4
#: Python's pools of small objects (obmalloc), in bytes: the size of a pool, the size of its header, the distance
#: between two sizes of objects, and the largest size of an object.
POOL_BYTES: Final = 16 << 10
POOL_HEAD_BYTES: Final = 48
SIZE_STEP: Final = 16
LARGEST_SMALL: Final = 512
#: The most holes of one size that are filled: 64 KiB to 2 MiB.
MAX_HOLES: Final = 4096
#: The holes in the C library's heap that are filled, the largest first (bytes). Larger blocks are mapped by themselves.
HOLE_BYTES: Final = (64 << 10, 32 << 10, 16 << 10, 8 << 10, 4 << 10, 2 << 10, *range(1040, 0, -16))
#: How many lives one step of the warm-up plays. A request for an agent waits until the step ends.
STEP_ROUNDS: Final = 2

_MADV_DONTNEED: Final = 4
_MADV_POPULATE_READ: Final = 22

_libc = ctypes.CDLL(None)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_malloc = _libc.malloc
_malloc.argtypes = (ctypes.c_size_t,)
_sbrk = _libc.sbrk
_malloc.restype = _sbrk.restype = ctypes.c_size_t
#: A folder that a link trusts, and in which no process makes a socket.
NOBODY: Final = "ipc:///proc/nobody"
transport_class()  # these two import what every agent needs
kinds()
for _part in (base_events, selector_events, sslproto):  # the start of a kernel has left TLS out of them
    _part.__dict__.update(ssl=ssl, SSLAgainErrors=(ssl.SSLWantReadError, ssl.SSLSyscallError))
_BYTES_HEAD: Final = sys.getsizeof(b"")
_filling: Final[list[object]] = []
_ZERO_PAGE: Final = bytes(mmap.PAGESIZE)


def warm_up(providers: Collection[str] = (), scratch: str | None = None) -> Iterator[None]:
    """Warm the fork server up, in steps of 10 to 20 ms. After each of them it has one thread, no loop and no open file
    of its own. After the first an agent is quick, and smaller with each further one.

    `providers` are those of later agents besides `embedded`; unknown names are skipped. `scratch` is a folder that is
    made and removed here. When this process is killed, another process clears its place. None: a folder for temporary
    files.
    """
    # Decoders are built at their first use. A payload that does not fit builds them as well.
    for kind in (frames.Credit, frames.ErrorPayload, frames.Shutdown):
        with suppress(FrameError):
            from_raw(frames.NO_PAYLOAD, kind)
    for _ in range(ROUNDS):
        log.configure_log("warm-up", log.KnownSecrets())
    play = partial(_play, scratch, model=ModelSpec(provider="embedded"))
    plays = [(play, ROUNDS)]
    run = _run_by(play)
    yield
    for name in [name for name in BY_NAME if name in providers]:
        from goondan.agentproc.start import warm_models

        make_provider = partial(warm_models.provider, name, _TOOL.name)
        play = partial(_play, scratch, model=warm_models.model(name), make_provider=make_provider)
        plays.append((play, MODEL_ROUNDS))
        run |= _run_by(play)
        yield
    _lay_together(run)
    yield
    for play, rounds in plays:
        for _ in range(rounds // STEP_ROUNDS):
            play(STEP_ROUNDS)
            yield
    _map_libraries()
    yield


def _run_by(play: Callable[[int], None]) -> dict[int, CodeType]:
    """The code that `play` runs, by its id, in the order of its first run."""
    run: dict[int, CodeType] = {}
    sys.setprofile(lambda frame, event, argument: run.setdefault(id(frame.f_code), frame.f_code))
    try:
        play(1)
    finally:
        sys.setprofile(None)
    return run


def _lay_together(run: dict[int, CodeType]) -> None:
    """Copy this code to one place. Each call of a function counts a reference in its code, so an agent copies the page
    of the code. The 670 pieces that a life runs lie on 410 pages after the imports, and on 140 then.
    """
    fill_pools()
    fill_heap()
    gc.unfreeze()  # else what was imported is not among the objects
    functions: dict[int, list[FunctionType]] = {}
    for found in gc.get_objects():
        if type(found) is FunctionType:
            functions.setdefault(id(found.__code__), []).append(found)
    gc.freeze()
    for code in run.values():
        copy = _copy(code, run)
        for function in functions.get(id(code), ()):
            function.__code__ = copy


def _copy(code: CodeType, run: dict[int, CodeType]) -> CodeType:
    """A copy, with copies of the code inside it that is run."""
    inside = [_copy(one, run) if id(one) in run else one for one in code.co_consts]
    return code.replace(co_consts=tuple(inside))


def give_back_untouched(loop: asyncio.AbstractEventLoop) -> None:
    """Give the untouched receive buffer of uvloop's Loop back: 250 KiB, zeroed when it is made, which an agent never
    uses.

    Pages of private memory that contain only zeros read as zeros after they are given back to the system.
    """
    page = mmap.PAGESIZE
    first = -(-id(loop) // page) * page
    last = (id(loop) + type(loop).__basicsize__) // page * page
    while first < last and _memcmp(first, _ZERO_PAGE, page) != 0:
        first += page
    while first < last and _memcmp(last - page, _ZERO_PAGE, page) != 0:
        last -= page
    # Every page equals the one before it, so all of them are zeros.
    if first < last and _memcmp(first, first + page, last - first - page) == 0:
        _madvise(first, last - first, _MADV_DONTNEED)


def fill_pools() -> None:
    """Take the free blocks in the pools that are in use, for as long as this process and its forks live."""
    for size in range(SIZE_STEP, LARGEST_SMALL + 1, SIZE_STEP):
        make = _maker(size)
        whole, row, last = (POOL_BYTES - POOL_HEAD_BYTES) // size - 1, 0, 0
        for _ in range(MAX_HOLES):
            _filling.append(block := make())
            row, last = (row + 1 if id(block) == last + size else 0), id(block)
            if row == whole:  # a pool that was empty before is full: there were no holes left
                break


def fill_heap() -> None:
    """The same for the C library's heap, which has what is larger: later blocks come from its end."""
    end = _sbrk(0)
    for size in HOLE_BYTES:
        for _ in range(MAX_HOLES):
            if _malloc(size) > end:
                break


def _maker(size: int) -> Callable[[], object]:
    """A function that makes an object of this size. Integers have 32 bytes, also those that
    `fill_pools` makes. So its blocks of that size make no row, and it takes MAX_HOLES of them.
    """
    if size <= 2 * SIZE_STEP:
        return object if size == SIZE_STEP else partial(complex, 0.0, 1.0)
    return partial(bytes, size - _BYTES_HEAD)


def _map_libraries() -> None:
    """Map every page of the files that are mapped at all. Linux before 5.14 does not know the advice and ignores it."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    for area, modes, _, _, _, *path in lines:
        if path and path[0].startswith("/") and modes.startswith("r"):
            start, end = (int(bound, 16) for bound in area.split("-"))
            _madvise(start, end - start, _MADV_POPULATE_READ)


# --- turns that lead nowhere ------------------------------------------------------------------------------------------

#: The signals that end the fork server silently.
_STOP: Final = (signal.SIGTERM,)
_TOOL: Final = CatalogItem(name="warm__up", parameters={"type": "object", "properties": {"a": {"type": "string"}}})


def _play(
    scratch: str | None, rounds: int, *, model: ModelSpec, make_provider: Callable[[], Provider] | None = None
) -> None:
    """Play so many turns in a folder and a loop of their own. A stop waits until the folder is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        folder = scratch or _temporary()
        if scratch is not None:
            remove_tree(folder)  # a fork server that was killed has left it
            os.mkdir(folder, 0o700)
        try:
            with closing(asyncio.SelectorEventLoop()) as loop:
                provider = None if make_provider is None else make_provider()
                loop.run_until_complete(_play_turns(folder, rounds, model, provider))
        finally:
            remove_tree(folder)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)


def _temporary() -> str:
    import tempfile  # under a supervisor there is another place

    return tempfile.mkdtemp(prefix="gdn-")


async def _play_turns(folder: str, rounds: int, model: ModelSpec, provider: Provider | None) -> None:
    spec = AgentSpec(
        name="warm-up",
        model=model,
        registry=[_TOOL],
        catalog=[_TOOL.name],
        state_dir=folder,
        revision="",
        durability="process",
    )
    for number in range(rounds):
        name, ends = f"{model.provider}-{number}", list[str | None]()
        await _Rehearsal(NOBODY, transport=partial(_Broker, spec, name, ends)).played(provider)
        if ends != ["done"]:  # a turn that fails at its first step warms nothing, and nobody would notice
            raise RuntimeError(f"the warm-up turn {name} ended as {ends}")


class _Rehearsal(app.AgentApp):
    """An agent process with a broker inside it, from its hello to its end."""

    _given: Provider | None = None

    async def played(self, provider: Provider | None) -> None:
        """`provider` is the model; None: that of the specification."""
        self._given = provider
        await self.live("none")

    def make_runner(self, spec: AgentSpec, welcome: frames.Welcome) -> TurnRunner:
        """See AgentApp."""
        runner = super().make_runner(spec, welcome)
        if (given := self._given) is not None:
            runner.instance.providers[spec.model.provider] = lambda _: given
        return runner


class _Broker(Transport):
    """A broker without a socket. It welcomes the process, hands over an event, has every call answered with null, and
    shuts the process down when its turn has ended. It notes in `ends` how that was.
    """

    def __init__(self, spec: AgentSpec, event_id: str, ends: list[str | None], *args: Any, **callbacks: Any) -> None:
        super().__init__(*args, **callbacks)
        self._spec = spec
        self._event_id = event_id
        self._ends = ends
        self._said: deque[bytes] = deque()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """The connection is there."""
        self._loop = loop
        self._say(frames.Frame("error", payload=to_raw(errors.error_payload("E_HELLO_REQUIRED", ""))))

    def take(self) -> bytes | None:
        """What was said next."""
        return self._said.popleft() if self._said else None

    def send(self, messages: deque[bytes]) -> None:
        """Hear all of them."""
        while messages:
            self._hear(decode(messages.popleft()))

    def _hear(self, frame: frames.Frame) -> None:
        if frame.type == "hello":
            self._welcome(frame)
        elif frame.type == "tool.call":
            result = to_raw(frames.ToolResult(status="ok", output=Raw(b"\xc0")))
            self._say(frames.Frame("tool.result", call_id=frame.call_id, payload=result))
        elif frame.type == "ack":
            self._say(frames.Frame("ack", stage="accepted", in_reply_to=frame.id, event_id=frame.event_id))
            if frame.stage in ("done", "failed"):
                self._ends.append(frame.stage)
                self._say(frames.Frame("shutdown", payload=to_raw(frames.Shutdown(None, "orchestrator_shutdown"))))

    def _welcome(self, hello: frames.Frame) -> None:
        body = frames.Welcome(version=1, principal="agent", broker="b", credit=64, max_frame=1, epoch=1)
        body = structs.replace(body, instance_key=self._event_id, spec=to_raw(self._spec))
        self._say(frames.Frame("welcome", in_reply_to=hello.id, payload=to_raw(body)))
        event = frames.AgentEvent(id=self._event_id, type="warm-up", created_at="", input=f"/{_TOOL.name} a=1")
        self._say(frames.Frame("event", event_id=event.id, epoch=1, payload=to_raw(event)))

    def _say(self, frame: frames.Frame) -> None:
        self._said.append(encode(frame))
        if self._loop is not None:
            self._loop.call_soon(self._on_messages)

    def pause(self) -> None:
        """No payload is large here."""

    def resume(self) -> None:
        """See `pause`."""

    async def drain(self, messages: deque[bytes]) -> None:
        """Hear the last ones."""
        self.send(messages)

    def close(self) -> None:
        """There is nothing to close."""
