"""Gives an instance's workdir a file system of its own, in a file beside it, and bounds what jails may take of it.

`folder` is always a descriptor of the instance's folder. In it, `workspace` is the mount point and `workspace.ext4` the
image. The image is mounted in the host's namespace, which is ours: everybody sees the files, and it stays mounted.

Rules.
- Files that are there are never moved, covered or overwritten: a workdir with files gets no image, and an image is not
  mounted over files.
- A mount is made under a lock of `folder`. An image has one loop device and one mount, however often it is asked for.
- An image that exists is used, or the jail is refused: an empty folder in its place would look like lost work.

Source: docs/design/sandbox.md section 4.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from goondan.toolhost.launcher import loops, sizes, syscalls
from goondan.toolhost.launcher.descriptors import opened, path_of, reopened, write_text
from goondan.toolhost.launcher.request import Held
from goondan.toolhost.launcher.sizes import IMAGE, POINT

#: The image while it is being made, and the note in the folder that the mount covers.
UNFINISHED: Final = "workspace.ext4.new"
NOTE: Final = "NOT-MOUNTED.txt"
#: Folders of programs: the launcher has no environment, and so no PATH.
PROGRAMS: Final = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin")
#: `discard`: blocks that are freed in the file system become holes in the image. `errors=remount-ro`: damage stops
#: writing instead of spreading.
_OPTIONS: Final = "discard,errors=remount-ro"
#: Bytes that are kept of what a program says about its failure.
_MAX_WORDS: Final = 2000
#: e2fsck's exit status when it has left errors.
_UNCORRECTED: Final = 4


class Unable(OSError):
    """This host cannot make such file systems. The attempt has left nothing behind."""


def hold(folder: int, wanted: int | None, *, make: bool) -> Held | None:
    """Let jails take `wanted` bytes more in a workdir (None: all that is free), at once.

    None when it has an image, or may get one, and is not mounted: `mount` is for that.
    """
    point = _point(folder)
    with _image_of(folder) as image:
        if point is None or point.st_dev == os.fstat(folder).st_dev:
            if image is not None or (make and _is_empty(folder)):
                return None
            return _watched("it has files already" if make else "it has no image")
        if image is None:
            return _watched("something is mounted there")
        name = loops.of(image, point.st_dev)
        if name is None:
            return _refused("something else is mounted there than its image")
        return _allow(folder, image, name, wanted)


def mount(folder: int, wanted: int | None, *, make: bool) -> Held:
    """Mount the workdir's image, and `hold` it. With `make`, an empty workdir without an image gets one."""
    with _locked(folder):
        held = hold(folder, wanted, make=make)  # somebody else may have been faster
        if held is not None:
            return held
        with _image_of(folder) as image:
            try:
                if image is not None:
                    _mount(folder, image)
                else:
                    with _made(folder) as new:
                        _mount(folder, new)
            except Unable as error:
                if image is not None:
                    return _refused(reason(error))
                _remove(folder, IMAGE, f"{POINT}/{NOTE}")
                return _watched(reason(error), unable=True)
            except (OSError, ValueError) as error:
                return _refused(reason(error))
        held = hold(folder, wanted, make=False)
        return _refused("it is not mounted") if held is None else held


def is_mounted(folder: int) -> bool:
    """Whether the workdir's own image is mounted there. Raises OSError."""
    point = _point(folder)
    with _image_of(folder) as image:
        return point is not None and image is not None and loops.of(image, point.st_dev) is not None


def unmount(folder: int) -> None:
    """Unmount the workdir if its image is mounted there; its loop device goes too. Raises OSError when it is in use."""
    with _locked(folder):
        if is_mounted(folder):
            syscalls.unmount(_at(folder, POINT))


def check(folder: int) -> Held:
    """Make an image in the empty folder, mount it, and remove it: `sized` when this host can. Raises OSError."""
    if os.geteuid() != 0:
        return _watched("only root can mount one", unable=True)
    os.mkdir(POINT, 0o700, dir_fd=folder)
    try:
        return mount(folder, sizes.MIB, make=True)
    finally:
        with suppress(OSError):
            unmount(folder)
        _remove(folder, f"{POINT}/{NOTE}", IMAGE)
        with suppress(OSError):
            os.rmdir(POINT, dir_fd=folder)


def _watched(why: str, *, unable: bool = False) -> Held:
    return {"state": "unable" if unable else "watched", "allowed": 0, "why": why}


def _refused(why: str) -> Held:
    return {"state": "refused", "allowed": 0, "why": why}


