"""`python -m goondan.agentproc`: one agent process, started by hand or by another process manager."""

from __future__ import annotations

import sys

from goondan.agentproc.start.app import main, new_loop
from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError


def run(argv: list[str] | None = None) -> int:
    """Parse the command line and serve. Returns the exit status; 2 means that an option or the token cannot be used."""
    what = "One agent process. What it is and may do is in the token and comes from the broker."
    parser = startup.option_parser("goondan.agentproc", what)
    parser.add_argument("--endpoint", required=True, help="the broker's socket for agents, ipc://DIR/agents.sock")
    parser.add_argument("--token-fd", type=int, help="descriptor to read the launch token from")
    parser.add_argument("--token-file", help="file to read the launch token from")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when the broker has welcomed us")
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--broker-uid", type=int, help="user of the broker (default: ours); no other one is obeyed")
    secrecy.close_memory()
    options = parser.parse_args(argv)
    startup.close_to_others()
    startup.die_with_parent(options.parent_pid)
    startup.set_process_name("gdn-agent")
    begin_log("agent")
    try:
        token = startup.read_token(options.token_fd, options.token_file)
    except GoondanError as error:
        print(visible_line(f"agentproc: {error}"), file=sys.stderr)
        return 2
    return main(
        new_loop(),
        options.endpoint,
        token,
        name="gdn-agent",
        ready_fd=options.ready_fd,
        broker_uid=options.broker_uid,
    )


if __name__ == "__main__":
    sys.exit(run())
