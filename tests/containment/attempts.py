"""Ways out of a jail, each tried by a tool in a process of its own. Loaded by the worker as the module of a tool.

An attempt that returns has got through, one that raises was refused. The verdict that each must have is in
tried.py. It uses nothing but the standard library and ctypes, as a hostile tool could. attempts_on_the_kernel.py is the
second half of the same module.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ARM = platform.machine() == "aarch64"
#: (x86_64, aarch64)
NUMBERS = {
    "ptrace": (101, 117), "syslog": (103, 116), "personality": (135, 92), "pivot_root": (155, 41), "chroot": (161, 51),
    "acct": (163, 89), "settimeofday": (164, 170), "mount": (165, 40), "umount2": (166, 39), "swapon": (167, 224),
    "reboot": (169, 142), "sethostname": (170, 161), "init_module": (175, 105), "quotactl": (179, 60),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97),
    "perf_event_open": (298, 241), "fanotify_init": (300, 262), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "clock_adjtime": (305, 266), "setns": (308, 268), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "finit_module": (313, 273), "kexec_load": (246, 104),
    "bpf": (321, 280), "userfaultfd": (323, 282), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "prlimit64": (302, 261),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "lookup_dcookie": (212, 18), "vhangup": (153, 58),
    "seccomp": (317, 277), "renameat2": (316, 276), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "tgkill": (234, 131), "tkill": (200, 130),
    "sched_setattr": (314, 274), "io_setup": (206, 0), "setxattr": (188, 5), "capset": (126, 91), "clone": (56, 220),
}  # fmt: skip
NEWER = {
    "pidfd_getfd": 438, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fspick": 433,
    "clone3": 435, "openat2": 437, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "fchmodat2": 452,
    "process_madvise": 440, "process_mrelease": 448, "statmount": 457, "listmount": 458, "lsm_set_self_attr": 460,
    "lsm_list_modules": 461, "setxattrat": 463, "open_tree_attr": 467, "file_setattr": 469, "listns": 470,
}  # fmt: skip
HOST: dict[str, Any] = {}  # what the test tells: paths, ports and process ids of the host
ATTEMPTS: dict[str, tuple[str, Callable[[], Any]]] = {}


def call(name: str, *args: Any) -> int:
    number = NEWER.get(name) or NUMBERS[name][ARM]
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in args]
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def attempt(group: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        ATTEMPTS[function.__name__] = (group, function)
        return function

    return add


def several(group: str, **attempts: Callable[[], Any]) -> None:
    for name, function in attempts.items():
        ATTEMPTS[name] = (group, function)


def read(path: str) -> bytes:
    with open(path, "rb") as source:
        data = source.read(64)
    if not data:
        raise OSError("empty")
    return data


def lines(path: str) -> list[str]:
    with open(path, encoding="utf-8") as source:
        return source.read().splitlines()


def write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def new(path: str) -> str:
    """A file of one's own."""
    write(path)
    return path


def overwrite(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"0")


def unless(bad: Any, message: str = "nothing there") -> Any:
    """For attempts that get through only if they find something."""
    if not bad:
        raise OSError(message)
    return bad


def beside_the_ways(folder: str) -> list[str]:
    """What is in a folder of homes besides what the jail was given in one (a runtime) and the ways to it."""
    mounts = [mount for line in lines("/proc/self/mountinfo") if (mount := line.split()[4]).count("/") > 2]
    found: list[str] = []
    for path in (f"{folder}/{name}" for name in os.listdir(folder)):
        if any(mount.startswith(path + "/") for mount in mounts):
            found += beside_the_ways(path)
        elif path not in mounts:
            found.append(path)
    return found


# --- files ----------------------------------------------------------------------------------------------------------

