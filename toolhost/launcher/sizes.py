"""The size of the file system of an instance's workdir, and how much of it may be taken. Pure.

The image is as large as the disk that it lies on and holds next to nothing: a hole takes no room. Before each jail
starts, the bound of what jails may take is set by the blocks that ext4 keeps back from everybody (`reserved_clusters`).
So nothing has to grow or to shrink, and the bound also holds after files were removed.

Source: docs/design/sandbox.md section 4; the kernel's sysfs-fs-ext4 document.
"""

from __future__ import annotations

import struct
from typing import Final

#: In an instance's folder: where its workdir's file system is mounted, and the file that it is in.
POINT: Final = "workspace"
IMAGE: Final = "workspace.ext4"
MIB: Final = 1 << 20
GIB: Final = 1 << 30
#: The size of a block, and of a page where the loop device writes through (bytes).
BLOCK: Final = 4096
#: Smallest size of an image (bytes). A terabyte takes 60 ms to make and 2.6 MiB, 64 GiB take 5 ms and 272 KiB.
SMALLEST: Final = 64 * GIB
LARGEST: Final = 1024 * GIB
#: One inode for so many bytes: a million in the smallest image. Inodes that were never used take no room.
BYTES_PER_INODE: Final = 65536
#: The size of the journal (MiB): enough for bursts of small files, and nearly all that an empty workdir takes.
JOURNAL_MIB: Final = 16
#: What the operator can still write when jails cannot (bytes).
SPARE: Final = 64 * MIB
#: What always stays free of the disk that the image lies on (bytes): a file system whose image cannot grow loses writes
#: that it has promised.
KEPT_FREE: Final = 32 * MIB

#: struct ext4_super_block, which begins here, and its fields: magic, state, reserved blocks (low and high half).
SUPERBLOCK: Final = 1024
SUPERBLOCK_BYTES: Final = 1024
_MAGIC, _STATE, _RESERVED_LOW, _RESERVED_HIGH = 0x38, 0x3A, 0x08, 0x154
_EXT4: Final = 0xEF53
_HAS_ERRORS: Final = 2


def image_size(disk: int) -> int:
    """The size of an image on a disk of that size (bytes)."""
    return min(max(disk, SMALLEST), LARGEST) // MIB * MIB


def make_options(size: int, uid: int, gid: int) -> list[str]:
    """Options of mke2fs for an empty file system in a sparse file of that size. Its root belongs to that owner.

    The file is known to hold zeros, so neither mke2fs now nor Linux later writes tables.
    """
    return [
        "-q", "-F", "-t", "ext4", "-b", str(BLOCK), "-i", str(BYTES_PER_INODE), "-m", f"{SPARE * 100 / size:.9f}",
        "-J", f"size={JOURNAL_MIB}", "-O", "^resize_inode,sparse_super2",
        "-E", f"nodiscard,assume_storage_prezeroed=1,num_backup_sb=2,root_owner={uid}:{gid}",
    ]  # fmt: skip


def allowed(wanted: int, disk_free: int) -> int:
    """How much jails may take (bytes) when they want `wanted` and the disk has `disk_free` left."""
    return max(0, min(wanted, disk_free - KEPT_FREE))


def kept_back(free: int, spare: int, may_take: int) -> int:
    """How many of the `free` blocks are kept back, so that `may_take` bytes are left beside the operator's `spare`."""
    return max(0, free - spare - -(-may_take // BLOCK))


def spare_blocks(superblock: bytes) -> int:
    """The blocks that only the operator may take. Raises ValueError when this is no ext4."""
    _check(superblock)
    low, high = (struct.unpack_from("<I", superblock, at)[0] for at in (_RESERVED_LOW, _RESERVED_HIGH))
    return int(low | high << 32)


def has_errors(superblock: bytes) -> bool:
    """Whether Linux has found it damaged. Raises ValueError when this is no ext4."""
    _check(superblock)
    return bool(struct.unpack_from("<H", superblock, _STATE)[0] & _HAS_ERRORS)


def _check(superblock: bytes) -> None:
    if len(superblock) < SUPERBLOCK_BYTES or struct.unpack_from("<H", superblock, _MAGIC)[0] != _EXT4:
        raise ValueError("it holds no ext4 file system")
