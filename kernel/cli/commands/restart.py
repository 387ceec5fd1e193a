"""`gdn restart`: a running kernel reads its bundle again and restarts in place. The command returns when it is
ready.
"""

from __future__ import annotations

from typing import Final

import click

from goondan.kernel.cli import options

#: How long a restart may take (seconds): reading the bundle, the grace of the running turns, the ends of all processes,
#: and a start. Each has a limit of its own, and their sum is less than this.
RESTART_S: Final = 120.0


@click.command()
@options.bundle
@click.option(
    "--agent",
    metavar="AGENT",
    shell_complete=options.completed("agents"),
    help="Only the processes of this agent; the bundle is not read.",
)
@click.option("--fresh", is_flag=True, help="Conversations begin anew; what was said is kept in earlier.db.")
@options.as_json
def command(bundle: str | None, agent: str | None, fresh: bool, as_json: bool) -> int:
    """Restart a running swarm in place, with its bundle as it is now.

    Nothing is lost: conversations and messages stay, turns that run go on behind their next step, and commands that
    wait for an answer get it. A bundle that may not run changes nothing.
    """
    from goondan.kernel import lock
    from goondan.kernel.cli.attach import locate
    from goondan.kernel.cli.output import write, write_json, write_result
    from goondan.kernel.cli.plain import one_line
    from goondan.kernel.supervisor_client import SupervisorClient
    from goondan.schemas.wire.errors import fail

    place = locate(bundle)
    client = SupervisorClient.connect(place.state_dir)
    if client is None:
        record = lock.read_record(place.state_dir)
        if record is not None and record.by_hand and lock.is_held(place.state_dir):
            message = f"the kernel of {place.bundle} was started by hand, without a supervisor"
            raise fail("E_RESTART_REFUSED", message, suggestion="Restart its processes as they were started.")
        raise fail("E_KERNEL_NOT_RUNNING", f"no kernel runs {place.bundle}")
    try:
        reply = client.ask("restart", RESTART_S, reason="gdn restart", agent=agent, fresh=fresh)
        pid = client.pid
    finally:
        client.close()
    if agent is not None:
        many = reply.restarted or 0
        text = f"restarted {many} process{'' if many == 1 else 'es'} of {one_line(agent, 100)}"
        write_result({"restarted": "agent", "agent": agent, "processes": many, "fresh": fresh}, text, as_json=as_json)
    elif as_json:
        write_json({"restarted": "kernel", "pid": pid, "fresh": fresh})
    else:
        write(f"restarted, pid {pid}")
    return 0