several(
    "files",
    shadow=lambda: read("/etc/shadow"),
    secret_beside_the_workdir=lambda: read(HOST["secret"]),
    secret_by_dots=lambda: read(os.getcwd() + "/../secret"),
    secret_by_dots_through_proc=lambda: read("/proc/self/cwd/../secret"),
    secret_through_the_root_of_init=lambda: read("/proc/1/root" + HOST["secret"]),
    root_home=lambda: unless(os.listdir("/root")) and read("/root/.bashrc"),
    logs=lambda: os.listdir("/var/log"),
    homes=lambda: unless(beside_the_ways("/home")),
    file_by_handle=lambda: call("open_by_handle_at", -100, b"\x08\0\0\0\x01\0\0\0" + bytes(8), 0),
    handle_of_file=lambda: call("name_to_handle_at", -100, b"/usr", bytes(200), ctypes.byref(ctypes.c_int()), 0),
    new_file_in_root=lambda: write("/new"),
    new_file_in_usr=lambda: write("/usr/new"),
    new_file_in_etc=lambda: write("/etc/new"),
    passwd=lambda: write("/etc/passwd"),
    new_file_in_run=lambda: write("/run/goondan/new"),
    workdir_moved=lambda: os.rename(os.getcwd(), os.getcwd() + "-away"),
)


# Of a file that cannot be opened: Landlock asks nobody about these.
several(
    "files",
    mode_of_the_secret=lambda: os.chmod(HOST["secret"], 0o600),
    mode_of_the_secret_by_descriptor=lambda: os.chmod(f"/proc/self/fd/{os.open(HOST['secret'], 0o10000000)}", 0o600),
    group_of_the_secret=lambda: os.chown(HOST["secret"], -1, os.getgid()),
    times_of_the_secret=lambda: os.utime(HOST["secret"], (1, 1)),
    attributes_of_the_secret=lambda: os.listxattr(HOST["secret"]),
    mode_of_another_tools_code=lambda: os.chmod(HOST["other_tool"] + "/handler.py", 0o666),
    mode_of_its_own_code=lambda: os.chmod(__file__, 0o666),
    mode_of_its_open_code=lambda: os.fchmod(os.open(__file__, os.O_RDONLY), 0o666),
)


@attempt("files")
def flags_of_its_open_code() -> None:
    import fcntl

    fd, flags = os.open(__file__, os.O_RDONLY), bytearray(8)
    fcntl.ioctl(fd, 0x80086601, flags)  # FS_IOC_GETFLAGS
    flags[0] ^= 0x40  # FS_NODUMP_FL
    fcntl.ioctl(fd, 0x40086602, flags)  # FS_IOC_SETFLAGS


@attempt("files")
def names_beside_the_secret() -> int:
    """Told as they come and go, without the folder being read."""
    made = libc.inotify_init()
    return int(unless(libc.inotify_add_watch(made, os.fsencode(HOST["other_tool"]), 0xFFF) > 0))


@attempt("files")
def secret_by_symbolic_link() -> bytes:
    os.symlink(HOST["secret"], "link")
    return read("link")


@attempt("files")
def hard_link_to_the_system() -> None:
    os.link("/etc/passwd", "hard")


@attempt("files")
def beneath_the_private_places() -> str:
    """Upwards from the workdir, where something else might lie under what covers it."""
    here, up = os.getcwd(), "."
    while here != "/":
        here, up = os.path.dirname(here), up + "/.."
        if not os.path.samestat(os.stat(here), os.stat(up)):
            return up
    raise OSError("all the same")


@attempt("files")
def another_tools_folder() -> list[str]:
    return os.listdir(HOST["other_tool"])


@attempt("files")
def secret_from_a_folder_that_was_moved() -> bytes:
    """A folder that is held open keeps its way upwards, wherever it is moved to."""
    os.makedirs("deep/er")
    held = os.open("deep/er", os.O_RDONLY)
    os.rename("deep/er", "moved")
    found = os.open("../" * 40 + HOST["secret"].lstrip("/"), os.O_RDONLY, dir_fd=held)
    return os.read(found, 100)


def lease(path: str, flags: int, kind: int) -> None:
    import fcntl

    fcntl.fcntl(os.open(path, flags), 1024, kind)


