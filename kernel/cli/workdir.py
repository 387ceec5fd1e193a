"""`--workdir`: the directory that an operator gives to tools in place of the instance's own.

Every tool that is called there can write to it. The tool host refuses folders of the system, and folders of code that
runs outside of jails (toolhost/policy/subject.py). The kernel's own folders are refused here, before anything is
started.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from goondan.kernel import paths
from goondan.schemas.bundle.address import is_path
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import within
from goondan.schemas.worker.hidden import workspace_of

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import BundleTarget


def absolute_workdir(text: str, place: BundleTarget) -> str:
    """The absolute path of an existing directory. Links in it are not resolved.

    Raises GoondanError E_USAGE when it is not a directory, E_SANDBOX_DENIED when it holds state or sockets of the
    kernel.
    """
    path = os.path.abspath(os.path.expanduser(text)) if text and "\0" not in text else ""
    if not os.path.isdir(path):
        raise fail("E_USAGE", f"the work directory {text[:200]!r} is no directory", suggestion="Make it first.")
    if not is_path(path):
        hint = "Name a directory whose path is UTF-8."
        raise fail("E_USAGE", f"the path of the work directory {text[:200]!r} cannot be sent", suggestion=hint)
    real = os.path.realpath(path)
    state = os.path.realpath(paths.state_root())
    if within(real, state) and workspace_of(real, state) is None:
        raise _denied(path, state, "the state of agents")
    for sockets in _socket_folders(place):
        if within(real, sockets):
            raise _denied(path, sockets, "the sockets of kernels")
    return path


def _socket_folders(place: BundleTarget) -> list[str]:
    """The folders of runtime directories: the usual ones, and that of the running kernel."""
    from goondan.kernel import lock

    usual = [os.path.dirname(os.path.realpath(run_dir)) for run_dir in paths.run_dirs(place.bundle)]
    record = lock.read_record(place.state_dir)
    if record is None:
        return usual
    above = os.path.dirname(record.run_dir)
    return [*usual, above if os.path.basename(above).startswith("goondan") else record.run_dir]


def _denied(path: str, folder: str, what: str) -> GoondanError:
    message = f"the work directory {path[:200]} lies in {folder}, which holds {what}"
    return fail("E_SANDBOX_DENIED", message, suggestion="Name a directory of your own.")
