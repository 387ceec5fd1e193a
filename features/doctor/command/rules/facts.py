"""What `gdn doctor` knows about this machine before it judges (pure). No fact holds the value of a variable.

Numbers are None, and texts empty, where the system does not say. A limit of -1 means: no limit.

Source: docs/design/commands.md section 7; docs/design/sandbox.md sections 3, 4 and 7.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from goondan.features.model_servers.api.listing import Learned
from goondan.kernel.bundle.rules.problems import Problem
from goondan.schemas.wire.frames import ErrorPayload
from goondan.schemas.worker import receipts, tool_host_reports

UNLIMITED = -1


class Versions(Struct, frozen=True, kw_only=True):
    """The versions of the programs that run."""

    #: This kernel.
    kernel: str
    #: Python.
    python: str
    #: The binding of libzmq.
    pyzmq: str
    #: The library.
    libzmq: str
    #: It can use sockets within one machine.
    libzmq_ipc: bool = True
    #: Entries of PYTHONPATH that are empty or relative: Python imports from the folder that `gdn` is called in.
    current_folder: list[str] = []
    #: The operating system.
    system: str = "Linux"
    #: Its release.
    release: str = ""
    #: The type of its processor.
    machine: str = ""


class Cgroup(Struct, frozen=True):
    """The control group of this process. Whether jails get some of their own is the survey's to say."""

    #: The version of control groups.
    version: Literal["v2", "v1", "none"]
    #: Its path below the root of control groups.
    path: str = ""


class Lack(Struct, frozen=True):
    """One place that cannot be used, why, and what would help."""

    #: The place.
    what: str
    #: Why it cannot be used.
    problem: str
    #: What would help.
    fix: str


class Survey(Struct, frozen=True, rename="camel", kw_only=True):
    """The answer of `python -m goondan.toolhost.survey` after it has started a jail, as far as it is used here."""

    #: The sandbox that tools get. None: none can run, and `findings` say why.
    tier: receipts.Tier | None
    #: The walls that a jail has.
    walls: list[str] = []
    #: Remarks on them.
    notes: list[str] = []
    #: What stands between this host and the full sandbox.
    findings: list[tool_host_reports.Obstacle] = []
    #: Path of bubblewrap.
    bwrap: str | None = None
    #: Its version.
    bwrap_version: str | None = None
    #: Version of Landlock. 0: there is none.
    landlock: int = 0
    #: What keeps each limit of a jail.
    limits: dict[str, str] = {}
    #: The user of a tool host. None: it was not said.
    user: int | None = None


class Host(Struct, frozen=True, kw_only=True):
    """What else has an effect on jails. The three fields about user namespaces are sysctls, None where this system has
    none.
    """

    #: The user.
    uid: int
    #: The first and the last user that root's tool hosts and their jails can have.
    user_numbers: tuple[int, int] = (0, 0)
    #: What is wrong with the setting of these numbers. "": nothing.
    numbers_problem: str = ""
    #: An account of this machine that has one of these numbers. "": none has.
    numbers_account: str = ""
    #: A bubblewrap on the PATH that is setuid. "": there is none.
    setuid_bwrap: str = ""
    #: AppArmor restricts user namespaces.
    apparmor_userns: int | None = None
    #: Ordinary users may make user namespaces.
    userns_clone: int | None = None
    #: How many user namespaces there may be.
    max_userns: int | None = None
    #: The control group.
    cgroup: Cgroup = Cgroup("none")
    #: systemd runs this machine.
    systemd: bool = True


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of this process: first the soft one, then the hard one."""

    #: Open files.
    open_files: tuple[int, int]
    #: Processes.
    processes: tuple[int, int]
    #: The limit of its control group. None: there is none.
    pids_max: int | None = None


class Variable(Struct, frozen=True, kw_only=True):
    """One environment variable."""

    #: Its name.
    name: str
    #: It is set.
    is_set: bool
    #: Who needs it.
    wanted_by: str = ""
    #: Its value begins or ends with white space.
    padded: bool = False


class Folder(Struct, frozen=True, kw_only=True):
    """A folder in which files are written."""

    #: Where it is.
    path: str
    #: Why files cannot be written there.
    problem: str | None = None
    #: How many bytes are free.
    free_bytes: int | None = None
    #: How many files can be made.
    free_files: int | None = None
    #: The type of its file system.
    filesystem: str = ""


class StateLevel(Struct, frozen=True, kw_only=True):
    """One folder or file of the state that is not in order."""

    #: Where it is.
    path: str
    #: What is wrong.
    problem: str
    #: The next command mends it.
    mendable: bool


class StateLevels(Struct, frozen=True, kw_only=True):
    """The state root and its levels: whose they are, and what is wrong with them."""

    #: Path of the state root.
    root: str = ""
    #: Its owner. None: there is no state root yet.
    uid: int | None = None
    #: Its mode. None: there is no state root yet.
    mode: int | None = None
    #: How many levels were looked at.
    looked_at: int = 0
    #: The levels that are not in order.
    levels: list[StateLevel] = []
    #: Why commands do not use the state root. "": they use it.
    refused: str = ""
    #: What to do about it.
    fix: str = ""
    #: Why policies and records of trust are not read from it. None: they are.
    doubt: str | None = None
    #: It was chosen because there is no home directory.
    homeless: bool = False


class RunDir(Struct, frozen=True, kw_only=True):
    """The runtime directory: that of the kernel that runs, else the one that the next kernel will take."""

    #: Where it is. "": the next kernel will make a fresh one.
    path: str = ""
    #: Length of the longest path of a socket in it.
    socket_bytes: int = 0
    #: Why it cannot be used.
    problem: str | None = None
    #: What to do about it.
    fix: str = ""
    #: Usual places that cannot be used.
    unused: list[Lack] = []
    #: An XDG_RUNTIME_DIR that cannot be used. "": there is none such.
    unused_xdg: str = ""


class LockPlace(Struct, frozen=True, kw_only=True):
    """The folder of the locks and of the kernel's record, in the state."""

    #: Where it is.
    path: str = ""
    #: Why it cannot be used.
    problem: str | None = None
    #: What to do about it.
    fix: str = ""


