"""A disk that loses power: which contents a folder may have when the machine stops at some point of a recorded trace.

The trace is what a program has asked the system for (strace). A write is certain to be on the disk when its file was
synced after it; until then it may be there, or not, or a part of it, each write by itself. A new or removed name is
certain when its folder was synced, or the file with that name; names change in order.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

#: What a disk writes whole or not at all (bytes).
SECTOR: Final = 512
_CALLS: Final = "openat,pwrite64,write,fsync,fdatasync,ftruncate,unlink,rename,fallocate"
_LINE: Final = re.compile(rb"^\d+ +(\w+)\((.*)\) = (-?\d+)")
_HEX: Final = re.compile(rb"\\x(..)")
_QUOTED: Final = re.compile(rb'"((?:\\x..)*)"(\.\.\.)?')
_FD: Final = re.compile(rb"^\d+<((?:\\x..|[^>])*)>")
_NUMBERS: Final = re.compile(rb", (-?\d+)")

#: How much of what is not certain is there after the cut.
Luck = Literal["none", "all", "some", "torn"]
LUCK: Final[tuple[Luck, ...]] = ("none", "all", "some", "torn")


@dataclass(frozen=True)
class Call:
    """One system call. `name`: of the file in the folder ("": the folder itself)."""

    kind: Literal["create", "write", "sync", "truncate", "unlink"]
    name: str
    at: int = 0
    data: bytes = b""


def record(command: Sequence[str], folder: Path, log: Path) -> list[Call]:
    """Run a program and return what it did in `folder`, in order. Its exit status must be 0."""
    options = ["-f", "-y", "-xx", "-s", "1000000", "-e", f"trace={_CALLS}", "-o", str(log)]
    subprocess.run(["strace", *options, *command], check=True)
    return list(_parse(log, folder))


def _parse(log: Path, folder: Path) -> Iterator[Call]:
    for line in log.read_bytes().splitlines():
        match = _LINE.match(line)
        if match is None or int(match[3]) < 0:
            assert b"unfinished" not in line, "the program has threads; their order is not known"
            continue
        call, arguments = match[1].decode(), match[2]
        strings = [_plain(found[1]) for found in _QUOTED.finditer(arguments)]
        of_fd = _FD.match(arguments)
        path = _plain(of_fd[1]).decode() if of_fd else strings[0].decode() if strings else ""
        if call == "openat":
            path = strings[0].decode()
        if Path(path) != folder and Path(path).parent != folder:
            continue
        name = "" if Path(path) == folder else Path(path).name
        numbers = [int(number) for number in _NUMBERS.findall(arguments)]
        if call == "openat":
            if b"O_CREAT" in arguments:
                yield Call("create", name)
        elif call == "pwrite64":
            yield Call("write", name, numbers[-1], strings[0])
        elif call == "write":
            yield Call("write", name, -1, strings[0])  # appended
        elif call in ("fsync", "fdatasync"):
            yield Call("sync", name)
        elif call == "ftruncate":
            yield Call("truncate", name, numbers[-1])
        elif call == "unlink":
            yield Call("unlink", name)
        else:
            raise AssertionError(f"{call} is not modelled")


def _plain(escaped: bytes) -> bytes:
    return _HEX.sub(lambda found: bytes([int(found[1], 16)]), escaped)


@dataclass
class _File:
    #: What is certain, and what may be there besides.
    content: bytearray = field(default_factory=bytearray)
    waiting: list[Call] = field(default_factory=list)
    size: int = 0


class Disk:
    """The folder as the disk has it, while the trace is played."""

    def __init__(self) -> None:
        #: Names that are certain, and changes of names that may have happened: a file, or None where it was removed.
        self._certain: dict[str, _File] = {}
        self._changes: list[tuple[str, _File | None]] = []
        #: What the running system sees.
        self._seen: dict[str, _File] = {}

    def play(self, call: Call) -> None:
        """One more call."""
        file = self._seen.get(call.name)
        if call.kind == "create":
            if file is None:
                self._seen[call.name] = made = _File()
                self._changes.append((call.name, made))
        elif call.kind == "unlink":
            del self._seen[call.name]
            self._changes.append((call.name, None))
        elif call.kind == "sync":
            self._sync(call.name, file)
        elif file is not None:
            at = file.size if call.at < 0 else call.at
            file.waiting.append(Call(call.kind, call.name, at, call.data))
            file.size = at if call.kind == "truncate" else max(file.size, at + len(call.data))

    def _sync(self, name: str, file: _File | None) -> None:
        last = len(self._changes) if file is None else 0
        for number, (_, changed) in enumerate(self._changes):
            if file is not None and changed is file:
                last = number + 1
        for changed_name, changed in self._changes[:last]:
            _rename(self._certain, changed_name, changed)
        del self._changes[:last]
        if file is not None:
            for call in file.waiting:
                _apply(file.content, call)
            file.waiting.clear()

    def seen(self, name: str) -> bytes:
        """A file as the running system sees it."""
        return self._content(self._seen[name], "all", random.Random(0)) if name in self._seen else b""

    def cut(self, luck: Luck, dice: random.Random) -> dict[str, bytes]:
        """The power is gone: what the folder holds at the next start."""
        names = dict(self._certain)
        count = {"none": 0, "all": len(self._changes)}.get(luck, dice.randint(0, len(self._changes)))
        for name, changed in self._changes[:count]:
            _rename(names, name, changed)
        return {name: self._content(file, luck, dice) for name, file in names.items()}

    @staticmethod
    def _content(file: _File, luck: Luck, dice: random.Random) -> bytes:
        content = bytearray(file.content)
        for call in file.waiting:
            if luck == "all" or (luck != "none" and dice.random() < 0.6):
                _apply(content, _torn(call, dice) if luck == "torn" else call)
        return bytes(content)


def _rename(names: dict[str, _File], name: str, file: _File | None) -> None:
    if file is None:
        names.pop(name, None)
    else:
        names[name] = file


def _apply(content: bytearray, call: Call) -> None:
    if call.kind == "truncate":
        del content[call.at :]
        content.extend(bytes(max(0, call.at - len(content))))
        return
    content.extend(bytes(max(0, call.at - len(content))))
    content[call.at : call.at + len(call.data)] = call.data


def _torn(call: Call, dice: random.Random) -> Call:
    """The first sectors of a write."""
    whole = dice.randint(0, (call.at % SECTOR + len(call.data)) // SECTOR)
    return Call(call.kind, call.name, call.at, call.data[: max(0, whole * SECTOR - call.at % SECTOR)])
