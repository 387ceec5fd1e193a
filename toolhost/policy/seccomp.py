"""System call filters of jails, and of processes of our own: a tool host under root, the egress proxy, MCP workers.

Rules say which calls each may make. A set of rules becomes a classic BPF program. Pure.

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

**The program** is as `bwrap --seccomp FD` and `prctl(PR_SET_SECCOMP)` take it. It finds the rule of a call by bisecting
the call numbers, so that its length does not matter much: some nine comparisons. For calls whose rule has no condition
the kernel remembers the verdict and does not run it at all. The numbers of two machines are here, of the calls that the
rules name, and of the two that tests ask for: they must stay out. The numbers are the kernel's, which never change.

Source: docs/design/sandbox.md sections 3.1, 3.4, 6 and 8; docs/decisions/024 and 039; the kernel's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; the kernel's seccomp_filter.rst (arguments
are 64 bits wide, little-endian on both machines) and bpf(4).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, Literal, NamedTuple

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


# --- the numbers of the calls -----------------------------------------------------------------------------------------

Machine = Literal["x86_64", "aarch64"]


def _table(text: str) -> dict[str, int]:
    """Names in the order of their numbers: where a number stands, the next name has it."""
    numbers: dict[str, int] = {}
    following = 0
    for word in text.split():
        if word.isdecimal():
            following = int(word)
        else:
            numbers[word] = following
            following += 1
    return numbers


_X86_64: Final = """
    0 read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
    shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
    sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
    clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock
    fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
    readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid
    104 getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups
    setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
    rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod 135 personality 137 statfs fstatfs 140
    getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall 155
    pivot_root 157 prctl arch_prctl 160 setrlimit chroot sync 165 mount umount2 186 gettid readahead setxattr
    lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
    fremovexattr tkill time futex sched_setaffinity sched_getaffinity 213 epoll_create 217 getdents64
    set_tid_address restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun
    timer_delete 228 clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes 247
    waitid add_key request_key keyctl 253 inotify_init inotify_add_watch inotify_rm_watch 257 openat mkdirat
    mknodat fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6
    ppoll unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice 280 utimensat epoll_pwait
    signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2
    epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg 302 prlimit64
    name_to_handle_at open_by_handle_at 306 syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev kcmp
    314 sched_setattr sched_getattr renameat2 318 getrandom memfd_create 321 bpf execveat userfaultfd membarrier
    mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx 334 rseq
"""

_AARCH64: Final = """
    5 setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
    lremovexattr fremovexattr getcwd 19 eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1
    inotify_add_watch inotify_rm_watch ioctl 32 flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2
    mount pivot_root 43 statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat
    fchownat fchown openat close 59 pipe2 61 getdents64 lseek read write readv writev pread64 pwrite64 preadv
    pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync
    sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat 90 capget capset personality exit
    exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer
    107 timer_create timer_gettime timer_getoverrun timer_settime timer_delete 113 clock_gettime clock_getres
    clock_nanosleep 117 ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam
    sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min
    sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction rt_sigprocmask
    rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority 143 setregid setgid setreuid
    setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups
    setgroups uname 163 getrlimit setrlimit getrusage umask prctl getcpu gettimeofday 172 getpid getppid getuid
    geteuid getgid getegid gettid sysinfo 186 msgget msgctl msgrcv msgsnd semget semctl semtimedop semop shmget
    shmctl shmat shmdt socket socketpair bind listen accept connect getsockname getpeername sendto recvfrom
    setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key keyctl clone
    execve mmap fadvise64 226 mprotect msync mlock munlock mlockall munlockall mincore madvise 240
    rt_tgsigqueueinfo perf_event_open accept4 recvmmsg 260 wait4 prlimit64 264 name_to_handle_at open_by_handle_at
    267 syncfs setns sendmmsg process_vm_readv process_vm_writev kcmp 274 sched_setattr sched_getattr renameat2 278
    getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
    pkey_mprotect pkey_alloc pkey_free statx 293 rseq
"""

#: Calls that came later have the same numbers on every machine.
_EVERYWHERE: Final = """
    424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig
    fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 441 epoll_pwait2 mount_setattr 444
    landlock_create_ruleset landlock_add_rule landlock_restrict_self 449 futex_waitv 451 cachestat fchmodat2 454
    futex_wake futex_wait futex_requeue 462 mseal 467 open_tree_attr