# Whoever opens a leased file waits for its holder; a descriptor to read is enough to stop those who want to write.
several(
    "files",
    lease_on_a_new_file=lambda: lease("leased", os.O_CREAT | os.O_RDWR, 1),
    lease_on_its_code=lambda: lease(__file__, os.O_RDONLY, 0),
    lease_on_a_bundle_document=lambda: lease("goondan.yaml", os.O_RDONLY, 0),
    its_code_linked=lambda: os.link(__file__, "linked"),
    its_open_code_linked=lambda: unless(
        libc.linkat(os.open(__file__, os.O_RDONLY), b"", -100, b"linked2", 0x1000) == 0
    ),
    its_code_opened_again=lambda: os.open(f"/proc/self/fd/{os.open(__file__, os.O_RDONLY)}", os.O_RDWR),
    its_code_cut=lambda: os.truncate(__file__, 0),
    its_code_replaced=lambda: os.rename(new("mine"), __file__),
    nameless_in_root=lambda: os.open("/", os.O_TMPFILE | os.O_RDWR),
    document_exchanged=lambda: call("renameat2", -100, new("other").encode(), -100, b"goondan.yaml", 2),
)


@attempt("files")
def its_code_by_a_shared_mapping() -> str:
    """What is mapped to read is written to through /proc: of a private mapping that changes a copy."""
    import mmap

    with open(__file__, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        at = next(int(line.split("-")[0], 16) for line in lines("/proc/self/maps") if line.endswith(__file__))
        memory = os.open("/proc/self/mem", os.O_RDWR)
        os.pwrite(memory, b"#", at)
        return unless(mapped[:1] == b"#") and "changed"


# --- /proc and /sys -------------------------------------------------------------------------------------------------


@attempt("/proc and /sys")
def settings_to_write() -> list[str]:
    found = []
    for base, _, names in os.walk("/proc/sys"):
        for name in names:
            try:
                os.close(os.open(f"{base}/{name}", os.O_WRONLY | os.O_NONBLOCK))
                found.append(f"{base}/{name}")
            except OSError:
                continue
    return unless(found)  # type: ignore[no-any-return]


@attempt("/proc and /sys")
def way_out_through_any_process() -> list[str]:
    found = []
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        for link in ("root", "cwd", "exe"):
            try:
                found.append(read(f"/proc/{pid}/{link}{'/..' * 20}{HOST['secret']}"))
            except OSError:
                continue
    return unless(found)  # type: ignore[no-any-return]


several(
    "/proc and /sys",
    core_pattern=lambda: overwrite("/proc/sys/kernel/core_pattern"),
    host_name_by_proc=lambda: overwrite("/proc/sys/kernel/hostname"),
    user_namespaces_by_proc=lambda: overwrite("/proc/sys/user/max_user_namespaces"),
    sysrq=lambda: overwrite("/proc/sysrq-trigger"),
    out_of_memory_score=lambda: overwrite("/proc/self/oom_score_adj"),
    user_map=lambda: overwrite("/proc/self/uid_map"),
    kernel_memory=lambda: read("/proc/kcore"),
    kernel_log_by_proc=lambda: read("/proc/kmsg"),
    kernel_addresses=lambda: unless(int(read("/proc/kallsyms").split()[0], 16)),
    environment_of_init=lambda: read("/proc/1/environ"),
    memory_of_init=lambda: os.open("/proc/1/mem", os.O_RDONLY),
    memory_of_init_to_write=lambda: os.open("/proc/1/mem", os.O_RDWR),
    descriptors_of_init=lambda: [os.readlink("/proc/1/fd/" + name) for name in os.listdir("/proc/1/fd")],
    directory_of_init=lambda: os.listdir("/proc/1/cwd/"),
    keys_by_proc=lambda: unless([line for line in lines("/proc/keys") if "_ses: empty" not in line]),
    sys_listing=lambda: os.listdir("/sys/kernel"),
    cgroups=lambda: unless([at for at, _, files in os.walk("/sys/fs/cgroup") if "cgroup.procs" in files]),
)  # fmt: skip

# --- devices --------------------------------------------------------------------------------------------------------

several(
    "devices",
    disk_node=lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)),
    memory_node=lambda: os.mknod("/tmp/mem", 0o20600, os.makedev(1, 1)),
    zero_node=lambda: os.mknod("node", 0o20600, os.makedev(1, 5)),
    whiteout_node=lambda: os.mknod("/tmp/whiteout", 0o20600, 0),
    memory_device=lambda: os.open("/dev/mem", os.O_RDONLY),
    log_device=lambda: os.open("/dev/kmsg", os.O_RDONLY),
    disk_device=lambda: os.open("/dev/vda", os.O_RDONLY),
    fuse=lambda: os.open("/dev/fuse", os.O_RDWR),
    kvm=lambda: os.open("/dev/kvm", os.O_RDWR),
    network_tunnel=lambda: os.open("/dev/net/tun", os.O_RDWR),
    loop_device=lambda: os.open("/dev/loop-control", os.O_RDWR),
    new_device_file=lambda: write("/dev/new"),
)


