"""`gdn disk list|mount|unmount`: workdirs of instances that have file systems of their own, of all bundles.

The work is the tool host's (`toolhost/disk.py`). Exit status 1 when something could not be mounted or unmounted.

Source: docs/design/sandbox.md section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How long the tool host may take (seconds). It mounts a file system in milliseconds; it reads a damaged one whole.
_PATIENCE_S: Final = 600.0
_MIB: Final = 1 << 20


@click.group()
def command() -> None:
    """List, mount or unmount workdirs that have file systems of their own (`disk.sized` of policy.yaml)."""


@command.command(name="list")
@options.as_json
def list_(as_json: bool) -> int:
    """Show them, what their files take, and what their images take on the disk."""
    return _do("list", as_json)


@command.command()
@options.as_json
def mount(as_json: bool) -> int:
    """Mount them all, as after a reboot: the next call of a tool mounts only its own."""
    return _do("mount", as_json)


@command.command()
@options.as_json
def unmount(as_json: bool) -> int:
    """Unmount them all, before the state root is moved or removed. What is in use stays, and is named."""
    return _do("unmount", as_json)


def _do(action: str, as_json: bool) -> int:
    import subprocess

    import msgspec

    from goondan.kernel.cli.output import write_result
    from goondan.kernel.cli.state import checked_root
    from goondan.kernel.spawn import command as program
    from goondan.schemas.errors import fail

    argv = program("goondan.toolhost.disk", [action, checked_root()])
    try:
        done = subprocess.run(argv, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S)
        rows = msgspec.json.decode(done.stdout)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise fail("E_STATE", f"the workdirs could not be gone through: {error}") from None
    write_result(rows, *render(rows), as_json=as_json)
    return 1 if any(row["problem"] for row in rows) else 0


def render(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each."""
    from goondan.kernel.cli.terminal import printable

    lines = []
    for row in rows:
        files = f"{-(-row['usedBytes'] // _MIB)} MiB of files, " if row["mounted"] else ""
        state = "mounted" if row["mounted"] else "not mounted"
        said = f"; {row['problem']}" if row["problem"] else ""
        lines.append(printable(f"{row['workdir']}: {state}, {files}image {-(-row['imageBytes'] // _MIB)} MiB{said}"))
    return lines or ["no workdir has a file system of its own"]
