"""A signal in the middle of an import is handled when the import is over."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from goondan.kernel.start import import_whole


def module(folder: Path, name: str, number: signal.Signals) -> str:
    """A module that is interrupted half way."""
    # To this very thread: a worker of pytest has others, and a signal to the process may go to one of them.
    (folder / f"{name}.py").write_text(f"import signal\nsignal.raise_signal({int(number)})\nwhole = True\n")
    return name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_is_whole_before_the_signal_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.syspath_prepend(tmp_path)
    name = module(tmp_path, f"interrupted_by_{number.name.lower()}", number)
    before = signal.signal(number, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            import_whole(name)
        assert sys.modules[name].whole
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, set()) & {signal.SIGINT, signal.SIGTERM}
    finally:
        signal.signal(number, before)
        sys.modules.pop(name, None)


def test_an_import_that_fails_says_so_and_signals_come_again() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_whole("goondan.kernel.cli.no_such_command")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, set()) & {signal.SIGINT, signal.SIGTERM}
