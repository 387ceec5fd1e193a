"""Which system calls the egress proxy may make: files to read, sockets, waiting, memory and threads. Pure.

The proxy reads what strangers send, on both sides. If one of them takes it over, the kernel lets it do no more than
this: no program can be started, no process be signalled or looked into, nothing on disk be written or changed, no
code be made of memory, and no socket but of IP and those that it was given. It asks for names by files and DNS: the
daemons of the host that also answer such questions are behind local sockets, like much else.

Source: docs/design/sandbox.md section 6; docs/decisions/024.
"""

from __future__ import annotations

from typing import Final

from toolhost.seccomp.rules import ALLOW, CLONE_NEW, EACCES, EAFNOSUPPORT, EPERM, Case, Rule, Test

_ALLOWED: Final = """
read write close fstat newfstatat stat lstat statx lseek poll ppoll select pselect6 munmap brk rt_sigaction
rt_sigprocmask rt_sigreturn sigaltstack pread64 readv writev access faccessat faccessat2 pipe2 sched_yield mremap
madvise dup nanosleep clock_nanosleep getpid gettid getuid geteuid getgid getegid sendto recvfrom sendmsg recvmsg
sendmmsg recvmmsg shutdown getsockname getpeername setsockopt getsockopt connect bind listen accept accept4 exit
exit_group uname fcntl getcwd readlink readlinkat gettimeofday clock_gettime clock_getres time getdents64 epoll_create1
epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd2 futex futex_waitv getrandom set_robust_list set_tid_address rseq
restart_syscall sched_getaffinity membarrier getcpu
"""
_ALL: Final = 0xFFFFFFFF
_CLONE_THREAD: Final = 0x10000
#: Writing, creating, truncating, and files without a name.
_MORE_THAN_READING: Final = 0o3 | 0o100 | 0o1000 | 0o20000000
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
#: FIOCLEX, FIONCLEX, FIONBIO, FIONREAD.
_IOCTL: Final = (0x5451, 0x5450, 0x5421, 0x541B)
#: Names of threads and of memory.
_PRCTL: Final = (15, 16, 0x53564D41)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_STREAM, _DGRAM, _RAW, _TYPE = 1, 2, 3, 0xF


def relay_rules() -> dict[str, Rule]:
    """The rule of every call that has one; all others are ENOSYS."""
    made = {name: Rule((), ALLOW) for name in _ALLOWED.split()}
    made |= {
        "open": _reading(1),
        "openat": _reading(2),
        "clone": Rule((Case((Test(0, CLONE_NEW, (0,)), Test(0, _CLONE_THREAD, (_CLONE_THREAD,))), ALLOW),), EPERM),
        # Libraries are mapped from files; nothing else becomes code.
        "mmap": Rule(
            (
                Case((Test(2, _PROT_EXEC, (_PROT_EXEC,)), Test(2, _PROT_WRITE, (_PROT_WRITE,))), EPERM),
                Case((Test(2, _PROT_EXEC, (_PROT_EXEC,)), Test(3, _MAP_ANONYMOUS, (_MAP_ANONYMOUS,))), EPERM),
            ),
            ALLOW,
        ),
        "mprotect": Rule((Case((Test(2, _PROT_EXEC, (_PROT_EXEC,)),), EPERM),), ALLOW),
        "ioctl": Rule((Case((Test(1, _ALL, _IOCTL),), ALLOW),), EPERM),
        "prctl": Rule((Case((Test(0, _ALL, _PRCTL),), ALLOW),), EPERM),
        "prlimit64": Rule((Case((Test(2, _ALL, (0,)),), ALLOW),), EPERM),
        "socket": Rule(
            (
                Case((Test(0, _ALL, (_AF_INET, _AF_INET6)), Test(1, _TYPE, (_STREAM, _DGRAM))), ALLOW),
                Case((Test(0, _ALL, (_AF_NETLINK,)), Test(1, _TYPE, (_RAW, _DGRAM)), Test(2, _ALL, (0,))), ALLOW),
            ),
            EAFNOSUPPORT,
        ),
        "socketpair": Rule((Case((Test(0, _ALL, (_AF_UNIX,)), Test(1, _TYPE, (_STREAM,))), ALLOW),), EPERM),
    }
    return made


def _reading(flags: int) -> Rule:
    """An open whose argument `flags` may only ask for reading."""
    return Rule((Case((Test(flags, _MORE_THAN_READING, (0,)),), ALLOW),), EACCES)
