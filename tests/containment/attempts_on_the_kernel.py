"""Ways out of a jail by the kernel's own interface: keyrings, rare system calls, namespaces, mounts, privileges.

The second half of attempts.py: a tool is both, one behind the other (tried.py), from the first section on.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable
from typing import Any

from tests.containment.attempts import ARM, HOST, call, libc, lines, several, unless

# --- keyring, kernel surface ----------------------------------------------------------------------------------------

several(
    "keyring",
    new_key=lambda: call("add_key", b"user", b"name", b"x", 1, -3),
    ask_for_a_key=lambda: call("request_key", b"user", b"name", None, -3),
    session_keyring=lambda: call("keyctl", 0, -3, 1),
    users_keyring=lambda: call("keyctl", 0, -4, 1),
)

several(
    "kernel surface",
    bpf_program=lambda: call("bpf", 5, bytes(120), 120),
    performance_counter=lambda: call("perf_event_open", struct.pack("IIQ", 1, 112, 0) + bytes(96), 0, -1, -1, 0),
    page_faults=lambda: call("userfaultfd", 1),
    ring=lambda: call("io_uring_setup", 4, bytes(120)),
    module=lambda: call("init_module", b"x", 1, b""),
    module_by_file=lambda: call("finit_module", 0, b"", 0),
    new_kernel=lambda: call("kexec_load", 0, 0, 0, 0),
    restart=lambda: call("reboot", 0xFEE1DEAD, 672274793, 0, 0),
    swap=lambda: call("swapon", b"/tmp/x", 0),
    accounting=lambda: call("acct", b"/tmp/x"),
    clock=lambda: call("settimeofday", bytes(16), None),
    clock_drift=lambda: call("clock_adjtime", 0, b"\x01" + bytes(207)),
    kernel_log=lambda: call("syslog", 3, bytes(64), 64),
    host_name=lambda: call("sethostname", b"x", 1),
    quota=lambda: call("quotactl", 0x80000100, None, 0, bytes(64)),
    watch_everything=lambda: call("fanotify_init", 0, 0),
    loose_personality=lambda: call("personality", 0x0400000),
    shared_memory=lambda: call("shmget", 0, 4096, 0o1600),
    semaphores=lambda: call("semget", 0, 1, 0o1600),
    messages=lambda: call("msgget", 0, 0o1600),
    message_queue=lambda: call("mq_open", b"/q", os.O_CREAT | os.O_RDWR, 0o600, None),
    kernel_io=lambda: call("io_setup", 1, bytes(8)),
    secret_memory=lambda: call("memfd_secret", 0),
    attribute_on_disk=lambda: call("setxattr", b".", b"user.x", b"1", 1, 0),
)


def dies_or_fails(code: bytes) -> int:
    """Runs machine code in a child: its result, when that is no error and nobody ended it."""
    import mmap

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(code)
        function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        os.write(writing, str(function()).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    answer = int(os.read(reading, 100) or b"-1")
    if answer < 0:
        raise OSError("refused, or ended")
    return answer


# getpid by other doors: the 32-bit gate, and the second table of numbers. No machine but x86_64 has them.
several(
    "kernel surface",
    call_by_the_32_bit_gate=lambda: unless(not ARM) and dies_or_fails(b"\xb8\x14\0\0\0\xcd\x80\x48\x98\xc3"),
    call_by_sysenter=lambda: unless(not ARM) and dies_or_fails(b"\xb8\x14\0\0\0\x0f\x34\xc3"),
    call_of_the_second_table=lambda: unless(not ARM) and dies_or_fails(b"\xb8\x27\0\0\x40\x0f\x05\xc3"),
    local_segments=lambda: unless(not ARM) and dies_or_fails(b"\xb8\x9a\0\0\0\x31\xff\x31\xf6\x31\xd2\x0f\x05\xc3"),
    ports=lambda: unless(not ARM) and dies_or_fails(b"\xb8\xac\0\0\0\x31\xff\x0f\x05\xc3"),
    modules_of_the_kernel=lambda: call("lsm_list_modules", bytes(64), bytes(8), 0),
    security_attributes=lambda: call("lsm_set_self_attr", 100, bytes(64), 64, 0),
    attribute_by_name_and_folder=lambda: call("setxattrat", -100, b".", 0, b"user.x", bytes(16), 16),
    attributes_of_a_file=lambda: call("file_setattr", -100, b".", bytes(24), 24, 0),
    pages_between_nodes=lambda: call("migrate_pages", 0, 1, bytes(8), bytes(8)),
    profile=lambda: call("lookup_dcookie", 0, bytes(8), 8),
    terminals_hung_up=lambda: call("vhangup"),
    decisions_about_calls=lambda: call("seccomp", 1, 8, struct.pack("HxxxxxxQ", 1, 0)),
)

# --- namespaces and mounts ------------------------------------------------------------------------------------------


def enter(name: str) -> int:
    return call("setns", os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0)


#: CLONE_NEWTIME (not of clone), NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, and all but the first.
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x7E020000)


def _cloned(flag: int) -> bool:
    try:
        child = call("clone", (flag & ~0x80) | 17, 0, 0, 0, 0) if flag != 0x80 else -1
    except OSError:
        return False
    if not child:
        os._exit(0)
    return child > 0


def _unshared(flag: int) -> bool:
    try:
        return call("unshare", flag) == 0
    except OSError:
        return False


several(
    "namespaces",
    user_namespace=lambda: call("unshare", 0x10000000),
    mount_namespace=lambda: call("unshare", 0x00020000),
    network_namespace=lambda: call("unshare", 0x40000000),
    process_namespace=lambda: call("unshare", 0x20000000),
    user_namespace_by_clone=lambda: call("clone", 0x10000000 | 17, 0, 0, 0, 0),
    mount_namespace_by_clone=lambda: call("clone", 0x00020000 | 17, 0, 0, 0, 0),
    process_namespace_by_clone=lambda: call("clone", 0x20000000 | 17, 0, 0, 0, 0),
    user_namespace_by_clone3=lambda: call("clone3", struct.pack("QQQQQ", 0x10000000, 0, 0, 0, 17) + bytes(24), 64),
    namespaces_by_clone=lambda: unless([flag for flag in NAMESPACES if _cloned(flag)]),
    namespaces_by_unshare=lambda: unless([flag for flag in NAMESPACES if _unshared(flag)]),
    namespaces_of_a_process=lambda: call("setns", os.pidfd_open(1), 0x7E020000),
    namespaces_listed=lambda: call("listns", bytes(64), bytes(80), 10, 0),
    namespace_of_init=lambda: enter("user"),
    mounts_of_init=lambda: enter("mnt"),
)

several(
    "mounts",
    memory_mount=lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    usr_writable=lambda: call("mount", b"none", b"/usr", None, 32 | 4096, None),
    guard_taken_off=lambda: call("umount2", os.fsencode(os.getcwd() + "/.git"), 2),
    new_root=lambda: call("pivot_root", b"/tmp", b"/tmp"),
    other_root=lambda: call("chroot", b"/tmp"),
    tree=lambda: call("open_tree", -100, b"/", 1),
    moved=lambda: call("move_mount", -100, b"/usr", -100, b"/tmp", 0),
    file_system=lambda: call("fsopen", b"tmpfs", 0),
    picked=lambda: call("fspick", -100, b"/usr", 0),
    private_place_taken_off=lambda: call("umount2", b"/tmp", 2),
    processes_taken_off=lambda: call("umount2", b"/proc", 2),
    processes_writable=lambda: call("mount", b"none", b"/proc", None, 32, None),
    a_place_shown_elsewhere=lambda: call("mount", b"/usr", b"/tmp", None, 4096, None),
    tree_with_attributes=lambda: call("open_tree_attr", -100, b"/usr", 1, bytes(32), 32),
    mounts_listed=lambda: call("listmount", struct.pack("IIQQQ", 24, 0, 2**64 - 1, 0, 0), bytes(80), 10, 0),
    mount_described=lambda: call("statmount", struct.pack("IIQQQ", 24, 0, 1, 1, 0), bytes(512), 512, 0),
    attributes_of_mounts=lambda: call("mount_setattr", -100, b"/usr", 0, bytes(32), 32),
)

# --- privileges -----------------------------------------------------------------------------------------------------


def capabilities(pid: str) -> list[int]:
    return [int(line.split()[1], 16) for line in lines(f"/proc/{pid}/status") if line.startswith("Cap")]


def copied() -> str:
    subprocess.run(["cp", "/bin/true", "copied"], check=True)
    return "copied"


def set_ids(make_one: Callable[[int], Any], path: str, remove: Callable[[str], None] = os.unlink) -> int:
    os.umask(0)
    for mode in (0o4755, 0o2755, 0o6000):
        try:
            make_one(mode)
        except OSError:
            continue
        got = os.lstat(path).st_mode & 0o6000
        remove(path)
        if got:
            return got
    raise OSError("none was made so")


several(
    "privileges",
    user_0=lambda: os.setuid(0),
    group_0=lambda: os.setgid(0),
    other_groups=lambda: os.setgroups([0]),
    user_of_the_host=lambda: os.setuid(HOST["uid"] or 65534),
    capabilities=lambda: call("capset", struct.pack("II", 0x20080522, 0), struct.pack("IIIIII", 1, 1, 0, 0, 0, 0)),
    set_user_id=lambda: os.chmod(copied(), 0o4755),
    set_group_id=lambda: os.chmod(copied(), 0o2755),
    set_user_id_when_made=lambda: os.open("made", os.O_CREAT | os.O_WRONLY, 0o4755),
    set_user_id_node=lambda: os.mknod("node", 0o104755),
    set_user_id_by_openat2=lambda: call("openat2", -100, b"made2", struct.pack("QQQ", 0o101, 0o4755, 0), 24),
    set_user_id_by_fchmodat2=lambda: call("fchmodat2", -100, os.fsencode(copied()), 0o4755, 0),
    set_id_of_folders=lambda: set_ids(lambda mode: os.mkdir("folder", mode), "folder", os.rmdir),
    set_id_of_pipes=lambda: set_ids(lambda mode: os.mknod("pipe", 0o10000 | mode), "pipe"),
    set_id_without_a_name=lambda: unless(os.fstat(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o6755)).st_mode & 0o6000),
    set_id_in_memory=lambda: os.fchmod(os.memfd_create("x"), 0o6755),
    set_id_in_high_bits=lambda: call("fchmodat2", -100, os.fsencode(copied()), (1 << 40) | 0o6755, 0),
    capability_of_a_file=lambda: os.setxattr(
        copied(), "security.capability", struct.pack("<IIIII", 0x2000001, 1, 0, 0, 0)
    ),
    access_list_of_a_file=lambda: os.setxattr(copied(), "system.posix_acl_access", struct.pack("<I", 2)),
    owner_changed=lambda: os.chown(copied(), 0, 0),
    capabilities_left=lambda: unless([c for c in capabilities("self") if c]),
    capabilities_of_init=lambda: unless([c for c in capabilities("1") if c]),
    ambient_capability=lambda: unless(libc.prctl(47, 2, 21, 0, 0) == 0),
    program_of_root=lambda: unless(
        subprocess.run(["/bin/su", "-c", "id -u"], capture_output=True, text=True, timeout=5).stdout.strip() == "0"
    ),
)
