"""`python -m goondan.kernel.supervisor`: first process of a kernel, parent of all others.

It takes the lock, loads the bundle, starts broker, tool host and fork server side by side, keeps them and the wanted
agents running, and at the end sees every process gone (life.py). It decides nothing: lifecycle.py does.

On `--ready-fd` it says one newline when the whole kernel is ready, or one line of JSON with the reason why it never
will be: `{"error": {…}, "problems": […]}`. When the other end of `--parent-fd` is closed it stops: whoever started
it is gone. If it is killed itself, everything below it is killed by its parent-death signal.

A restart in place ends every process below it and then replaces this program by a new one, under the same pid
(kernel/supervisor/handover.py).

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from goondan.kernel.ahead import Ahead, fork_programs, import_shared, receive
from goondan.kernel.spawn import WAITS, close_unknown_descriptors, read_environment
from goondan.kernel.start import SUPERVISOR
from goondan.kernel.supervisor.options import Options, load_bundle, parse, resuming
from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError

if TYPE_CHECKING:
    from goondan.kernel.supervisor.handover import Handover

#: Descriptors for thousands of agents: a pidfd each and a pipe while it starts.
WANTED_DESCRIPTORS: Final = 65536


def main(arguments: list[str] | None = None) -> int:
    """Run a kernel. 0 after an ordered stop, 1 when it could not start, 2 for a bad bundle or bad usage."""
    if sys.argv[1:2] == [WAITS]:
        try:
            import_shared()
        finally:  # the log, which comes now, tells what has failed
            needed = receive(SUPERVISOR, socket.socket(fileno=int(sys.argv[2])))
        if not needed:
            return 0
    callers_umask = startup.close_to_others()
    startup.raise_descriptor_limit(WANTED_DESCRIPTORS)
    ahead, resumed = Ahead(), None
    try:
        options = parse(arguments)
        if options.environment_fd is not None:  # else there may be secrets in the memory of this process already
            import_shared()
            ahead = fork_programs(options.state_dir, soon=options.parent_fd is not None)
            secrecy.close_memory()
            read_environment(options.environment_fd)
            options.environment_fd = None
        secrecy.close_memory()
        if options.resume_fd is not None:
            from goondan.kernel.supervisor.handover import read

            resumed = read(options.resume_fd)
    except GoondanError as error:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        return 2
    options.umask = callers_umask if resumed is None else resumed.umask
    known = [fd for fd in (options.ready_fd, options.parent_fd, options.agreed_fd) if fd is not None]
    known += ahead.descriptors
    close_unknown_descriptors(known if resumed is None else [*known, *resumed.descriptors])
    startup.set_process_name("gdn-supervisor")
    startup.become_subreaper()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is the parent descriptor's news
    begin_log("supervisor")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    return asyncio.Runner().run(_live(options, resumed, ahead))  # the process's end takes the loop apart


async def _live(options: Options, resumed: Handover | None, ahead: Ahead) -> int:
    from goondan.kernel.supervisor.life import Supervisor  # not before the forks, which have no use for it

    while True:
        supervisor = Supervisor(options, partial(load_bundle, start=ahead.start), resumed, ahead)
        status = await supervisor.run()
        if supervisor.handover is None:
            return status
        inherited = [] if options.parent_fd is None else [options.parent_fd]
        from goondan.kernel.supervisor.handover import execute, stay

        refused = execute(supervisor.handover, resuming(options), inherited)
        resumed = stay(supervisor.handover, refused)


if __name__ == "__main__":
    sys.exit(main())
