"""Sizes of a workdir's own file system, and which folders get one."""

from __future__ import annotations

import struct

import pytest

from goondan.toolhost.jails.sized_workdirs import mount_point
from goondan.toolhost.launcher import sizes
from goondan.toolhost.launcher.sizes import BLOCK, GIB, MIB


@pytest.mark.parametrize(
    ("disk", "size"),
    [
        (0, 64 * GIB),
        (20 * GIB, 64 * GIB),
        (252 * GIB + 12_345, 252 * GIB),
        (40_000 * GIB, 1024 * GIB),
    ],
)
def test_an_image_is_as_large_as_its_disk(disk: int, size: int) -> None:
    assert sizes.image_size(disk) == size
    assert size % BLOCK == 0


def test_the_operators_spare_is_a_part_of_the_whole() -> None:
    for size in (64 * GIB, 1024 * GIB):
        options = sizes.make_options(size, 0, 7)
        percent = float(options[options.index("-m") + 1])
        assert abs(size * percent / 100 - sizes.SPARE) < MIB
        assert "root_owner=0:7" in options[-1]


@pytest.mark.parametrize(
    ("wanted", "disk_free", "allowed"),
    [(100, 1 << 40, 100), (1 << 30, 132 * MIB, 100 * MIB), (1 << 30, 10 * MIB, 0), (0, 1 << 40, 0)],
)
def test_jails_may_take_no_more_than_the_disk_has(wanted: int, disk_free: int, allowed: int) -> None:
    assert sizes.allowed(wanted, disk_free) == allowed


@pytest.mark.parametrize("free", [0, 10, 100, 5000, 10_000_000])
@pytest.mark.parametrize("spare", [0, 64])
@pytest.mark.parametrize("may_take", [0, 1, BLOCK, 100 * BLOCK, 100 * BLOCK + 1])
def test_what_is_kept_back_leaves_what_may_be_taken(free: int, spare: int, may_take: int) -> None:
    kept_back = sizes.kept_back(free, spare, may_take)
    left = free - spare - kept_back
    assert kept_back >= 0
    if free - spare >= -(-may_take // BLOCK):
        assert may_take <= left * BLOCK < may_take + BLOCK
    else:
        assert kept_back == 0, "all that is left is theirs"


def superblock(magic: int = 0xEF53, state: int = 1) -> bytes:
    data = bytearray(sizes.SUPERBLOCK_BYTES)
    struct.pack_into("<I", data, 0x08, 5)
    struct.pack_into("<HH", data, 0x38, magic, state)
    struct.pack_into("<I", data, 0x154, 1)
    return bytes(data)


def test_what_the_superblock_says() -> None:
    assert sizes.spare_blocks(superblock()) == (1 << 32) + 5
    assert not sizes.has_errors(superblock())
    assert sizes.has_errors(superblock(state=3))
    for nothing in (superblock(magic=1), superblock()[:100], b""):
        with pytest.raises(ValueError, match="no ext4"):
            sizes.spare_blocks(nothing)
        with pytest.raises(ValueError, match="no ext4"):
            sizes.has_errors(nothing)


@pytest.mark.parametrize(
    ("workdir", "point"),
    [
        ("/s/instances/a/k/workspace", "/s/instances/a/k/workspace"),
        ("/s/instances/a/k/workspace/deep/er", "/s/instances/a/k/workspace"),
        ("/s/instances/a/k", None),
        ("/s/instances/a/k/other", None),
        ("/s/blobs/a/k/workspace", None),
        ("/s", None),
        ("/home/me/instances/a/k/workspace", None),
        ("/sx/instances/a/k/workspace", None),
    ],
)
def test_only_the_workspace_of_an_instance_gets_one(workdir: str, point: str | None) -> None:
    assert mount_point(workdir, "/s") == point
