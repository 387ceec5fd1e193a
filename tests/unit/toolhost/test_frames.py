"""Frames on a worker's socket, however the reads cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.inside.wire import MAX_FRAME, Frames, framed


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=40))
def test_frames_come_out_as_they_went_in(bodies: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, bodies))
    frames, found = Frames(), []
    for cut in cuts:
        found += frames.feed(data[:cut])
        data = data[cut:]
        assert found == bodies[: len(found)]
    assert found + frames.feed(data) == bodies


def test_a_frame_that_is_too_long_is_refused_before_its_bytes_have_come() -> None:
    assert Frames().feed(MAX_FRAME.to_bytes(4, "little")) == []
    with pytest.raises(ValueError, match="frame of 8388609 bytes"):
        Frames().feed((MAX_FRAME + 1).to_bytes(4, "little"))
