"""File systems of their own for the workdirs that we make. The launcher is asked before a jail starts in one.

Rules.
- The jails in a workdir can together take the largest `diskMb` of theirs, whatever was there before. So the bound of
  all jails there is set again before each jail starts. Without a jail, others may write without a bound.
- A workdir that has an image is used with it or not at all, whatever the operator has chosen since.
- Where none can be made, this is logged once, and the watch looks at what is written.

The launcher does the part that needs root (`launcher/sized.py`). Use from the loop's thread only.

Source: docs/design/sandbox.md section 4.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from goondan.schemas.codec import DECODE_ERRORS
from goondan.schemas.errors import GoondanError, fail
from goondan.schemas.grantable import within
from goondan.schemas.launch import ToolHostSpec, ToolSpec
from goondan.toolhost.jails.launch import open_place
from goondan.toolhost.launcher.request import PATIENCE_S, Check, Held, Hold
from goondan.toolhost.launcher.sizes import IMAGE, MIB, POINT
from goondan.toolhost.privileges.launcher_link import LauncherLost
from goondan.toolhost.privileges.powers import Powers

#: How much longer we wait than the launcher itself does (seconds).
_LONGER_S: Final = 5.0
#: Largest answer (bytes): it is a sentence and a number.
_MAX_ANSWER: Final = 8192
#: Less room than this counts as none (bytes): writes come in pieces.
_FULL: Final = MIB
#: `<state_dir>/instances/<agent>/<key>/workspace`.
_DEPTH: Final = 4
_HELP: Final = 'docs/sandbox.md, "A file system for each workdir", says what can be done.'


def mount_point(workdir: str, state_dir: str) -> str | None:
    """The instance's workspace that `workdir` is or lies in (both resolved); None for somebody's own folder."""
    if not within(workdir, state_dir):
        return None
    parts = workdir[len(state_dir) :].strip("/").split("/")
    if len(parts) < _DEPTH or (parts[0], parts[3]) != ("instances", POINT):
        return None
    return "/".join([state_dir, *parts[:_DEPTH]])


class Claim(Struct, eq=False):
    """What one jail may take in its workdir."""

    #: The folder that has a file system of its own.
    point: str
    #: What the jail may take (bytes).
    size: int
    #: Whether the file system enforces that.
    sized: bool = False
    #: Whether all of `size` is available; False when the disk below has less room.
    whole: bool = False

    def limit_met(self) -> str | None:
        """The limit of its tool that has filled the file system; None while there is room."""
        with suppress(OSError):
            at = os.statvfs(self.point)
            if self.sized and at.f_favail == 0:
                return "files"
            if self.sized and self.whole and at.f_bavail * at.f_frsize < _FULL:
                return "diskMb"
        return None


class _Point(Struct, eq=False):
    #: Held while a bound is set, so that the last one to ask sets the one that counts.
    lock: asyncio.Lock
    #: Who needs it.
    claims: list[Claim] = []


class SizedWorkdirs:
    """The sized workdirs of one tool host."""

    def __init__(
        self, powers: Powers, folder: str | None = None, warn: Callable[[str], None] = lambda message: None
    ) -> None:
        """`folder` is one of ours: in it we can try whether such file systems can be made."""
        self._powers = powers
        self._folder = folder
        self._warn = warn
        self._said: set[str] = set()
        self._points: dict[str, _Point] = {}
        self._able: asyncio.Task[bool] | None = None
        self._left: set[asyncio.Task[None]] = set()

    def configure(self, spec: ToolHostSpec) -> None:
        """Find out whether this host can make them, as soon as the operator wants them."""
        if spec.sized_workdirs and self._able is None:
            self._able = asyncio.ensure_future(self._check())

    async def claim(self, tool: ToolSpec, workdir: str | None, spec: ToolHostSpec) -> Claim | None:
        """Let a jail of that tool take its `diskMb` there. None: the workdir has no file system of its own.

        `release` the claim when the jail is gone. Raises GoondanError E_SANDBOX_UNAVAILABLE when the workdir has one
        that cannot be used, E_SANDBOX_DENIED and OSError.
        """
        if workdir is None or tool.sandbox.isolation == "shared":
            return None
        state_dir = os.path.realpath(spec.state_dir)
        point = mount_point(os.path.realpath(workdir), state_dir)
        if point is None:
            return None
        make = spec.sized_workdirs and self._able is not None and await self._able
        if not make and not os.path.lexists(f"{os.path.dirname(point)}/{IMAGE}"):
            return None
        claim = Claim(point, tool.sandbox.limits.disk_mb * MIB)
        of_point = self._points.setdefault(point, _Point(asyncio.Lock()))
        of_point.claims.append(claim)
        try:
            async with of_point.lock:
                wanted = max(other.size for other in of_point.claims)
                await self._powers.offload.prepared(lambda: self._powers.make_workdir(point, state_dir))
                held = await self._ask(point, {"hold": wanted, "make": make})
        except BaseException:
            self.release(claim)
            raise
        if held["state"] == "refused":
            self.release(claim)
            raise fail("E_SANDBOX_UNAVAILABLE", f"the workdir {point}: {held['why']}", suggestion=_HELP)
        if held["state"] == "unable":
            self._say(f"{point} gets no file system of its own, so what is written there is watched: {held['why']}")
        claim.sized, claim.whole = held["state"] == "sized", held["allowed"] >= wanted
        return claim

    def release(self, claim: Claim | None) -> None:
        """The jail of the claim is gone."""
        if claim is not None and (of_point := self._points.get(claim.point)) is not None:
            of_point.claims.remove(claim)
            if not of_point.claims and claim.sized:
                leaving = asyncio.ensure_future(self._leave(claim.point, of_point))
                self._left.add(leaving)
                leaving.add_done_callback(self._left.discard)
            elif not of_point.claims and not of_point.lock.locked():
                del self._points[claim.point]

    async def settled(self) -> None:
        """Wait until workdirs without jails are given back what their jails could take."""
        await asyncio.gather(*self._left)

    async def _leave(self, point: str, of_point: _Point) -> None:
        async with of_point.lock:
            if not of_point.claims:
                with suppress(GoondanError, OSError):  # the next jail there will say what is wrong
                    await self._ask(point, {"hold": None, "make": False})
        if not of_point.claims:
            self._points.pop(point, None)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._warn(message)

    async def _check(self) -> bool:
        problem, folder = "the tool host has no folder of its own", self._folder
        if folder is not None:
            try:
                folder = self._powers.make_trial(folder)
                held = await self._ask(f"{folder}/{POINT}", {"check": True})
                problem = held["why"]
            except OSError as error:
                problem = error.strerror or str(error)
            with suppress(OSError):
                self._powers.remove_trial(folder)
        if problem:
            message = "disk.sized: workdirs get no file systems of their own here, what is written is watched instead"
            self._say(f"{message}: {problem}. `gdn doctor` says what would help.")
        return not problem

    async def _ask(self, point: str, request: Hold | Check) -> Held:
        """Ask the launcher about the folder of `point`. A lost launcher may have done it; the second try sees that."""
        try:
            return await self._ask_once(point, request)
        except LauncherLost:
            return await self._ask_once(point, request)

    async def _ask_once(self, point: str, request: Hold | Check) -> Held:
        folder = await self._powers.offload.prepared(lambda: open_place(os.path.dirname(point), "dir"))
        reading = -1
        try:
            reading, writing = os.pipe()
            try:
                answer, _ = await self._powers.launcher.ask(request, [folder, writing])
            finally:
                os.close(writing)
            if "later" not in answer:
                return msgspec.convert(answer, Held)
            return msgspec.json.decode(await _read(reading), type=Held)
        except DECODE_ERRORS:
            return {"state": "refused", "allowed": 0, "why": "mounting it has come to no end"}
        finally:
            os.close(folder)
            if reading >= 0:
                os.close(reading)


async def _read(fd: int) -> bytes:
    """Read until the other end is closed; b"" when that takes too long or brings too much.

    No transport: uvloop's closes the descriptor later, on its own, when its number may be another one's already.
    """
    loop, readable, data = asyncio.get_running_loop(), asyncio.Event(), b""
    os.set_blocking(fd, False)
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(PATIENCE_S + _LONGER_S):
            while len(data) <= _MAX_ANSWER:
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    piece = os.read(fd, _MAX_ANSWER + 1)
                    if not piece:
                        return data
                    data += piece
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(fd)
    return b""
