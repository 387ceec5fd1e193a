"""From rules to a classic BPF program, as `bwrap --seccomp FD` and `prctl(PR_SET_SECCOMP)` take it, with the numbers of
the calls.

The numbers of two machines are here, of the calls that seccomp_rules.py names, and of the two that tests ask for: they
must stay out. The numbers are the kernel's, which never change.

The program finds the rule of a call by bisecting the call numbers, so that its length does not matter much: some nine
comparisons. For calls whose rule has no condition the kernel remembers the verdict and does not run it at all.

Source: the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; the kernel's
seccomp_filter.rst (arguments are 64 bits wide, little-endian on both machines) and bpf(4).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from goondan.toolhost.policy.seccomp_rules import (
    ALLOW,
    ENOSYS,
    Rule,
    Test,
    Verdict,
    host_rules,
    relay_rules,
    rules,
    template_rules,
    worker_rules,
)

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
    rules.rules.
    """
    return encode(instructions(machine, rules(sockets=sockets, server=server, drops=drops, bare=bare)))


@lru_cache
def relay_program(machine: Machine) -> bytes:
    """The filter of the egress proxy."""
    return encode(instructions(machine, relay_rules()))


@lru_cache
def worker_program(machine: Machine) -> bytes:
    """The filter of an MCP worker."""
    return encode(instructions(machine, worker_rules()))


@lru_cache
def template_program(machine: Machine) -> bytes:
    """The filter of the template that MCP workers are forked from."""
    return encode(instructions(machine, template_rules()))


@lru_cache
def host_program(machine: Machine) -> bytes:
    """The filter of a tool host that root has started."""
    return encode(instructions(machine, host_rules()))


def encode(code: list[Instruction]) -> bytes:
    """Instructions as the kernel reads them; both machines are little-endian."""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


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