@attempt("devices")
def whiteout_left_by_a_move() -> int:
    write("moving")
    return call("renameat2", -100, b"moving", -100, b"moved-away", 4)


@attempt("devices")
def any_other_device() -> list[str]:
    usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "stdin", "stdout", "stderr", "core", "console"}
    found = []
    for base, _, names in os.walk("/dev"):
        for name in set(names) - usual:
            try:
                os.close(os.open(f"{base}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
                found.append(f"{base}/{name}")
            except OSError:
                continue
    return unless([path for path in found if not path.startswith(("/dev/pts/", "/dev/shm/"))])  # type: ignore[no-any-return]


@attempt("devices")
def typing_into_a_terminal() -> None:
    import fcntl

    master, slave = os.openpty()
    fcntl.ioctl(slave, 0x5412, b"x")


# --- other processes ------------------------------------------------------------------------------------------------

several(
    "processes",
    signal_to_the_host=lambda: os.kill(HOST["pid"], 0),
    trace_init=lambda: call("ptrace", 16, 1, 0, 0),
    trace_the_worker=lambda: call("ptrace", 16, os.getppid(), 0, 0),
    trace_me=lambda: call("ptrace", 0, 0, 0, 0),
    read_memory_of_init=lambda: call("process_vm_readv", 1, bytes(16), 1, bytes(16), 1, 0),
    write_memory_of_init=lambda: call("process_vm_writev", 1, bytes(16), 1, bytes(16), 1, 0),
    descriptor_of_init=lambda: call("pidfd_getfd", os.pidfd_open(1), 0, 0),
    compare_with_init=lambda: call("kcmp", 1, os.getpid(), 0, 0, 0),
    priority=lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1),
    priority_of_the_host=lambda: os.setpriority(os.PRIO_PROCESS, HOST["pid"], os.getpriority(0, HOST["pid"])),
    limits_of_the_host=lambda: call("prlimit64", HOST["pid"], 4, struct.pack("QQ", 0, 0), None),
    limits_of_the_host_asked_for=lambda: call("prlimit64", HOST["pid"], 7, None, bytes(16)),
    processors_of_the_host=lambda: os.sched_setaffinity(HOST["pid"], os.sched_getaffinity(HOST["pid"])),
    scheduling_of_the_host=lambda: os.sched_setscheduler(HOST["pid"], os.SCHED_BATCH, os.sched_param(0)),
    real_time=lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)),
    session_of_its_own=os.setsid,
    child_of_its_parent=lambda: call("clone", 0x8000 | 17, 0, 0, 0, 0) or os._exit(0),
    processes_of_the_host=lambda: unless([n for n in os.listdir("/proc") if n.isdigit() and int(n) > 4000]),
    processes_beside_its_own=lambda: unless(
        {int(n) for n in os.listdir("/proc") if n.isdigit()} - {1, os.getppid(), os.getpid()}
    ),
)


