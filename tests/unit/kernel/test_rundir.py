"""What is taken away with a runtime directory, and what stays."""

from __future__ import annotations

from pathlib import Path

from goondan.kernel import rundir


def test_what_a_killed_kernel_has_left_goes_and_what_others_put_there_stays(short_tmp: Path) -> None:
    path = short_tmp / "run"
    directory, _ = rundir.take([], name="run", state_dir=str(short_tmp), given=str(path))
    warm_up = path / rundir.WARMUP_FOLDER
    warm_up.mkdir()
    (warm_up / "conversation.db").write_bytes(b"of a turn that leads nowhere")
    (path / rundir.CLIENT_TOKEN).write_text("token")
    rundir.remove(directory)
    assert not path.exists()
    directory.close()

    directory, _ = rundir.take([], name="run", state_dir=str(short_tmp), given=str(path))
    (short_tmp / "mine").mkdir()
    (short_tmp / "mine/file").write_text("of somebody else")
    warm_up.symlink_to(short_tmp / "mine")
    rundir.sweep(directory)
    assert (short_tmp / "mine/file").exists()
    directory.close()