"""

NUMBERS: Final[dict[Machine, dict[str, int]]] = {
    "x86_64": _table(_X86_64 + _EVERYWHERE),
    "aarch64": _table(_AARCH64 + _EVERYWHERE),
}


# --- programs ---------------------------------------------------------------------------------------------------------

#: AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64: a call made another way (32 bits) has other numbers.
ARCHITECTURES: Final[dict[Machine, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

RET_ALLOW: Final = 0x7FFF0000
RET_ERRNO: Final = 0x00050000
RET_KILL_PROCESS: Final = 0x80000000

# struct seccomp_data: int nr, u32 arch, u64 instruction_pointer, u64 args[6]
_NR: Final = 0
_ARCH: Final = 4
_ARGS: Final = 16

LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP: Final = 0x05  # BPF_JMP | BPF_JA
JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN: Final = 0x06  # BPF_RET | BPF_K


class Instruction(NamedTuple):
    """One instruction: struct sock_filter."""

    #: The operation.
    code: int
    #: How many instructions a jump skips if its condition holds.
    jt: int
    #: How many it skips otherwise.
    jf: int
    #: The operand. Of JUMP: how many instructions it skips.
    k: int


@lru_cache
def program(machine: Machine, *, sockets: bool, server: bool = False, drops: bool = False, bare: bool = False) -> bytes:
    """The filter of a jail, as the array of struct sock_filter that the kernel takes. The arguments are those of
    `rules`.
    """
    return encode(instructions(machine, rules(sockets=sockets, server=server, drops=drops, bare=bare)))


_OWN_RULES: Final = {"relay": relay_rules, "worker": worker_rules, "template": template_rules, "host": host_rules}


@lru_cache
def own_program(whose: Literal["relay", "worker", "template", "host"], machine: Machine) -> bytes:
    """The filter of the egress proxy, of an MCP worker, of the template that workers are forked from, or of a tool host
    that root has started.
    """
    return encode(instructions(machine, _OWN_RULES[whose]()))


_INSTRUCTION: Final = struct.Struct("<HBBI")


def encode(code: list[Instruction]) -> bytes:
    """Instructions as the kernel reads them; both machines are little-endian."""
    return b"".join([_INSTRUCTION.pack(*instruction) for instruction in code])


def instructions(machine: Machine, wanted: dict[str, Rule]) -> list[Instruction]:
    """The program for these rules; names that the machine does not have are left out."""
    numbers = NUMBERS[machine]
    by_number = {numbers[name]: rule for name, rule in wanted.items() if name in numbers}
    return [
        Instruction(LOAD, 0, 0, _ARCH),
        Instruction(JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        Instruction(RETURN, 0, 0, RET_KILL_PROCESS),
        Instruction(LOAD, 0, 0, _NR),
        *_bisect(_ranges(by_number)),
    ]


def _ranges(by_number: dict[int, Rule]) -> list[tuple[int, Rule]]:
    """The whole space of numbers as ranges of one rule each: (first number, rule), in order from 0."""
    unknown = Rule((), ENOSYS)
    ranges: list[tuple[int, Rule]] = []
    for number in range(max(by_number) + 2):
        rule = by_number.get(number, unknown)
        if not ranges or ranges[-1][1] != rule:
            ranges.append((number, rule))
    return ranges


def _bisect(ranges: list[tuple[int, Rule]]) -> list[Instruction]:
    if len(ranges) == 1:
        return _judge(ranges[0][1])
    middle = len(ranges) // 2
    below, above = _bisect(ranges[:middle]), _bisect(ranges[middle:])
    # A conditional jump reaches 255 instructions, an unconditional one everywhere.
    return [
        Instruction(JUMP_AT_LEAST, 0, 1, ranges[middle][0]),
        Instruction(JUMP, 0, 0, len(below)),
        *below,
        *above,
    ]


def _judge(rule: Rule) -> list[Instruction]:
    code: list[Instruction] = []
    for case in rule.cases:
        code += _all_hold(list(case.tests), [_return(case.verdict)])
    return [*code, _return(rule.otherwise)]


def _all_hold(tests: list[Test], then: list[Instruction]) -> list[Instruction]:
    """`then` when all tests hold, and on with what follows it when one does not."""
    if not tests:
        return then
    test, then = tests[0], _all_hold(tests[1:], then)
    code = [Instruction(LOAD, 0, 0, _ARGS + 8 * test.arg)]
    if test.mask != 0xFFFFFFFF:
        code.append(Instruction(AND, 0, 0, test.mask))
    left = len(test.values)
    for value in test.values:
        left -= 1
        # On a match: past the other comparisons, and with `unless` past `then` as well. Else: the next comparison.
        matched = left + (len(then) if test.unless else 0)
        missed = 0 if left or test.unless else len(then)
        code.append(Instruction(JUMP_EQUAL, matched, missed, value))
    return code + then


def _return(verdict: Verdict) -> Instruction:
    return Instruction(RETURN, 0, 0, RET_ALLOW if verdict == ALLOW else RET_ERRNO | verdict)