class Running(Struct, frozen=True, kw_only=True):
    """The kernel of this bundle."""

    #: `left`: files of a killed kernel are there. `hangs`: it does not answer. `cut off`: its runtime directory was
    #: removed. `by hand`: a broker runs without a supervisor.
    status: Literal["none", "runs", "by hand", "hangs", "left", "cut off"] = "none"
    #: Its pid.
    pid: int | None = None
    #: How many processes it has.
    processes: int = 0


class Bundle(Struct, frozen=True, kw_only=True):
    """The bundle."""

    #: Where it is.
    path: str = ""
    #: Its errors.
    errors: list[Problem] = []
    #: Its warnings.
    warnings: list[Problem] = []
    #: How many problems more there are.
    dropped: int = 0
    #: Why it could not be looked at.
    refused: ErrorPayload | None = None


class Model(Struct, frozen=True, kw_only=True):
    """A model of the bundle's agents, and what its server has said."""

    #: The model in a few words, without its key.
    text: str
    #: Whether a key is sent.
    keyed: bool
    #: What was learned.
    learned: Learned


class ChosenServer(Struct, frozen=True, kw_only=True):
    """The model server of this machine that the person has chosen."""

    #: Its base URL.
    endpoint: str
    #: Somebody else listens on its port, so it is not used.
    taken: bool = False


class Runtime(Struct, frozen=True, kw_only=True):
    """A JavaScript runtime on this machine (kernel/bundle/javascript.py)."""

    #: Its name, such as `node`.
    name: str
    #: Its program.
    program: str
    #: How it was found.
    place: str
    #: Its version; '' when it does not say.
    version: str
    #: Why it is passed over; '' when it is not.
    problem: str


class Facts(Struct, frozen=True, kw_only=True):
    """Everything that was looked at."""

    #: The versions of the programs.
    versions: Versions
    #: The machine.
    host: Host
    #: The limits of this process.
    limits: Limits
    #: The environment variables that the bundle uses.
    variables: list[Variable]
    #: The folder of the state.
    state: Folder
    #: The state root and its levels.
    levels: StateLevels = StateLevels()
    #: The runtime directory.
    run_dir: RunDir
    #: The kernel of this bundle.
    running: Running
    #: The bundle.
    bundle: Bundle
    #: The tool host's half. None: it did not answer.
    survey: Survey | None = None
    #: The folder of the locks.
    lock: LockPlace = LockPlace()
    #: The models whose servers were asked.
    models: list[Model] = []
    #: The server that the person has chosen. None: they have chosen none.
    chosen: ChosenServer | None = None
    #: The JavaScript runtimes, those that are taken first before others.
    runtimes: list[Runtime] = []
    #: What helps where none of them can be used.
    runtimes_fix: str = ""
