"""`python -m goondan.kernel.broker.token`: make a token for a process that is started by hand.

It reads the secret that a broker started with `--bundle` has left in its runtime directory, and writes the token to
standard output: for a descriptor or a file of mode 0600, never for an argument list or an environment.
"""

from __future__ import annotations

import argparse
import sys

from goondan.kernel.rundir import SECRET_FILE
from goondan.schemas.system.secrecy import close_memory
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.tokens import Claims, mint


def main(arguments: list[str] | None = None) -> int:
    """Print one token. 0, or 2 when the secret cannot be read."""
    close_memory()
    parser = argparse.ArgumentParser(prog="python -m goondan.kernel.broker.token", description="Make a launch token.")
    parser.add_argument("--run-dir", required=True, help="runtime directory of the broker")
    kinds = parser.add_subparsers(dest="kind", required=True)
    agent = kinds.add_parser("agent", help="for python -m goondan.agentproc")
    agent.add_argument("name")
    agent.add_argument("--instance", default="default", help="instance key (default: default)")
    host = kinds.add_parser("toolhost", help="for python -m goondan.toolhost")
    host.add_argument("--name", default="1", help="name of the tool host (default: 1)")
    kinds.add_parser("client", help="for a program that sends events")
    program = kinds.add_parser("program", help="for a program of a feature, as python -m goondan.features.NAME.process")
    program.add_argument("name")
    options = parser.parse_args(arguments)
    try:
        with open(f"{options.run_dir}/{SECRET_FILE}", "rb") as source:
            secret = source.read()
    except OSError as error:
        message = f"E_KERNEL_NOT_RUNNING: no broker started by hand in {options.run_dir}: {error}"
        print(visible_line(message), file=sys.stderr)
        return 2
    if options.kind == "agent":
        claims = Claims("agent", agent=options.name, instance_key=options.instance)
    elif options.kind == "toolhost":
        claims = Claims("toolhost", agent=options.name)
    elif options.kind == "program":
        claims = Claims("control", agent=options.name)
    else:
        claims = Claims("client")
    print(mint(secret, claims))
    return 0


if __name__ == "__main__":
    sys.exit(main())
