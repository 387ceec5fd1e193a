"""The requests of the tool host to the launcher, for the type checker: nothing imports them when it runs.

    launch:   {"argv", "env", "folder", "places", "stage", "stages", "uid", "fallbackOwner", "enclosure", "joins",
               "niceness", "counted"}                           -> {"pid", "unmapped"} or {"error", "fix"}
    run:      {"program": "proxy" | "listen" | "worker", "arguments"}  -> {"pid"} or {"error"}
    prepare:  {"prepare": [owner uid, owner gid, uid]}              -> nothing
    prompt:   {"prompt": thread}: of the tool host, it comes first  -> nothing

A launch has the descriptors of `places`, in its order, then those of `stages`. Its answer has one descriptor, the
counter of processor time, if that was asked for and was possible. The descriptors of a run become its descriptors from
3 on.

Source: docs/design/sandbox.md section 3.1.
"""

from __future__ import annotations

from typing import Literal, TypedDict, final

#: What becomes of a stage whose owner cannot be shown as the jail's user, see Stage.
Unmapped = Literal["shown", "copied", "given", "refused"]


class Stage(TypedDict):
    """One place that the jail's user must be able to reach: mounted at `at`, under the stage, from a descriptor."""

    #: Where it is mounted: a number in the folder of all stages.
    at: str
    #: Whether the jail can only read it.
    readOnly: bool
    #: Whether its owner on disk is shown as the jail's user. What the jail's user makes there is the owner's, then.
    owned: bool
    #: Whether it is a folder, and not a file.
    folder: bool
    #: What becomes of it without `owned`, and where the file system cannot show owners as others. `shown`: as it is, so
    #: that the jail can read what anybody can. `copied`: the same, and copied if it is small and not everybody can read
    #: it. `given`: it is given to the fallback owner, who becomes the jail's user. `refused`: there is no jail.
    unmapped: Unmapped


class Enclosure(TypedDict):
    """A root directory of its own for a program that then stays root: see toolhost/policy/plan.py."""

    #: Paths of the host that show in it.
    shown: list[str]
    #: Links in it: (path, target).
    links: list[tuple[str, str]]
    #: Files in it: (path, text).
    texts: list[tuple[str, str]]
    #: Where the jail's home is.
    home: str
    #: Room of the home (bytes).
    homeBytes: int
    #: Whether it has a network namespace of its own.
    network: bool


class Enclosed(TypedDict):
    """How bubblewrap is started where it runs as root."""

    #: As a launch has it.
    enclosure: Enclosure
    #: As a launch has it.
    argv: list[str]
    #: The first options of bubblewrap, as words.
    walls: list[str]
    #: The place of the descriptor that options are read from.
    options: int
    #: The place of the descriptor that the system call filter is read from.
    filter: int


@final  # so that one of the two can be told from the other by a name
class Launch(TypedDict):
    """Run `argv` with the environment `env` and nothing open but the descriptors in `places` (their numbers there)."""

    #: The program and its arguments. Where something is staged that was copied, or there is an `enclosure`, the number
    #: of the jail's user is added, and behind it the paths that were copied.
    argv: list[str]
    #: Its environment.
    env: dict[str, str]
    #: Where to start. None for bubblewrap, which goes there itself; without bubblewrap the process also asks to die
    #: with the tool host.
    folder: str | None
    #: The numbers that descriptors get.
    places: list[int]
    #: The folder that the stages are mounted in, None without any.
    stage: str | None
    #: What is mounted there.
    stages: list[Stage]
    #: The user (and group) to become, None to stay who we are. With an `enclosure` it is not changed here.
    uid: int | None
    #: The user who takes the place of `uid` when something had to be given to it, or is its own.
    fallbackOwner: int | None
    #: The root directory of bubblewrap where that runs as root, else None.
    enclosure: Enclosure | None
    #: Files of control groups that let a process in when it writes "0" to them.
    joins: list[str]
    #: What the new session has against others where the scheduler groups by session.
    niceness: int
    #: Whether a counter of the processor time of all that runs there is wanted.
    counted: bool


@final
class Run(TypedDict):
    """Start one of the two programs of the egress folder, or the template of the workers of a feature. Our options come
    first, then `arguments`, then the numbers of the descriptors that it is given. The first argument of `worker` is the
    feature's name: it is not passed on.
    """

    program: Literal["proxy", "listen", "worker"]
    arguments: list[str]


class AllowList(TypedDict):
    """What a tool host may ask for. It is written while the tool host is still root."""

    #: The user of the tool host.
    user: int
    #: The first and the last user that a jail can be.
    jails: tuple[int, int]
    #: The first and the last user that the jails of one instance can be, where owners cannot be shown as others.
    instances: tuple[int, int]
    #: Folders that may be covered for a jail.
    stages: list[str]
    #: No folder that a jail can write to may be one of these, or lie in one.
    closed: list[str]
    #: No folder that a jail can write to may be one of these.
    top: list[str]
    #: No folder that a jail can write to may be or hold the home directory, or lie in a hidden folder of it.
    home: str
    #: The ways in which bubblewrap is started where it runs as root.
    enclosed: list[Enclosed]
    #: Each system call filter that may be put up there (hexadecimal).
    filters: list[str]
    #: The tool host's control groups.
    groups: list[str]
    #: How the paths of the groups begin that stand beside them; None without such groups.
    beside: str | None
    #: The names that placeholders have.
    guarded: list[str]