def reason(error: OSError | ValueError) -> str:
    """What went wrong, without the number that Python puts before it."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _at(folder: int, name: str) -> str:
    return f"/proc/self/fd/{folder}/{name}"


def _point(folder: int) -> os.stat_result | None:
    try:
        status = os.stat(POINT, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISDIR(status.st_mode) else None


@contextmanager
def _image_of(folder: int) -> Iterator[int | None]:
    """A descriptor of the image; None without an image. Raises OSError when something else is in its place."""
    with ExitStack() as stack:
        image = None
        with suppress(FileNotFoundError):
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
            image = stack.enter_context(opened(IMAGE, flags, dir_fd=folder))
            status = os.fstat(image)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise OSError(errno.EPERM, "its image is not a file that only we can write to")
        yield image


def _remove(folder: int, *names: str) -> None:
    for name in names:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


@contextmanager
def _locked(folder: int) -> Iterator[None]:
    with reopened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _allow(folder: int, image: int, name: str, wanted: int | None) -> Held:
    at, disk = os.statvfs(_at(folder, POINT)), os.fstatvfs(folder)
    if at.f_flag & os.ST_RDONLY:
        return _refused("its file system was damaged, or its disk was full, and it cannot be written to any more")
    spare = sizes.spare_blocks(_superblock(image))
    room = max(0, at.f_bfree - spare) * sizes.BLOCK
    may_take = sizes.allowed(room if wanted is None else wanted, disk.f_bavail * disk.f_frsize)
    write_text(f"/sys/fs/ext4/{name}/reserved_clusters", str(sizes.kept_back(at.f_bfree, spare, may_take)))
    if room < may_take:
        return _refused("its file system has not room enough any more")
    return {"state": "sized", "allowed": may_take, "why": ""}


def _is_empty(folder: int) -> bool:
    with os.scandir(_at(folder, POINT)) as entries:
        return all(entry.name == NOTE for entry in entries)


def _superblock(image: int) -> bytes:
    return os.pread(image, sizes.SUPERBLOCK_BYTES, sizes.SUPERBLOCK)


@contextmanager
def _made(folder: int) -> Iterator[int]:
    """A descriptor of a new image. Raises Unable."""
    program = _program("mkfs.ext4")
    point, disk = os.stat(POINT, dir_fd=folder, follow_symlinks=False), os.fstatvfs(folder)
    size = sizes.image_size(disk.f_blocks * disk.f_frsize)
    with ExitStack() as stack:
        try:
            image = stack.enter_context(
                opened(UNFINISHED, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, dir_fd=folder)
            )
            os.ftruncate(image, size)
            status, words = _run([program, *sizes.make_options(size, point.st_uid, point.st_gid)], image)
            if status != 0:
                raise OSError(errno.EIO, f"mkfs.ext4: {words or f'status {status}'}")
            os.fsync(image)
            os.rename(UNFINISHED, IMAGE, src_dir_fd=folder, dst_dir_fd=folder)
            with reopened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
                os.fsync(fd)  # else an empty one could stand in its place after a crash
        except OSError as error:
            raise Unable(error.errno, reason(error)) from None
        finally:
            _remove(folder, UNFINISHED)
        yield image


def _mount(folder: int, image: int) -> None:
    """Mount the image. Raises Unable for what the host lacks, ValueError and OSError for a fault of the image."""
    covered = os.listdir(_at(folder, POINT))
    if not set(covered) <= {NOTE}:
        names = ", ".join(sorted(covered)[:5])
        raise OSError(errno.ENOTEMPTY, f"it is not mounted, and files lie in its place: {names}")
    if sizes.has_errors(_superblock(image)):
        status, words = _run([_program("e2fsck"), "-p"], image)
        if status >= _UNCORRECTED:
            raise OSError(errno.EIO, f"its image is damaged, and e2fsck -p cannot mend it: {words}")
    before = os.stat(POINT, dir_fd=folder, follow_symlinks=False)
    _write_note(folder)
    try:
        name, device = loops.attach(image)
        try:
            syscalls.mount_ext4(f"/dev/{name}", _at(folder, POINT), _OPTIONS)
        finally:
            os.close(device)
        if not os.path.exists(f"/sys/fs/ext4/{name}/reserved_clusters"):
            syscalls.unmount(_at(folder, POINT))
            raise OSError(errno.ENOTSUP, "the kernel's ext4 cannot keep blocks back")
    except OSError as error:
        raise Unable(error.errno, reason(error)) from None
    os.chmod(_at(folder, POINT), stat.S_IMODE(before.st_mode))
    with suppress(OSError):  # e2fsck makes it when it needs it
        os.rmdir(_at(folder, f"{POINT}/lost+found"))


def _write_note(folder: int) -> None:
    image, point = (os.path.join(path_of(folder), name) for name in (IMAGE, POINT))
    text = (
        f"The files of this workdir are in the file system in {IMAGE}, beside this folder. They show here while it is\n"
        "mounted, which the next call of a tool sees to, and `gdn disk mount`. By hand, as root:\n\n"
        f"    mount -o loop,nosuid,nodev,discard '{image}' '{point}'\n"
    )
    with suppress(OSError):
        fd = os.open(f"{POINT}/{NOTE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        os.fchmod(fd, 0o644)  # whatever our umask: it is for people
        with open(fd, "w", encoding="utf-8", errors="surrogateescape") as note:
            note.write(text)


def _program(name: str) -> str:
    for folder in PROGRAMS:
        if os.access(f"{folder}/{name}", os.X_OK):
            return f"{folder}/{name}"
    raise Unable(errno.ENOENT, f"there is no program {name}")


def _run(argv: list[str], image: int) -> tuple[int, str]:
    """Run a program on the image. Returns its exit status and what it said."""
    import subprocess  # launchers do not need it, and start while somebody waits

    done = subprocess.run(
        [*argv, f"/proc/self/fd/{image}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"LANG": "C"},
        pass_fds=(image,), check=False,
    )  # fmt: skip
    return done.returncode, " ".join(done.stdout[-_MAX_WORDS:].decode("utf-8", "replace").split())
