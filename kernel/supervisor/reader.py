"""`python -m goondan.kernel.supervisor.reader`: reads the bundle of a kernel that runs, in a process of its own. The
result is what may take the place of the revision that runs, or why nothing may.

So the kernel goes on serving meanwhile, whatever the bundle is. A restart begins with the same program: if the
installation is broken, this process fails and nothing has been stopped.
"""

from __future__ import annotations

import logging
import sys

import msgspec
from msgspec import Struct

from goondan.kernel.grants.powers import Power
from goondan.kernel.supervisor.options import Options, load_bundle
from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.wire import errors, frames


class Revision(Struct, frozen=True, tag="revision", kw_only=True):
    """A bundle that may run."""

    #: Names its content.
    revision: str
    #: msgpack of its KernelPlan.
    plan: bytes
    #: What it asks for beyond its jails.
    powers: list[Power]
    #: See goondan.kernel.bundle.loader.OpenedBundle.
    files: list[str] = []
    #: See goondan.kernel.bundle.loader.OpenedBundle.
    trees: list[str] = []


class RevisionRefused(Struct, frozen=True, tag="refused", kw_only=True):
    """A bundle that may not run."""

    #: Why it may not run.
    error: frames.ErrorPayload


Found = Revision | RevisionRefused

_decoder: msgspec.msgpack.Decoder[Found] = msgspec.msgpack.Decoder(Found)


def decode(data: bytes) -> Found:
    """Raises msgspec.DecodeError and its kin."""
    return _decoder.decode(data)


class Task(msgspec.Struct):
    """The input of a read: the options of the supervisor, and what the revision that runs asks for."""

    #: The options of the supervisor.
    options: Options
    #: What the revision that runs asks for.
    running: list[Power]


def read(task: Task) -> Found:
    """The bundle as it is now. Raises nothing of its own."""
    try:
        opened = load_bundle(task.options, task.running)
    except errors.GoondanError as error:
        return RevisionRefused(error=error.info)
    plan = opened.plan
    return Revision(
        revision=plan.revision,
        plan=msgspec.msgpack.encode(plan),
        powers=opened.powers,
        files=opened.files,
        trees=opened.trees,
    )


def main(arguments: list[str] | None = None) -> int:
    """0 when the result was written, whatever it says."""
    secrecy.close_memory()
    startup.close_to_others()
    parser = startup.option_parser("goondan.kernel.supervisor.reader", "Reads a bundle beside the kernel that runs it.")
    parser.add_argument("--task-fd", type=int, required=True, help="descriptor of the task (msgpack)")
    parser.add_argument("--result-fd", type=int, required=True, help="descriptor that the result is written to")
    parser.add_argument("--parent-pid", type=int, required=True, help="end when this process ends")
    given = parser.parse_args(arguments)
    startup.set_process_name("gdn-reader")
    startup.die_with_parent(given.parent_pid)
    begin_log("supervisor")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    with open(given.task_fd, "rb") as source:
        task = msgspec.msgpack.decode(source.read(), type=Task)
    with open(given.result_fd, "wb") as out:
        out.write(msgspec.msgpack.encode(read(task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
