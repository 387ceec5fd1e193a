"""What the emulated machines of scripts/other_kernel.py begin with."""

from __future__ import annotations

import lzma
import stat
from pathlib import Path

from scripts.other_kernel import END, archive, first_files


def unpacked(data: bytes) -> dict[str, tuple[int, bytes]]:
    """As Documentation/driver-api/early-userspace/buffer-format.rst has it."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while at < len(data):
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, length = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + length].rstrip(b"\0").decode()
        begin = -(-(at + 110 + length) // 4) * 4
        found[name] = (mode, data[begin : begin + size])
        at = -(-(begin + size) // 4) * 4
    return found


def test_the_first_files_are_read_as_a_kernel_reads_them(tmp_path: Path) -> None:
    below = tmp_path / "lib" / "modules" / "6" / "kernel"
    below.mkdir(parents=True)
    (below / "ext4.ko.xz").write_bytes(lzma.compress(b"e"))
    (below / "virtio.ko").write_bytes(b"virt!")
    (below / "sound.ko").write_bytes(b"")
    (tmp_path / "busybox").write_bytes(b"#!")
    found = unpacked(archive(first_files(tmp_path / "lib", tmp_path / "busybox")))
    assert {name: data for name, (_, data) in found.items() if name.startswith("m/")} == {
        "m/virtio.ko": b"virt!",
        "m/ext4.ko": b"e",
        "m/list": b"virtio\next4\n",
    }
    assert found["bin/busybox"] == (stat.S_IFREG | 0o755, b"#!") and stat.S_ISDIR(found["new"][0])
    assert list(found)[-1] == "TRAILER!!!"


def test_the_end_of_a_command_is_its_own_line() -> None:
    said = "x\nOTHER-KERNEL-EXIT 3\n[    9.1] reboot: Power down\n"
    assert [found[1] for found in END.finditer(said)] == ["3"]
    assert END.search("echo OTHER-KERNEL-EXIT 0\n") is None
