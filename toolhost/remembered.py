"""What the survey of an unchanged machine has found: a probe jail takes longer than all else that a tool host does
before it is ready.

A finding is kept in the tool host's own folder of the state, which no jail sees. It counts only while what it depends
on is the same, as far as we can see it (`premises`): this boot of this Linux kernel, its settings for namespaces, our
user, powers, namespaces and security label, and the files of bubblewrap, of the interpreter and of this package. Only
the best is kept: a host that lacks something is surveyed again at each start, because somebody may have mended it. The
first jail that cannot be made ends it. `gdn doctor` always surveys anew.

A finding is believed only from a file that nobody but us could have written. What it says decides how a jail is made;
each wall of it is raised for each jail, and one that cannot be raised fails the jail.

Source: docs/design/sandbox.md section 7.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.system.directories import DirectoryRefused, open_directory, replace_in
from goondan.schemas.worker.receipts import STRONGEST
from goondan.toolhost.lookup.this_host import PACKAGE
from goondan.toolhost.policy.limits import mechanisms
from goondan.toolhost.policy.plan import ROWS
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.survey import Survey, read_signs

#: A larger file was not written by us (bytes).
MAX_BYTES: Final = 64 << 10
#: What the system says of this process: its users, capabilities and filters.
_STATUS: Final = ("Uid", "Gid", "Cap", "NoNewPrivs", "Seccomp")
_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


class Finding(Struct, frozen=True, kw_only=True):
    """What a survey has found."""

    #: The digest of what it depends on.
    premises: str
    #: See Survey.
    notes: list[str]
    #: See HostFacts.
    disable_userns: bool
    #: See HostFacts.
    user_namespaces: bool
    #: See HostFacts.
    net_admin: bool
    #: Calls can be forked in a shared jail. False: that is not known.
    forks: bool = False


class Memory:
    """The finding in one file. `usual` are the facts of this machine (this_host.gather)."""

    def __init__(self, path: str, powers: Powers, usual: HostFacts, operator: int) -> None:
        """`operator` is the user that the state belongs to."""
        self._path = path
        self._usual = usual
        self._owners = (os.geteuid(), operator)
        self._premises = premises(powers, usual)
        self._found = self._read()

    @property
    def survey(self) -> Survey | None:
        """What was found; None: look."""
        found = self._found
        if found is None:
            return None
        facts = replace(
            self._usual,
            disable_userns=found.disable_userns,
            user_namespaces=found.user_namespaces,
            net_admin=found.net_admin,
        )
        return Survey(tier=facts.tier, walls=ROWS[facts.tier].walls(facts), notes=found.notes, facts=facts)

    @property
    def forks(self) -> bool:
        """Whether it is known that calls can be forked in a shared jail."""
        return self._found is not None and self._found.forks

    def keep(self, survey: Survey) -> None:
        """Remember what a survey has found."""
        facts = survey.facts
        whole = facts is not None and facts.user_namespaces and facts.net_admin
        if facts is not None and whole and facts.tier == STRONGEST and not survey.findings:
            self._write(
                Finding(
                    premises=self._premises,
                    notes=survey.notes,
                    disable_userns=facts.disable_userns,
                    user_namespaces=facts.user_namespaces,
                    net_admin=facts.net_admin,
                )
            )

    def keep_forks(self) -> None:
        """Remember that calls can be forked."""
        if self._found is not None:
            self._write(replace(self._found, forks=True))

    def forget(self) -> None:
        """Have the next tool host survey this machine anew: a jail could not be made."""
        self._found = None
        with suppress(OSError):
            os.unlink(self._path)

    def _write(self, found: Finding) -> None:
        self._found = found
        folder, name = os.path.split(self._path)
        with suppress(OSError, DirectoryRefused), open_directory(folder, owners=self._owners) as kept:
            replace_in(kept.fd, name, msgspec.json.encode(found))

    def _read(self) -> Finding | None:
        folder, name = os.path.split(self._path)
        try:
            with open_directory(folder, owners=self._owners) as kept:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=kept.fd)
            with open(fd, "rb") as file:
                state = os.fstat(fd)
                if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
                    return None
                found = msgspec.json.decode(file.read(MAX_BYTES), type=Finding)
        except (OSError, DirectoryRefused, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found if found.premises == self._premises else None


def premises(powers: Powers, usual: HostFacts) -> str:
    """A digest of everything that the result of a survey depends on."""
    facts = replace(usual, groups=None)  # whose names have our number
    told = [
        *os.uname(),
        _text("/proc/sys/kernel/random/boot_id"),
        _text("/proc/self/attr/current"),
        *(line for line in _text("/proc/self/status").splitlines() if line.startswith(_STATUS)),
        *_namespaces(),
        msgspec.json.encode([read_signs(powers, usual), facts, mechanisms(usual.groups), powers.operator]).decode(),
        *map(_identity, (usual.bwrap, usual.python, usual.perl, *_sources())),
    ]
    return hashlib.sha256("\0".join(told).encode("utf-8", "surrogateescape")).hexdigest()


def _namespaces() -> Iterator[str]:
    for name in _NAMESPACES:  # the folder itself cannot be listed by a process that closed its memory to others
        with suppress(OSError):
            yield os.readlink(f"/proc/self/ns/{name}")


def _sources() -> Iterator[str]:
    """The files of this package, compiled or not."""
    for folder, names, files in os.walk(PACKAGE):
        names[:] = sorted(name for name in names if name != "__pycache__")
        yield from (f"{folder}/{name}" for name in sorted(files))


def _identity(path: str) -> str:
    """What changes with a file's content, as far as its owner cannot set it."""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return (
        f"{path} {found.st_dev} {found.st_ino} {found.st_mode} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
    )


def _text(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as source:
        return source.read()
    return ""
