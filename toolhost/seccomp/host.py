"""Which system calls a tool host under root may make: what its jails may, without starting anything. Pure.

It keeps powers that are harmless only in its own hands: to read what others' processes show of themselves, to pass
closed folders, to end processes. With `ptrace`, `process_vm_writev` or `pidfd_getfd` the first would be control of
root's processes, with `open_by_handle_at` the second a way to any file of the disk, with `linkat` on a descriptor one
to give it another name. None of them is there, nor a program to start, a namespace to enter, a mount to make, a module,
a key, a BPF program or an io_uring, whose calls no filter sees.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

from typing import Final

from toolhost.seccomp.rules import ALLOW, CLONE_NEW, EPERM, Case, Rule, Test, rules

_ALL: Final = 0xFFFFFFFF
_AF_UNIX: Final = 1
_CLONE_THREAD: Final = 0x10000
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
#: Of what every jail may: starting programs, other names for a file, being somebody else.
REFUSED: Final = (
    "fork", "vfork", "execve", "execveat", "link", "linkat", "mknod", "mknodat",
    "chown", "fchown", "lchown", "fchownat",
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups", "capset",
    "personality", "setpriority", "open_by_handle_at", "name_to_handle_at", "truncate", "symlink", "symlinkat",
)  # fmt: skip
#: Death signals, names of threads and of memory, and questions.
_PRCTL: Final = (1, 2, 3, 15, 16, 21, 23, 27, 30, 39, 0x53564D41)


def host_rules() -> dict[str, Rule]:
    """The rule of every call that has one; all others are ENOSYS."""
    made = rules(sockets=True)
    network = made["socket"]
    made |= {name: Rule((), EPERM) for name in REFUSED}
    made |= {
        "clone": Rule((Case((Test(0, CLONE_NEW, (0,)), Test(0, _CLONE_THREAD, (_CLONE_THREAD,))), ALLOW),), EPERM),
        # The bus is one, and so is the way to the privileged helper.
        "socket": Rule((Case((Test(0, _ALL, (_AF_UNIX,)),), ALLOW), *network.cases), network.otherwise),
        # Libraries are mapped from files; nothing else becomes code.
        "mmap": Rule(
            (
                Case((Test(2, _PROT_EXEC, (_PROT_EXEC,)), Test(2, _PROT_WRITE, (_PROT_WRITE,))), EPERM),
                Case((Test(2, _PROT_EXEC, (_PROT_EXEC,)), Test(3, _MAP_ANONYMOUS, (_MAP_ANONYMOUS,))), EPERM),
            ),
            ALLOW,
        ),
        "mprotect": Rule((Case((Test(2, _PROT_EXEC, (_PROT_EXEC,)),), EPERM),), ALLOW),
        "prctl": Rule((Case((Test(0, _ALL, _PRCTL),), ALLOW),), EPERM),
        "prlimit64": Rule((Case((Test(0, _ALL, (0,)),), ALLOW), Case((Test(2, _ALL, (0,)),), ALLOW)), EPERM),
    }
    return made
