"""The folder of large payloads against everything that another process can put into it. Real files, no waiting."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.schemas.system.blob_files import BlobFolder, make_folder
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES, MAX_VALUES, describe
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Blob
from tests.checks import refuses

PAYLOAD = encode_value({"text": "x" * 5000})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "state" / "blobs"
    make_folder(str(folder))
    return folder


@pytest.fixture
def folder(path: Path) -> BlobFolder:
    return BlobFolder(str(path))


def refused(folder: BlobFolder, blob: Blob) -> str:
    with pytest.raises(GoondanError) as caught:
        folder.read(blob)
    return caught.value.info.code


def test_the_folder_and_its_files_are_closed_to_others(tmp_path: Path) -> None:
    made = tmp_path / "state" / "blobs"
    made.mkdir(parents=True, mode=0o755)
    make_folder(str(made))
    blob = BlobFolder(str(made)).write(PAYLOAD, sync=True)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE((made / blob.file).stat().st_mode) == 0o600
    assert [entry.name for entry in made.iterdir()] == [blob.file]


def test_a_link_or_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with refuses("E_STATE"):
            make_folder(str(tmp_path / name))
    for name in ("link", "file", "nothing"):
        with refuses("E_BLOB_UNAVAILABLE"):
            BlobFolder(str(tmp_path / name)).write(PAYLOAD, sync=False)
        assert refused(BlobFolder(str(tmp_path / name)), describe(PAYLOAD, "0" * 32)) == "E_BLOB_UNAVAILABLE"


@given(st.binary(min_size=0, max_size=100), st.sampled_from([1 << 16, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]))
@settings(max_examples=20)
def test_what_is_written_is_read(folder_path: Path, data: bytes, size: int) -> None:
    payload = encode_value(data.ljust(size, b"."))
    folder = BlobFolder(str(folder_path))
    blob = folder.write(memoryview(payload), sync=False)
    assert blob == describe(payload, blob.file)
    assert folder.read(blob, remove=True) == payload
    assert refused(folder, blob) == "E_BLOB_MISSING"


@pytest.fixture(scope="module")
def folder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("blobs") / "blobs"
    make_folder(str(made))
    return made


GOOD = describe(PAYLOAD, "0" * 32)


@pytest.mark.parametrize(
    "file", ["", "..", "../" * 10 + "aa", "/etc/passwd", "A" * 32, "0" * 31, "0" * 32 + "\n", "0" * 33]
)
def test_a_name_that_is_no_files_opens_nothing(folder: BlobFolder, file: str) -> None:
    assert refused(folder, Blob(file, GOOD.digest, GOOD.size)) == "E_BLOB_INVALID"
    assert refused(folder, Blob(GOOD.file, file, GOOD.size)) == "E_BLOB_INVALID"


@pytest.mark.parametrize("size", [0, -1, MAX_BLOB_BYTES + 1])
def test_a_size_that_nobody_may_have_is_refused_before_the_file_is_opened(folder: BlobFolder, size: int) -> None:
    assert refused(folder, Blob(GOOD.file, GOOD.digest, size)) == "E_BLOB_INVALID"


def test_what_is_no_regular_file_is_missing_and_nobody_waits_for_it(path: Path, folder: BlobFolder) -> None:
    blob = folder.write(PAYLOAD, sync=False)
    file = path / blob.file
    file.rename(path / "real")
    file.symlink_to("real")
    assert refused(folder, blob) == "E_BLOB_MISSING"
    file.unlink()
    os.mkfifo(file)
    assert refused(folder, blob) == "E_BLOB_MISSING"
    file.unlink()
    file.mkdir()
    assert refused(folder, blob) == "E_BLOB_MISSING"
    file.rmdir()
    assert refused(folder, blob) == "E_BLOB_MISSING"


def test_a_file_of_another_size_or_content_is_no_payload(path: Path, folder: BlobFolder) -> None:
    blob = folder.write(PAYLOAD, sync=False)
    file = path / blob.file
    for content in (PAYLOAD[:-1], PAYLOAD + b"x", b"", PAYLOAD[:-1] + b"y"):
        file.write_bytes(content)
        assert refused(folder, blob) == "E_BLOB_MISMATCH"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert refused(folder, blob) == "E_BLOB_MISMATCH"


def test_a_file_that_grows_or_is_swapped_while_it_is_read_gives_the_payload_or_an_error(
    path: Path, folder: BlobFolder
) -> None:
    """The right bytes or E_BLOB_MISMATCH, E_BLOB_MISSING; never other bytes."""
    payload = encode_value("p" * 300_000)
    blob = folder.write(payload, sync=False)
    file, other, stop = path / blob.file, path / "other", threading.Event()

    def meddle() -> None:
        while not stop.is_set():
            with file.open("ab") as end:
                end.write(b"more")
            other.write_bytes(b"q" * len(payload))
            other.rename(file)
            other.write_bytes(payload)
            other.rename(file)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        outcomes = {outcome(folder, blob) for _ in range(300)}
    finally:
        stop.set()
        meddler.join()
    assert outcomes <= {payload, "E_BLOB_MISMATCH", "E_BLOB_MISSING"}


def outcome(folder: BlobFolder, blob: Blob) -> bytes | str:
    try:
        return folder.read(blob)
    except GoondanError as error:
        return error.info.code


def test_a_payload_that_would_fill_its_receiver_is_refused(folder: BlobFolder) -> None:
    """A million empty lists take 90 MiB to decode; nesting takes the stack."""
    many = b"\xdd" + (MAX_VALUES + 1).to_bytes(4, "big") + b"\x90" * (MAX_VALUES + 1)
    deep = b"\x91" * 65 + b"\x90"
    for payload in (many, deep, b"\xdf\xff\xff\xff\xff"):
        assert refused(folder, folder.write(payload, sync=False)) == "E_FRAME_INVALID"
    assert folder.read(folder.write(b"\x91" * 64 + b"\x01", sync=False))


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "E_DISK_FULL"), (errno.EDQUOT, "E_DISK_FULL"), (errno.EIO, "E_STATE")]
)
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_payload_that_cannot_be_written_leaves_nothing(
    path: Path, folder: BlobFolder, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: str
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(GoondanError) as caught:
            folder.write(PAYLOAD, sync=True)
    assert caught.value.info.code == code
    assert list(path.iterdir()) == []
    assert folder.read(folder.write(PAYLOAD, sync=True)) == PAYLOAD


def test_the_folder_has_a_limit(path: Path) -> None:
    folder = BlobFolder(str(path), max_bytes=2 * len(PAYLOAD))
    blobs = [folder.write(PAYLOAD[:-1] + bytes([n]), sync=False) for n in (1, 2)]
    with refuses("E_DISK_FULL"):
        folder.write(PAYLOAD, sync=False)
    folder.remove([blobs[0].file, "0" * 32])
    assert folder.write(PAYLOAD, sync=False).file


def test_a_sweep_takes_what_is_old_and_referred_to_by_nobody(path: Path, folder: BlobFolder) -> None:
    kept, old, touched, new = [folder.write(encode_value([n]), sync=False) for n in range(4)]
    (path / ("f" * 32)).write_bytes(b"half")  # its writer was killed
    (path / "folder").mkdir()
    for entry in path.iterdir():
        if entry.name != new.file:
            os.utime(entry, (1, 1))
    folder.touch(touched)
    folder.touch(GOOD)
    assert folder.sweep({kept.file}, 900) == 2
    left = {entry.name for entry in path.iterdir()}
    assert left == {kept.file, touched.file, new.file, "folder"}
    assert old.file not in left
    assert BlobFolder("/nonexistent").sweep(frozenset(), 0) == 0