def waiting(signal_number: int) -> Any:
    return ctypes.create_string_buffer(struct.pack("iii", signal_number, 0, -1) + bytes(116))


several(
    "processes",
    signal_to_a_thread_of_the_host=lambda: call("tkill", HOST["pid"], 0),
    signal_to_a_thread_and_its_process=lambda: call("tgkill", HOST["pid"], HOST["pid"], 0),
    signal_with_a_value=lambda: call("rt_sigqueueinfo", HOST["victim"], 9, waiting(9)),
    signal_with_a_value_to_a_thread=lambda: call("rt_tgsigqueueinfo", HOST["victim"], HOST["victim"], 9, waiting(9)),
    signal_by_descriptor=lambda: signal.pidfd_send_signal(os.pidfd_open(HOST["victim"]), signal.SIGKILL),
    signal_to_a_group_of_the_host=lambda: os.kill(-HOST["victim"], 9),
    group_of_the_host=lambda: os.setpgid(0, HOST["pid"]),
    limits_raised=lambda: call("prlimit64", 0, 7, struct.pack("QQ", 1 << 20, 1 << 20), None),
    deadline_scheduling=lambda: call(
        "sched_setattr", 0, struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 10**7, 3 * 10**7, 3 * 10**7), 0
    ),
    advice_on_others_memory=lambda: call("process_madvise", os.pidfd_open(1), bytes(16), 1, 4, 0),
    memory_of_others_reaped=lambda: call("process_mrelease", os.pidfd_open(1), 0),
    pages_of_others_moved=lambda: call("move_pages", 1, 0, 0, 0, 0, 0),
)


@attempt("processes")
def signal_by_what_can_be_read() -> None:
    """The owner of a descriptor gets a signal of one's choice; the test looks whether it lives."""
    import fcntl

    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, HOST["victim"])
    fcntl.fcntl(reading, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writing, b"x")
    time.sleep(0.05)
    os.kill(HOST["victim"], 0)


