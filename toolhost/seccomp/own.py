"""Which system calls three processes of our own may make: a tool host under root, the egress proxy, MCP workers. Pure.

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

Source: docs/design/sandbox.md sections 3.1, 6 and 8; docs/decisions/024 and 039.
"""

from __future__ import annotations

from typing import Final

from goondan.toolhost.seccomp import rules

_CLONE_THREAD: Final = 0x10000
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_EXECUTABLE: Final = rules.any_of(2, _PROT_EXEC)
#: New threads, and no processes. Libraries are mapped from files; nothing else becomes code.
_OF_BOTH: Final[dict[str, rules.Rule]] = {
    "clone": rules.allowed_if((rules.none_of(0, rules.CLONE_NEW), rules.any_of(0, _CLONE_THREAD))),
    "mmap": rules.refused_if(
        (_EXECUTABLE, rules.any_of(2, _PROT_WRITE)), (_EXECUTABLE, rules.any_of(3, _MAP_ANONYMOUS))
    ),
    "mprotect": rules.refused_if((_EXECUTABLE,)),
}

#: Of what every jail may: starting programs, other names for a file, being somebody else.
REFUSED: Final = (
    "fork", "vfork", "execve", "execveat", "link", "linkat", "mknod", "mknodat",
    "chown", "fchown", "lchown", "fchownat",
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups", "capset",
    "personality", "setpriority", "open_by_handle_at", "name_to_handle_at", "truncate", "symlink", "symlinkat",
)  # fmt: skip
#: Death signals, names of threads and of memory, and questions.
_PRCTL_OF_A_HOST: Final = (1, 2, 3, 15, 16, 21, 23, 27, 30, 39, 0x53564D41)


def host_rules() -> dict[str, rules.Rule]:
    """The rule of every call that has one; all others are ENOSYS."""
    made = rules.rules(sockets=True)
    network = made["socket"]
    return {
        **made,
        **dict.fromkeys(REFUSED, rules.Rule((), rules.EPERM)),
        **_OF_BOTH,
        # The bus is a local socket, and so is the way to the privileged helper.
        "socket": rules.Rule(
            (rules.Case((rules.one_of(0, (rules.AF_UNIX,)),), rules.ALLOW), *network.cases), network.otherwise
        ),
        "prctl": rules.allowed_if((rules.one_of(0, _PRCTL_OF_A_HOST),)),
        "prlimit64": rules.allowed_if((rules.one_of(0, (0,)),), (rules.one_of(2, (0,)),)),
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


def relay_rules() -> dict[str, rules.Rule]:
    """The rule of every call that has one; all others are ENOSYS."""
    return {
        **dict.fromkeys(_OF_THE_PROXY.split(), rules.Rule((), rules.ALLOW)),
        **_OF_BOTH,
        "open": rules.allowed_if((rules.none_of(1, _MORE_THAN_READING),), otherwise=rules.EACCES),
        "openat": rules.allowed_if((rules.none_of(2, _MORE_THAN_READING),), otherwise=rules.EACCES),
        "ioctl": rules.allowed_if((rules.one_of(1, _IOCTL_OF_THE_PROXY),)),
        "prctl": rules.allowed_if((rules.one_of(0, _PRCTL_OF_THE_PROXY),)),
        "prlimit64": rules.allowed_if((rules.one_of(2, (0,)),)),
        "socket": rules.allowed_if(
            (rules.one_of(0, (rules.AF_INET, rules.AF_INET6)), rules.Test(1, rules.TYPE, (rules.STREAM, rules.DGRAM))),
            rules.NETLINK,
            otherwise=rules.EAFNOSUPPORT,
        ),
        "socketpair": rules.allowed_if((rules.one_of(0, (rules.AF_UNIX,)), rules.Test(1, rules.TYPE, (rules.STREAM,)))),
    }


#: Ways to the outside.
_USES_OF_SOCKETS: Final = ("connect", "bind", "listen", "accept", "accept4", "sendmmsg", "recvmmsg")
#: Giving the descriptors of a forked worker their places, and holding it by a descriptor.
_OF_A_TEMPLATE: Final = ("dup2", "dup3", "getppid", "pidfd_open")
#: Death signals, and the filter that a worker puts on top.
_PRCTL_OF_A_TEMPLATE: Final = (1, 22, *_PRCTL_OF_THE_PROXY)


def worker_rules() -> dict[str, rules.Rule]:
    """The rule of every call that an MCP worker has; all others are ENOSYS."""
    return {
        **relay_rules(),
        **dict.fromkeys(("socket", *_USES_OF_SOCKETS), rules.Rule((), rules.EPERM)),
    }


def template_rules() -> dict[str, rules.Rule]:
    """The same for the template that MCP workers are forked from."""
    return {
        **worker_rules(),
        **dict.fromkeys(_OF_A_TEMPLATE, rules.Rule((), rules.ALLOW)),
        "clone": rules.allowed_if((rules.none_of(0, rules.CLONE_NEW | rules.CLONE_PARENT),)),
        "prctl": rules.allowed_if((rules.one_of(0, _PRCTL_OF_A_TEMPLATE),)),
    }
