"""`-` in the place of an argument."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.kernel.cli.console.lines import read_all
from goondan.schemas.wire.errors import GoondanError


def test_all_of_it_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 200_000)
    for limit, whole in ((200_000, True), (199_999, False)):
        fd = os.open(path, os.O_RDONLY)
        try:
            if whole:
                assert read_all(limit, fd) == b"x" * 200_000
                continue
            with pytest.raises(GoondanError) as caught:
                read_all(limit, fd)
            assert caught.value.info.code == "E_FRAME_TOO_LARGE"
        finally:
            os.close(fd)


def test_what_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(GoondanError) as caught:
            read_all(10, fd)
    finally:
        os.close(fd)
    assert caught.value.info.code == "E_USAGE"