@attempt("processes")
def signal_to_init() -> bytes:
    """Refused by Landlock from Linux 6.12; before, a namespace's first process gets nothing that it does not handle."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
        os.kill(1, number)
    time.sleep(0.1)  # were it gone, so would be this process
    state = read("/proc/1/stat").rpartition(b")")[2].split()[0]
    if state in b"TtZX":  # stopped, or as good as gone
        return state
    raise OSError("nothing came in")


# --- sockets --------------------------------------------------------------------------------------------------------


def make(family: int, kind: int, protocol: int = 0) -> Callable[[], Any]:
    return lambda: socket.socket(family, kind, protocol)


several(
    "sockets",
    tcp_to_the_host=lambda: socket.create_connection(("127.0.0.1", HOST["port"]), 1),
    tcp_outside=lambda: socket.create_connection(("192.0.2.1", 80), 1),
    udp=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", HOST["port"])),
    tcp6=make(socket.AF_INET6, socket.SOCK_STREAM),
    name_lookup=lambda: socket.getaddrinfo("example.com", 80),
    raw=make(socket.AF_INET, socket.SOCK_RAW, 1),
    ping=make(socket.AF_INET, socket.SOCK_DGRAM, 1),
    sctp=make(socket.AF_INET, 5, 132),
    multipath=make(socket.AF_INET, 1, 262),
    packet=make(17, 3, 0x300),
    unix_stream=make(socket.AF_UNIX, socket.SOCK_STREAM),
    unix_datagram=make(socket.AF_UNIX, socket.SOCK_DGRAM),
    netlink_route=make(16, 3, 0),
    netlink_audit=make(16, 3, 9),
    netlink_netfilter=make(16, 3, 12),
    netlink_generic=make(16, 3, 16),
    crypto=make(38, 5),
    vsock=make(40, 1),
    bluetooth=make(31, 3, 1),
    can=make(29, 3, 1),
    tipc=make(30, 5),
    xdp=make(44, 3),
    qrtr=make(42, 2),
    key_management=make(15, 3, 2),
    listening=lambda: socket.socketpair()[0].bind("\0mine"),
    connecting_a_pair=lambda: socket.socketpair()[0].connect(HOST["socket"]),
)


@attempt("sockets")
def any_family() -> list[tuple[int, int]]:
    made = []
    for family in range(48):
        for kind in (1, 2, 3, 4, 5, 6, 10):
            try:
                socket.socket(family, kind).close()
                made.append((family, kind))
            except OSError:
                continue
    return unless(made)  # type: ignore[no-any-return]


@attempt("sockets")
def pair_without_its_other_end() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    right.close()
    left.shutdown(socket.SHUT_RDWR)
    left.connect(HOST["socket"])


@attempt("sockets")
def datagram_pair_to_a_socket_in_the_workdir() -> None:
    """An end of a pair could be sent to another address, were it a datagram one."""
    left, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.sendto(b"x", "datagram.sock")


@attempt("sockets")
def stream_pair_to_a_socket_in_the_workdir() -> None:
    left, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left.sendto(b"x", "stream.sock")


# --- descriptors, environment, persistence --------------------------------------------------------------------------


@attempt("descriptors")
def channel_in_a_child() -> None:
    """Whoever a handler starts must not speak for the worker."""
    os.write(3, bytes(4))


@attempt("descriptors")
def inherited_descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue
        if target.startswith("/") and target not in ("/dev/null", "/proc/loadavg"):
            found.append(target)
    return unless(found)  # type: ignore[no-any-return]


@attempt("descriptors")
def channels_of_others() -> list[str]:
    """The worker has one socket, and nothing that leads to other processes."""
    folder = f"/proc/{os.getppid()}/fd/"
    found = [os.readlink(folder + name) for name in os.listdir(folder)]
    links = {target for target in found if target.startswith(("socket:", "anon_inode:", "/memfd"))}
    return unless(len(links) > 1 and sorted(links))  # type: ignore[no-any-return]


several(
    "environment",
    secret_in_the_environment=lambda: unless("HOST_SECRET" in os.environ),
    host_paths_in_arguments=lambda: unless(HOST["secret"].encode() in read("/proc/1/cmdline")),
    host_paths_in_init=lambda: unless(os.readlink("/proc/1/exe")),
)

several(
    "persistence",
    our_code=lambda: write("/run/goondan/goondan_tool/worker.py"),
    compiled_code=lambda: write("/run/goondan/goondan_tool/__pycache__/worker.cpython-311.pyc"),
    interpreter=lambda: write(os.path.dirname(os.__file__) + "/site-packages/x.pth"),
    interpreter_program=lambda: write(os.path.dirname(os.readlink("/proc/self/exe")) + "/new"),
    tools_own_code=lambda: write(__file__),
    git_hook=lambda: write(".git/hooks/post-checkout"),
    git_config=lambda: write(".git/config"),
    git_moved=lambda: os.rename(".git", "git"),
    environment_of_the_host=lambda: write(".venv/lib/x.pth"),
    bundle_document=lambda: write("goondan.yaml"),
)


def run(ctx: Any, input: dict[str, Any]) -> dict[str, list[str]]:
    """Every attempt, each in a child: {name: [group, "done" or "refused", detail]}."""
    HOST.update(input)
    return {name: [group, *_tried(function)] for name, (group, function) in ATTEMPTS.items()}


def _tried(function: Callable[[], Any]) -> list[str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = f"done {function()!r}"
        except BaseException as error:
            answer = f"refused {type(error).__name__}: {error}"
        os.write(writer, answer[:500].encode("utf-8", "replace"))
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + 8
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.002)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    os.set_blocking(reader, False)
    try:
        data = os.read(reader, 4096)
    except BlockingIOError:
        data = b""
    os.close(reader)
    verdict, _, detail = (data or b"refused by being ended").decode("utf-8", "replace").partition(" ")
    return [verdict, detail]


handlers = {"run": run}
