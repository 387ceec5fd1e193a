"""What `gdn doctor` knows about this machine before it judges (pure). No fact holds the value of a variable.

Numbers are None, and texts empty, where the system does not say. A limit of -1 means: no limit.

Source: docs/design/commands.md section 7; docs/design/sandbox.md sections 3, 4 and 7.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kernel.bundle.problems import Problem
from schemas.frames import ErrorPayload
from schemas.tool_host_reports import Obstacle

UNLIMITED = -1


class Versions(Struct, frozen=True, kw_only=True):
    """What runs. `libzmq_ipc`: whether libzmq can use the sockets of one machine at all. `current_folder`: the
    entries of PYTHONPATH, empty or relative, by which Python imports from the folder that `gdn` is called in.
    """

    kernel: str
    python: str
    pyzmq: str
    libzmq: str
    libzmq_ipc: bool = True
    current_folder: list[str] = []
    system: str = "Linux"
    release: str = ""
    machine: str = ""


class Cgroup(Struct, frozen=True):
    """The control group of this process. Whether jails get some of their own is the survey's to say."""

    version: Literal["v2", "v1", "none"]
    path: str = ""


class Lack(Struct, frozen=True):
    """One place that cannot be used, why, and what would help."""

    what: str
    problem: str
    fix: str


class Survey(Struct, frozen=True, rename="camel", kw_only=True):
    """What `python -m toolhost.survey` says after it has started a jail, as far as it is used here.

    `tier` is the sandbox that tools get, None when none can run and `findings` say why; `walls` are what a jail has,
    and `limits` what keeps each limit of it. `user` is who a tool host is, None when it was not said.
    """

    tier: Literal["full", "reduced"] | None
    walls: list[str] = []
    notes: list[str] = []
    findings: list[Obstacle] = []
    bwrap: str | None = None
    bwrap_version: str | None = None
    landlock: int = 0
    limits: dict[str, str] = {}
    user: int | None = None


class Host(Struct, frozen=True, kw_only=True):
    """What bears on jails beside the survey. The three numbers are sysctls, None where this system has none such.

    `setuid_bwrap` is a bubblewrap on the PATH that is setuid, "" without one. `systemd`: it runs this machine.
    `user_numbers` are the first and the last user that root's tool hosts and their jails can be, `numbers_problem` what
    is wrong with the setting of these, `numbers_account` an account of this machine that has one of them; "" for none.
    """

    uid: int
    user_numbers: tuple[int, int] = (0, 0)
    numbers_problem: str = ""
    numbers_account: str = ""
    setuid_bwrap: str = ""
    apparmor_userns: int | None = None
    userns_clone: int | None = None
    max_userns: int | None = None
    cgroup: Cgroup = Cgroup("none")
    systemd: bool = True


class Limits(Struct, frozen=True, kw_only=True):
    """Soft and hard limits of this process; `pids_max` is its control group's."""

    open_files: tuple[int, int]
    processes: tuple[int, int]
    pids_max: int | None = None


class Variable(Struct, frozen=True, kw_only=True):
    """One environment variable. `wanted_by`: who needs it; `padded`: its value begins or ends with white space."""

    name: str
    is_set: bool
    wanted_by: str = ""
    padded: bool = False


class Folder(Struct, frozen=True, kw_only=True):
    """A place where files are written. `problem` says why they cannot be; `filesystem` is its type."""

    path: str
    problem: str | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    filesystem: str = ""


class StateLevel(Struct, frozen=True, kw_only=True):
    """One folder or file of the state that is not in order. `mendable`: the next command mends it."""

    path: str
    problem: str
    mendable: bool


class StateLevels(Struct, frozen=True, kw_only=True):
    """Whose the state root and its levels are. `refused` says why commands do not use it; `levels` are those that are
    not in order, and `looked_at` how many were looked at; `doubt` says why policies and records of trust are not read
    from it, None when they are. `homeless`: it was chosen for want of a home directory. `uid` and `mode` are the
    root's, None as long as there is none.
    """

    root: str = ""
    uid: int | None = None
    mode: int | None = None
    looked_at: int = 0
    levels: list[StateLevel] = []
    refused: str = ""
    fix: str = ""
    doubt: str | None = None
    homeless: bool = False


class RunDir(Struct, frozen=True, kw_only=True):
    """The runtime directory: that of the kernel that runs, else the one that the next kernel will take.

    `path` is "" when that will be a fresh one. `socket_bytes` is the length of the longest path of a socket in it.
    `unused` are usual places that cannot be used. `unused_xdg` is an XDG_RUNTIME_DIR that cannot be used, "" when there
    is none such.
    """

    path: str = ""
    socket_bytes: int = 0
    problem: str | None = None
    fix: str = ""
    unused: list[Lack] = []
    unused_xdg: str = ""


class LockPlace(Struct, frozen=True, kw_only=True):
    """The folder of locks and record in the state. `problem` says why it cannot be used, and `fix` what to do."""

    path: str = ""
    problem: str | None = None
    fix: str = ""


class Sized(Struct, frozen=True, kw_only=True):
    """Whether workdirs can have file systems of their own: `state` is `sized` if so, else `why` says what lacks."""

    state: str
    why: str = ""


class Running(Struct, frozen=True, kw_only=True):
    """The kernel of this bundle. `left`: a killed kernel's files are there; `hangs`: it does not answer; `cut off`:
    its runtime directory was removed.
    """

    status: Literal["none", "runs", "by hand", "hangs", "left", "cut off"] = "none"
    pid: int | None = None
    processes: int = 0


class Bundle(Struct, frozen=True, kw_only=True):
    """The bundle. `refused` says why it could not even be looked at. `sized_workdirs`: the operator's policy wants
    file systems for workdirs.
    """

    path: str = ""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    dropped: int = 0
    refused: ErrorPayload | None = None
    sized_workdirs: bool = False


class Facts(Struct, frozen=True, kw_only=True):
    """Everything. `survey` is the tool host's half, None when it did not answer; `sized` is None if nobody wants it."""

    versions: Versions
    host: Host
    limits: Limits
    variables: list[Variable]
    state: Folder
    levels: StateLevels = StateLevels()
    run_dir: RunDir
    running: Running
    bundle: Bundle
    survey: Survey | None = None
    sized: Sized | None = None
    lock: LockPlace = LockPlace()
