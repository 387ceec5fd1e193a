"""Runs a command of this checkout on another kernel, or another kind of machine, in an emulated one (QEMU).

`other_kernel.py image ROOT IMAGE` writes a file system of the folder ROOT (a small system with Python) and a clone of
the present commit in /opt/gdn. `other_kernel.py run … COMMAND` starts a machine on it, without a network, whose
first process runs COMMAND in a shell there, in a control group of version 2 that was delegated to root; what it prints
goes to standard output, and its exit status is this program's (124: out of time, 125: the machine gave no answer).
Nothing is written to IMAGE without `--keep`. `--share FOLDER` is /host inside, and can be written to.

docs/other-kernels.md shows where kernels and systems come from. Emulation is 10 to 30 times slower than the processor.
"""

from __future__ import annotations

import argparse
import base64
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: What the machine's disk and its shared folder need, each after what it needs itself.
MODULES: Final = (
    "virtio", "virtio_ring", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_mmio",
    "virtio_blk", "crc16", "crc32c_generic", "libcrc32c", "mbcache", "jbd2", "ext4", "netfs", "fscache", "9pnet",
    "9pnet_virtio", "9p",
)  # fmt: skip
#: The emulator's program, what it needs to be told, and the console that the kernel writes to.
MACHINES: Final = {
    "x86_64": ("qemu-system-x86_64", ["-cpu", "max"], "ttyS0"),
    "aarch64": ("qemu-system-aarch64", ["-M", "virt", "-cpu", "max,pauth-impdef=on"], "ttyAMA0"),
}
#: The last line that the first process prints.
END: Final = re.compile(r"^OTHER-KERNEL-EXIT (\d+)\s*$", re.MULTILINE)

#: The first program: makes the disk visible and goes there. The modules are tried twice, whatever their order is.
_FIRST: Final = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for m in $(/bin/busybox cat /m/list /m/list); do /bin/busybox insmod /m/$m.ko 2>/dev/null; done
i=0; while [ ! -b /dev/vda ] && [ $i -lt 600 ]; do /bin/busybox sleep 0.1; i=$((i+1)); done
/bin/busybox mount -t ext4 /dev/vda /new
/bin/busybox umount /proc
/bin/busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /bin/sh /opt/first
"""
#: The system's first process. The group is delegated as docs/sandbox.md does it without systemd.
_SECOND: Final = """
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 TERM=dumb
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs -o mode=755 run /run
mkdir -p /dev/pts /dev/shm /host
mount -t devpts -o gid=5,mode=620 devpts /dev/pts; mount -t tmpfs -o mode=1777 shm /dev/shm
for n in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
  ln -sfn "${n#*:}" "/dev/${n%%:*}"
done
mount -t securityfs security /sys/kernel/security
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mount -t 9p -o trans=virtio,version=9p2000.L host /host 2>/dev/null
ip link set lo up
G=/sys/fs/cgroup/goondan
echo '+memory +pids +cpu' > /sys/fs/cgroup/cgroup.subtree_control && mkdir $G
python3 -c "import os; os.setxattr('$G', 'trusted.delegate', b'1')"
cd /opt/gdn
sed -n 's/.*other_kernel=\\([^ ]*\\).*/\\1/p' /proc/cmdline | base64 -d > /run/command
(read -r pid rest < /proc/self/stat; echo $pid > $G/cgroup.procs; exec sh /run/command)
printf '\\nOTHER-KERNEL-EXIT %s\\n' $?
sync; echo o > /proc/sysrq-trigger; sleep 60
"""


def archive(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An initial file system as kernels read it ("newc"): (path, mode with its kind, content), folders before files."""
    found = b""
    for number, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], start=1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
        found += head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
    return found


def first_files(modules: Path, busybox: Path) -> Iterable[tuple[str, int, bytes]]:
    """What the kernel begins with. `modules` is a folder with its modules somewhere below."""
    for folder in ("bin", "m", "new", "proc", "dev"):
        yield folder, stat.S_IFDIR | 0o755, b""
    yield "bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()
    yield "init", stat.S_IFREG | 0o755, _FIRST.encode()
    there = {path.name.split(".")[0]: path for path in modules.rglob("*.ko*")}
    names = [name for name in MODULES if name in there]  # others are part of this kernel
    for name in names:
        path = there[name]
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        yield f"m/{name}.ko", stat.S_IFREG | 0o644, content
    yield "m/list", stat.S_IFREG | 0o644, "".join(f"{name}\n" for name in names).encode()


def image(root: Path, target: Path, size: str) -> None:
    """A file system of `root` with the present commit. Writes /opt/gdn and /opt/first there."""
    clone = root / "opt" / "gdn"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (root / "opt" / "first").write_text(_SECOND, encoding="utf-8")
    part = target.with_name(target.name + ".part")  # a machine that runs keeps the old one
    subprocess.run(["truncate", "-s", size, str(part)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-d", str(root), str(part)], check=True)
    part.rename(target)


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """One machine, from its start to the end of the command."""
    program, own, console = MACHINES[arguments.machine]
    (folder / "initrd").write_bytes(archive(first_files(arguments.modules, arguments.busybox)))
    command = base64.b64encode(arguments.command.encode()).decode()
    line = f"console={console} quiet panic=-1 {arguments.append} other_kernel={command}"
    drive = f"file={arguments.image},format=raw,if=virtio" + ("" if arguments.keep else ",snapshot=on")
    words = ["nice", program, *own, "-accel", "tcg,thread=multi", "-smp", "2", "-m", arguments.memory]
    words += ["-nographic", "-no-reboot", "-nic", "none", "-kernel", str(arguments.kernel)]
    words += ["-initrd", str(folder / "initrd"), "-append", line, "-drive", drive]
    if arguments.share is not None:
        words += ["-virtfs", f"local,path={arguments.share},mount_tag=host,security_model=none"]
    ends = time.monotonic() + arguments.timeout
    machine = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    said = ""
    try:
        assert machine.stdout is not None
        os.set_blocking(machine.stdout.fileno(), False)
        ended = False
        while not ended and time.monotonic() < ends:
            time.sleep(0.2)
            ended = machine.poll() is not None  # what is read after that is all that there is
            new = (machine.stdout.read() or b"").decode("utf-8", "replace").replace("\r\n", "\n")
            said += new
            print(new, end="", flush=True)
    finally:
        late = machine.poll() is None
        if late:
            machine.kill()
        machine.wait()
    found = END.search(said)
    return int(found[1]) if found else 124 if late else 125


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="other_kernel.py", description="Run this checkout on another kernel.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    made = kinds.add_parser("image", help="write a file system that can be started")
    made.add_argument("root", type=Path, help="folder with a small system")
    made.add_argument("image", type=Path)
    made.add_argument("--size", default="4G")
    started = kinds.add_parser("run", help="start a machine and run a command in it")
    started.add_argument("--image", type=Path, required=True)
    started.add_argument("command", help="for a shell, in the checkout")
    started.add_argument("--machine", choices=sorted(MACHINES), default="x86_64")
    started.add_argument("--kernel", type=Path, required=True, help="the kernel's image")
    started.add_argument("--modules", type=Path, required=True, help="a folder that holds its modules")
    started.add_argument("--busybox", type=Path, required=True, help="a static busybox for that machine")
    started.add_argument("--share", type=Path, help="a folder that is /host inside")
    started.add_argument("--append", default="", help="for the kernel's command line, such as lsm=…")
    started.add_argument("--memory", default="4G")
    started.add_argument("--keep", action="store_true", help="what is written stays in the image")
    started.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.kind == "image":
        image(arguments.root, arguments.image, arguments.size)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
