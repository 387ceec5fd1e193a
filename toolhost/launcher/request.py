"""What the tool host asks of the launcher: one JSON object per message of a SOCK_SEQPACKET socket, and descriptors.

    launch:   {"argv", "env", "folder", "places", "stage", "stages", "uid", "heir", "enclosure", "joins", "niceness",
               "counted"}                                       -> {"pid", "unmapped"} or {"error", "fix"}
    run:      {"program": "proxy" | "listen", "arguments"}          -> {"pid"} or {"error"}
    prepare:  {"prepare": [owner uid, owner gid, uid]}              -> nothing
    hold:     {"hold", "make"}                                      -> {"state", "allowed", "why"}
    check:    {"check": true}                                       -> {"state", "allowed", "why"}
    prompt:   {"prompt": thread}: of the tool host, it comes first  -> nothing

The descriptors of a launch are those of `places`, in its order, then those of `stages`. With its answer comes one, the
counter of processor time, if it was asked for and could be had. Those of a run become its descriptors from 3 on.
Those of `hold` and `check` are a folder and a pipe: what takes time is done by a process of its own, which writes the
answer into the pipe; what comes at once is {"later": true} then.
"""

from __future__ import annotations

from typing import Final, Literal, TypedDict, final

#: A request: arguments, places and stages of one jail, some kilobytes (bytes).
MAX_REQUEST: Final = 1 << 17
#: Descriptors in one message; the kernel's own limit is 253.
MAX_DESCRIPTORS: Final = 200
#: What a process may take that makes or mounts a file system (seconds): some ten milliseconds, and as long as a crash's
#: journal or a damaged one takes to read.
PATIENCE_S: Final = 60


class Stage(TypedDict):
    """One place that the jail's user must be able to reach: mounted at `at`, under the stage, from a descriptor.

    `owned`: its owner on disk is shown as the jail's user, and what the jail's user makes there is the owner's. Where
    the file system cannot do that, and without `owned`, `unmapped` says what then: `shown` as it is, so that the jail
    can read what anybody can; `copied` if it is small and not everybody can read it; `given` to the heir, who becomes
    the jail's user; `refused`.
    """

    at: str
    readOnly: bool
    owned: bool
    folder: bool
    unmapped: Literal["shown", "copied", "given", "refused"]


class Enclosure(TypedDict):
    """A root directory of its own for what is run, which then stays root: see toolhost/policy/enclosure.py."""

    shown: list[str]
    links: list[tuple[str, str]]
    texts: list[tuple[str, str]]
    home: str
    homeBytes: int
    network: bool


class Enclosed(TypedDict):
    """How bubblewrap is started where it runs as root. `enclosure` and `argv` are as a launch has them; `walls` are its
    first options, read from the descriptor that becomes `options`; `filters` are the SHA-256 (hexadecimal) of the
    system call filters that the descriptor `filter` may hold.
    """

    enclosure: Enclosure
    argv: list[str]
    walls: list[str]
    filters: list[str]
    options: int
    filter: int


@final  # so that one of the two can be told from the other by a name
class Launch(TypedDict):
    """Run `argv` with the environment `env` and nothing open but the descriptors in `places` (their numbers there).

    `folder` is where to start, None for bubblewrap, which goes there itself; without bubblewrap the process also asks
    to die with the tool host.

    `stage` is the folder that the stages are mounted in, None without any. `uid` is the user (and group) to become,
    None to stay who we are; `heir` takes its place when something had to be given to it, or is its own. With an
    `enclosure` the user is not changed here. Its number is then added to `argv`, and behind it the places that were
    copied; those alone, and the number, without an enclosure. `joins` are files of
    control groups that let a process in when it writes "0" to them. `niceness` is what the new session has against
    others where the scheduler groups by session. `counted`: attach a counter of the processor time of all that runs
    there.
    """

    argv: list[str]
    env: dict[str, str]
    folder: str | None
    places: list[int]
    stage: str | None
    stages: list[Stage]
    uid: int | None
    heir: int | None
    enclosure: Enclosure | None
    joins: list[str]
    niceness: int
    counted: bool


@final
class Run(TypedDict):
    """Start one of the two programs of the egress folder: its options are ours, then come `arguments`, then the numbers
    of the descriptors that it is given.
    """

    program: Literal["proxy", "listen"]
    arguments: list[str]


@final
class Hold(TypedDict):
    """Have jails able to take `hold` bytes in the workdir of an instance, whose folder comes with it; None: whatever
    there is, for whoever else writes there. `make`: an empty workdir gets a file system of its own.
    """

    hold: int | None
    make: bool


@final
class Check(TypedDict):
    """Find out, in an empty folder that comes with it, whether such file systems can be made here."""

    check: bool


class Held(TypedDict):
    """What became of it. `sized`: jails can take `allowed` bytes and no more. `watched`: the workdir has no file system
    of its own, and `why`; `unable`: because this host cannot make one. `refused`: it has one that cannot be used.
    """

    state: Literal["sized", "watched", "unable", "refused"]
    allowed: int
    why: str
