"""Which system calls a jail may make, and three processes of our own: a tool host under root, the egress proxy, MCP
workers. Pure.

Rules.
- A call that is not listed fails with ENOSYS, so that programs fall back as on an older kernel. `clone3` and `openat2`
  are left out on purpose: their arguments lie in memory, where a filter cannot look. libc falls back to `clone` and
  `openat`.
- A call that is listed as refused fails with EPERM, so that a program says "not permitted" and not "too old".
- A condition looks at the low 32 bits of an argument. The Linux kernel reads all of these arguments as 32 bits wide, so
  the bits above must not matter here either.
- Nobody can set the set-user-id or set-group-id bits of a file: on disk, files of a jail belong to the operator.

**The tool host** may make those of its jails, without starting anything. It keeps powers that are harmless only in its
own hands: to read what others' processes show of themselves, to pass closed folders, to end processes. With `ptrace`,
`process_vm_writev` or `pidfd_getfd` the first would be control of root's processes, with `open_by_handle_at` the second
a way to any file of the disk, with `linkat` on a descriptor one to give it another name. None of them is there, nor a
program to start, a namespace to enter, a mount to make, a module, a key, a BPF program or an io_uring, whose calls no
filter sees.

**The egress proxy** reads what strangers send, on both sides. It gets files to read, sockets, waiting, memory and
threads. If a stranger takes it over, the Linux kernel lets it do no more than this: no program can be started, no
process be signalled or looked into, nothing on disk be written or changed, no code be made of memory, and no socket but
of IP and those that it was given. It asks for names by files and DNS: the daemons of the host that also answer such
questions are behind local sockets, like much else.

**An MCP worker** reads what a hostile server says. It gets what the proxy gets, and can make no socket but a pair of
its own: those that it needs are handed to it. Its template may fork besides, and hold a descriptor of what it has
forked.

Source: docs/design/sandbox.md sections 3.1, 3.4, 6 and 8; docs/decisions/024 and 039.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

EPERM: Final = 1
EACCES: Final = 13
EINVAL: Final = 22
ENOTTY: Final = 25
ENOSYS: Final = 38
EOPNOTSUPP: Final = 95
EAFNOSUPPORT: Final = 97

#: The outcome of a rule: 0 lets the call through, any other number is the errno that it fails with.
ALLOW: Final = 0
Verdict = int


class Test(Struct, frozen=True):
    """A question about one argument of a call: whether it has one of some values."""

    #: Which argument; 0 is the first.
    arg: int
    #: The bits of the argument that count.
    mask: int
    #: The values that are looked for.
    values: tuple[int, ...]
    #: Turn the answer round: the argument must have none of the values.
    unless: bool = False


class Case(Struct, frozen=True):
    """What happens when every test holds."""

    #: All of these have to hold.
    tests: tuple[Test, ...]
    #: What happens then.
    verdict: Verdict


class Rule(Struct, frozen=True):
    """Its `cases` are tried in order, and the first that holds counts. `otherwise` counts when none holds."""

    #: The cases, in order.
    cases: tuple[Case, ...]
    #: What happens when none holds.
    otherwise: Verdict


ALL_BITS: Final = 0xFFFFFFFF


def one_of(arg: int, values: tuple[int, ...]) -> Test:
    """Whether an argument is one of these."""
    return Test(arg, ALL_BITS, values)


def none_of(arg: int, bits: int) -> Test:
    """Whether an argument has none of these bits."""
    return Test(arg, bits, (0,))


def any_of(arg: int, bits: int) -> Test:
    """Whether an argument has one of these bits at least."""
    return Test(arg, bits, (0,), unless=True)


def allowed_if(*cases: tuple[Test, ...], otherwise: Verdict = EPERM) -> Rule:
    """Let through when all tests of one case hold."""
    return Rule(tuple(Case(tests, ALLOW) for tests in cases), otherwise)


def refused_if(*cases: tuple[Test, ...], verdict: Verdict = EPERM) -> Rule:
    """Refused when all tests of one case hold."""
    return Rule(tuple(Case(tests, verdict) for tests in cases), ALLOW)


# --- without conditions ---------------------------------------------------------------------------------------------

_ALLOWED: Final = """
read write close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64
pwrite64 readv writev preadv pwritev preadv2 pwritev2 access faccessat faccessat2 pipe pipe2 select pselect6 ppoll
sched_yield mremap msync mincore madvise dup dup2 dup3 pause nanosleep getitimer setitimer alarm getpid sendfile
sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown getsockname getpeername setsockopt getsockopt fork vfork
execve execveat exit exit_group wait4 waitid kill tkill tgkill uname flock fsync fdatasync truncate ftruncate
getdents getdents64 getcwd chdir fchdir rename renameat mkdir mkdirat rmdir link linkat unlink unlinkat
symlink symlinkat readlink readlinkat chown fchown lchown fchownat umask gettimeofday getrlimit setrlimit prlimit64
getrusage sysinfo times getuid getgid geteuid getegid setuid setgid setreuid setregid setresuid setresgid getresuid
getresgid setfsuid setfsgid getgroups setgroups setpgid getpgid getpgrp getppid getsid capget capset rt_sigpending
rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo rt_sigsuspend sigaltstack utime utimes futimesat utimensat statfs
fstatfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval sched_setaffinity sched_getaffinity sched_setattr
sched_getattr mlock mlock2 munlock mlockall munlockall arch_prctl sync syncfs sync_file_range gettid readahead
fadvise64 getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr time futex futex_waitv futex_wake
futex_wait futex_requeue set_tid_address set_robust_list get_robust_list restart_syscall rseq membarrier epoll_create
epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 timer_create timer_settime timer_gettime timer_getoverrun
timer_delete timerfd_create timerfd_settime timerfd_gettime clock_gettime clock_getres clock_nanosleep inotify_init
inotify_init1 inotify_add_watch inotify_rm_watch signalfd signalfd4 eventfd eventfd2 newfstatat statx splice tee
vmsplice copy_file_range getrandom memfd_create getcpu pkey_alloc pkey_free pkey_mprotect mseal cachestat close_range
pidfd_open pidfd_send_signal landlock_create_ruleset landlock_add_rule landlock_restrict_self
"""
ALLOWED: Final = tuple(_ALLOWED.split())

#: Calls that are refused by name, grouped by what they are: parts of the Linux kernel that no tool needs, the memory of
#: other processes, and ways to a namespace or a mount in which a process would be root.
REFUSED: Final[dict[str, tuple[str, ...]]] = {
    "keyring": ("add_key", "request_key", "keyctl"),
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "perf": ("perf_event_open",),
    "bpf": ("bpf",),
    "userfaultfd": ("userfaultfd",),
    "namespaces": ("unshare", "setns"),
    "mounts": (
        "mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "mount_setattr",
        "fsopen", "fsconfig", "fsmount", "fspick",
    ),
    "System V IPC": (
        "shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semtimedop", "semctl",
        "msgget", "msgsnd", "msgrcv", "msgctl",
    ),
    "other processes": ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    "sessions": ("setsid",),  # a session is what the scheduler's autogroup shares the processor by: one per jail
}  # fmt: skip

#: Fail as on a file system without extended attributes, which programs can handle. Attributes would stay on the
#: operator's disk.
NO_ATTRIBUTES: Final = ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr")

#: It takes gigabytes of disk before anybody can look. It fails as on a file system without it, and libc then writes.
NO_ALLOCATION: Final = ("fallocate",)

# --- file modes -----------------------------------------------------------------------------------------------------

_SET_ID: Final = 0o6000
_O_CREAT: Final = 0o100
_O_TMPFILE: Final = 0o20000000
_S_IFMT: Final = 0o170000
_DEVICES: Final = (0o020000, 0o060000)
#: Which argument is the mode.
_MODES: Final = {"creat": 1, "chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2}


def _mode(mode: int) -> Rule:
    return refused_if((any_of(mode, _SET_ID),))


def _open(flags: int, mode: int) -> Rule:
    creates = any_of(flags, _O_CREAT | _O_TMPFILE)  # only then does the kernel read a mode
    return refused_if((creates, any_of(mode, _SET_ID)))


def _mknod(mode: int) -> Rule:
    return refused_if((any_of(mode, _SET_ID),), (Test(mode, _S_IFMT, _DEVICES),))


# --- what others would notice ---------------------------------------------------------------------------------------

#: F_SETLEASE, F_NOTIFY, F_SETDELEG fail as on a file system without leases. A program that opens a leased file waits
#: for the holder, up to 45 s each time. A descriptor for reading is enough to keep an operator's editor or git from
#: writing.
_LEASES: Final = (1024, 1026, 1040)
#: RENAME_WHITEOUT leaves a device on the operator's disk.
_RENAME_WHITEOUT: Final = 4

# --- processes ------------------------------------------------------------------------------------------------------

#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; NEWTIME is no flag of this call.
CLONE_NEW: Final = 0x7E020000
#: The new process is a child of the caller's parent. In a jail without namespaces that parent is the tool host, which
#: would have to reap it.
CLONE_PARENT: Final = 0x8000
#: TIOCSTI types into somebody's terminal, TIOCLINUX into the console; TIOCSETD and TIOCCONS reach drivers.
_TERMINAL: Final = (0x5412, 0x541C, 0x5423, 0x541D)
#: Arguments of `personality`: Linux's own one, and the question which one is set. Others loosen the protection of
#: memory.
_PERSONALITIES: Final = (0, 0xFFFFFFFF)
#: Options of `prctl`: names, death signals, timer slack, subreapers, no-new-privileges, huge pages, names of memory,
#: and questions.
_PRCTL: Final = (1, 2, 3, 4, 15, 16, 21, 23, 27, 29, 30, 36, 37, 38, 39, 40, 41, 42, 47, 52, 0x53564D41)

# --- sockets --------------------------------------------------------------------------------------------------------

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5
#: The bits of a socket's type. The flags SOCK_NONBLOCK and SOCK_CLOEXEC are above them.
TYPE: Final = 0xF
_ANY_PROTOCOL, _TCP, _UDP = 0, 6, 17
_ROUTE: Final = 0
#: NETLINK_ROUTE: libc asks it for addresses and interfaces.
NETLINK: Final = (one_of(0, (AF_NETLINK,)), Test(1, TYPE, (RAW, DGRAM)), one_of(2, (_ROUTE,)))

#: Both ends of the pair are in the jail. A datagram socket could still send, or be connected, to another place.
_LINKED: Final = allowed_if((one_of(0, (AF_UNIX,)), Test(1, TYPE, (STREAM, SEQPACKET))))
#: No AF_UNIX: a grant names hosts, and a program may listen at a path in an operator's workdir.
_IP: Final = (one_of(0, (AF_INET, AF_INET6)), Test(1, TYPE, (STREAM, DGRAM)), one_of(2, (_ANY_PROTOCOL, _TCP, _UDP)))
_FAMILIES: Final = Case((one_of(0, (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)),), EPERM)
_SOCKET: Final = Rule((Case(_IP, ALLOW), Case(NETLINK, ALLOW), _FAMILIES), EAFNOSUPPORT)
_USES_OF_SOCKETS: Final = ("connect", "bind", "listen", "accept", "accept4")


# --- the fork server of a jail ---------------------------------------------------------------------------------------

#: CLONE_NEWNS, NEWIPC and NEWPID make the namespaces of one call. No call needs the others.
_NOT_OF_A_CALL: Final = CLONE_NEW & ~0x28020000 | CLONE_PARENT
#: Flags that change a mount that is there: remounting, moving and sharing (UNBINDABLE, PRIVATE, SLAVE, SHARED). A fork
#: server may only make new mounts.
_MS_OTHER: Final = 32 | 8192 | 0xF << 17
#: PR_SET_SECCOMP, PR_CAPBSET_DROP.
_PRCTL_OF_A_SERVER: Final = (*_PRCTL, 22, 24)
_OF_A_SERVER: Final[dict[str, Rule]] = {
    "clone": allowed_if((none_of(0, _NOT_OF_A_CALL),)),
    "mount": allowed_if((none_of(3, _MS_OTHER),)),
    "prctl": allowed_if((one_of(0, _PRCTL_OF_A_SERVER),), otherwise=EINVAL),
}


# --- a jail that drops root itself ------------------------------------------------------------------------------------

#: PR_CAPBSET_DROP: the kernel refuses it to a process without the capability, and only the boot stage has that one.
_OF_ONE_THAT_DROPS: Final = {"prctl": allowed_if((one_of(0, (*_PRCTL, 24)),), otherwise=EINVAL)}


# --- a jail without mounts and namespaces ---------------------------------------------------------------------------

#: Such a jail is the operator's own user, and Landlock does not decide about these calls. They would work on every file
#: of that user, by a path or by a descriptor opened for reading. A watch (inotify) tells names in folders that
#: cannot be listed.
_OF_ANY_FILE: Final = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "utime", "utimes", "futimesat", "utimensat", "inotify_add_watch",
)  # fmt: skip
_ATTRIBUTES_READ: Final = ("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr")
#: Requests for terminals, pipes and descriptors. Others set flags of files that are open for reading, or seal them.
_IOCTL: Final = (
    0x5401, 0x5402, 0x5403, 0x5404, 0x540F, 0x5410, 0x5411, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x5452,
)  # fmt: skip
#: These would work on every process of that user. The first argument names the process; 0 is the caller.
_OF_ANY_PROCESS: Final = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
_ITSELF: Final = one_of(0, (0,))
_BARE: Final[dict[str, Rule]] = {
    **dict.fromkeys(_OF_ANY_FILE, Rule((), EPERM)),
    **dict.fromkeys(_ATTRIBUTES_READ, Rule((), EOPNOTSUPP)),
    **dict.fromkeys(_OF_ANY_PROCESS, allowed_if((_ITSELF,))),
    "ioctl": allowed_if((one_of(1, _IOCTL),), otherwise=ENOTTY),
    # PRIO_PROCESS, and not all processes of a group or a user.
    "setpriority": allowed_if((_ITSELF, one_of(1, (0,)))),
}


def rules(*, sockets: bool, server: bool = False, drops: bool = False, bare: bool = False) -> dict[str, Rule]:
    """The rule of every call that has one; all others fail with ENOSYS.

    `sockets`: the tool was granted a network. `server`: for a jail's fork server, which puts up the walls around each
    call and then adds the filter without `server`. Filters add up, so this one allows everything that the other allows.
    `drops`: the jail begins as root. `bare`: for a jail without mounts and namespaces (the reduced tier), where paths
    and process numbers are the host's.
    """
    made = dict.fromkeys(ALLOWED, Rule((), ALLOW))
    made |= {name: Rule((), EPERM) for names in REFUSED.values() for name in names}
    made |= dict.fromkeys((*NO_ATTRIBUTES, *NO_ALLOCATION), Rule((), EOPNOTSUPP))
    made |= dict.fromkeys(_USES_OF_SOCKETS, Rule((), ALLOW if sockets else EPERM))
    made |= {
        "open": _open(1, 2),
        "openat": _open(2, 3),
        **{name: _mode(mode) for name, mode in _MODES.items()},
        "mknod": _mknod(1),
        "mknodat": _mknod(2),
        "clone": allowed_if((none_of(0, CLONE_NEW | CLONE_PARENT),)),
        "ioctl": refused_if((one_of(1, _TERMINAL),)),
        "personality": allowed_if((one_of(0, _PERSONALITIES),)),
        "prctl": allowed_if((one_of(0, _PRCTL),), otherwise=EINVAL),
        "socket": _SOCKET if sockets else Rule((), EPERM),
        "socketpair": _LINKED,
        "fcntl": refused_if((one_of(1, _LEASES),), verdict=EINVAL),
        "renameat2": refused_if((any_of(4, _RENAME_WHITEOUT),), verdict=EINVAL),
    }
    if bare:
        return made | _BARE
    return made | (_OF_A_SERVER if server else _OF_ONE_THAT_DROPS if drops else {})


# --- processes of our own ---------------------------------------------------------------------------------------------

_CLONE_THREAD: Final = 0x10000
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_EXECUTABLE: Final = any_of(2, _PROT_EXEC)
#: New threads, and no processes. Libraries are mapped from files; nothing else becomes code.
_OF_BOTH: Final[dict[str, Rule]] = {
    "clone": allowed_if((none_of(0, CLONE_NEW), any_of(0, _CLONE_THREAD))),
    "mmap": refused_if((_EXECUTABLE, any_of(2, _PROT_WRITE)), (_EXECUTABLE, any_of(3, _MAP_ANONYMOUS))),
    "mprotect": refused_if((_EXECUTABLE,)),
}

#: What every jail may and a tool host may not: starting programs, other names for a file, being somebody else.
NOT_OF_A_HOST: Final = (
    "fork", "vfork", "execve", "execveat", "link", "linkat", "mknod", "mknodat",
    "chown", "fchown", "lchown", "fchownat",
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups", "capset",
    "personality", "setpriority", "open_by_handle_at", "name_to_handle_at", "truncate", "symlink", "symlinkat",
)  # fmt: skip
#: Death signals, names of threads and of memory, and questions.
_PRCTL_OF_A_HOST: Final = (1, 2, 3, 15, 16, 21, 23, 27, 30, 39, 0x53564D41)


def host_rules() -> dict[str, Rule]:
    """The rule of every call that has one; all others are ENOSYS."""
    made = rules(sockets=True)
    network = made["socket"]
    return {
        **made,
        **dict.fromkeys(NOT_OF_A_HOST, Rule((), EPERM)),
        **_OF_BOTH,
        # The bus is a local socket, and so is the way to the privileged helper.
        "socket": Rule((Case((one_of(0, (AF_UNIX,)),), ALLOW), *network.cases), network.otherwise),
        "prctl": allowed_if((one_of(0, _PRCTL_OF_A_HOST),)),
        "prlimit64": allowed_if((one_of(0, (0,)),), (one_of(2, (0,)),)),
    }


_OF_THE_PROXY: Final = """
read write close fstat newfstatat stat lstat statx lseek poll ppoll select pselect6 munmap brk rt_sigaction
rt_sigprocmask rt_sigreturn sigaltstack pread64 readv writev access faccessat faccessat2 pipe2 sched_yield mremap
madvise dup nanosleep clock_nanosleep getpid gettid getuid geteuid getgid getegid sendto recvfrom sendmsg recvmsg
sendmmsg recvmmsg shutdown getsockname getpeername setsockopt getsockopt connect bind listen accept accept4 exit
exit_group uname fcntl getcwd readlink readlinkat gettimeofday clock_gettime clock_getres time getdents64 epoll_create1
epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd2 futex futex_waitv getrandom set_robust_list set_tid_address rseq
restart_syscall sched_getaffinity membarrier getcpu
"""
#: Writing, creating, truncating, and files without a name.
_MORE_THAN_READING: Final = 0o3 | 0o100 | 0o1000 | 0o20000000
#: FIOCLEX, FIONCLEX, FIONBIO, FIONREAD.
_IOCTL_OF_THE_PROXY: Final = (0x5451, 0x5450, 0x5421, 0x541B)
#: Names of threads and of memory.
_PRCTL_OF_THE_PROXY: Final = (15, 16, 0x53564D41)


def relay_rules() -> dict[str, Rule]:
    """The rule of every call that has one; all others are ENOSYS."""
    return {
        **dict.fromkeys(_OF_THE_PROXY.split(), Rule((), ALLOW)),
        **_OF_BOTH,
        "open": allowed_if((none_of(1, _MORE_THAN_READING),), otherwise=EACCES),
        "openat": allowed_if((none_of(2, _MORE_THAN_READING),), otherwise=EACCES),
        "ioctl": allowed_if((one_of(1, _IOCTL_OF_THE_PROXY),)),
        "prctl": allowed_if((one_of(0, _PRCTL_OF_THE_PROXY),)),
        "prlimit64": allowed_if((one_of(2, (0,)),)),
        "socket": allowed_if(
            (one_of(0, (AF_INET, AF_INET6)), Test(1, TYPE, (STREAM, DGRAM))),
            NETLINK,
            otherwise=EAFNOSUPPORT,
        ),
        "socketpair": allowed_if((one_of(0, (AF_UNIX,)), Test(1, TYPE, (STREAM,)))),
    }


#: Ways to the outside.
_TO_THE_OUTSIDE: Final = ("connect", "bind", "listen", "accept", "accept4", "sendmmsg", "recvmmsg")
#: Giving the descriptors of a forked worker their places, and holding it by a descriptor.
_OF_A_TEMPLATE: Final = ("dup2", "dup3", "getppid", "pidfd_open")
#: Death signals, and the filter that a worker puts on top.
_PRCTL_OF_A_TEMPLATE: Final = (1, 22, *_PRCTL_OF_THE_PROXY)


def worker_rules() -> dict[str, Rule]:
    """The rule of every call that an MCP worker has; all others are ENOSYS."""
    return {
        **relay_rules(),
        **dict.fromkeys(("socket", *_TO_THE_OUTSIDE), Rule((), EPERM)),
    }


def template_rules() -> dict[str, Rule]:
    """The same for the template that MCP workers are forked from."""
    return {
        **worker_rules(),
        **dict.fromkeys(_OF_A_TEMPLATE, Rule((), ALLOW)),
        "clone": allowed_if((none_of(0, CLONE_NEW | CLONE_PARENT),)),
        "prctl": allowed_if((one_of(0, _PRCTL_OF_A_TEMPLATE),)),
    }
