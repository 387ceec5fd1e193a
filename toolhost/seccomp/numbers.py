"""System call numbers of the two machines that we have filters for: the kernel's, which never change.

Only the calls that rules.py names, and the two that tests ask for because they must stay out.

Source: the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

from typing import Final, Literal

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
