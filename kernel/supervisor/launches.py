"""Prepares the start of each process of a kernel: program, arguments, environment, descriptors, and token.

Tokens, plans and values of the environment are passed by descriptors, because arguments and environments can be read in
/proc.

A tool host may start before the plan is known. Then its parts of the plan are promised. Its token comes through a pipe,
which it reads to the end before anything else. The pipe ends when all promised parts are there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from goondan.kernel.premises import Premises
from goondan.kernel.rundir import WARMUP_FOLDER
from goondan.kernel.spawn import AGENT_ENVIRONMENT, AUTHORITIES, environment, fill, memory_file
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.programs import Program, programs
from goondan.kernel.supervisor.services import Launch
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.control import Principal
from goondan.schemas.wire.tokens import SOCKETS, Claims, mint

#: The one tool host of a kernel, as the broker names it.
TOOLHOST_NAME: Final = "1"


class _Promise(NamedTuple):
    """Our ends of the descriptors that were promised to a tool host."""

    #: The number of its start.
    run: int
    #: The pipe of its token.
    token_fd: int
    #: The memory file of granted values.
    values_fd: int

    def close(self) -> None:
        os.close(self.values_fd)
        os.close(self.token_fd)


class Launches:
    """The launches of one kernel. `on_host_status` gets the reading end of a tool host's news about its jails."""

    def __init__(
        self, options: Options, premises: Premises, secret: bytes, on_host_status: Callable[[int], None]
    ) -> None:
        self._options = options
        self._plan: KernelPlan | None = None
        self._premises = premises
        self._secret = secret
        self._on_host_status = on_host_status
        self._fork_channel: socket.socket | None = None
        self._promise: _Promise | None = None

    def know(self, plan: KernelPlan) -> None:
        """Use this plan for all later starts. A tool host that waits for a plan gets the promised parts."""
        self._plan = plan
        self._keep_promise()

    def close(self) -> None:
        """Handle that no plan will come."""
        promise, self._promise = self._promise, None
        if promise is not None:
            promise.close()

    def prepare(self, role: str, run: int) -> Launch:
        """Prepare the `run`-th start of this service."""
        if role == "broker":
            return self._broker(run)
        if role in programs():
            return self._program(programs()[role], run)
        return self._toolhost(run) if role == "toolhost" else self._fork_server()

    def take_fork_channel(self) -> socket.socket | None:
        """Take our end of the channel of the last fork server. It is given once."""
        channel, self._fork_channel = self._fork_channel, None
        return channel

    def endpoint(self, cls: str) -> str:
        """The endpoint of the broker for a class of peers."""
        return f"ipc://{self._premises.run_dir}/{SOCKETS[cls]}"

    def token(self, claims: Claims) -> str:
        """A token of this kernel, for the running revision."""
        return mint(self._secret, msgspec.structs.replace(claims, revision=self._known.revision))

    def agent_token(self, principal: Principal, launch: int) -> str:
        """The token of one launch of an agent."""
        return self.token(Claims("agent", principal.name, principal.instance_key, launch))

    # --- inside

    def _broker(self, run: int) -> Launch:
        plan_fd = memory_file("plan", msgspec.msgpack.encode(self._known))
        secret_fd = memory_file("secret", self._secret)
        arguments = ["--run-dir", self._premises.run_dir, "--plan-fd", str(plan_fd), "--secret-fd", str(secret_fd)]
        if run == 1:
            arguments.append("--new-kernel")
            if self._options.accept_loss:  # only for the first broker: nobody has agreed to a later loss
                arguments.append("--accept-loss")
        env = environment(os.environ)
        return Launch(module="goondan.kernel.broker", arguments=arguments, env=env, pass_fds=[plan_fd, secret_fd])

    @property
    def _known(self) -> KernelPlan:
        if self._plan is None:
            raise AssertionError("only a tool host starts before the plan is there")
        return self._plan

    def _toolhost(self, run: int) -> Launch:
        self.close()  # the promises to an earlier tool host
        token_fd, write_fd = os.pipe()
        values_fd = os.memfd_create("granted")
        self._promise = _Promise(run, write_fd, os.dup(values_fd))
        self._keep_promise()
        status_read, status_write = os.pipe()
        self._on_host_status(status_read)
        arguments = ["--endpoint", self.endpoint("toolhost"), "--token-fd", str(token_fd)]
        arguments += ["--status-fd", str(status_write), "--broker-uid", str(os.geteuid())]
        arguments += ["--umask", f"{self._options.umask:03o}", "--env-fd", str(values_fd)]
        env = environment(os.environ, AUTHORITIES)
        return Launch(
            module="goondan.toolhost", arguments=arguments, env=env, pass_fds=[token_fd, status_write, values_fd]
        )

    def _keep_promise(self) -> None:
        """When the plan is known, give a tool host the granted values of our environment, and then its token."""
        promise, plan = self._promise, self._plan
        if promise is None or plan is None:
            return
        granted = {name for tool in plan.toolhost.tools for name in tool.variables}
        values = {name: os.environ[name] for name in sorted(granted) if name in os.environ}
        fill(promise.values_fd, msgspec.msgpack.encode(values))
        with suppress(BrokenPipeError):  # the tool host is gone
            os.write(promise.token_fd, self.token(Claims("toolhost", TOOLHOST_NAME, launch=promise.run)).encode())
        self.close()

    def _program(self, program: Program, run: int) -> Launch:
        token_fd = memory_file("token", self.token(Claims("control", program.name, launch=run)).encode())
        arguments = ["--endpoint", self.endpoint("control"), "--token-fd", str(token_fd)]
        arguments += program.arguments(self._options.state_dir)
        env = environment(os.environ, program.variables)
        return Launch(module=program.module, arguments=arguments, env=env, pass_fds=[token_fd])

    def _fork_server(self) -> Launch:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        if self._fork_channel is not None:
            self._fork_channel.close()
        self._fork_channel = ours
        providers = {agent.model.provider for agent in self._known.agents.values()}
        return Launch(
            module="goondan.agentproc.forkserver",
            arguments=[
                *("--socket-fd", str(theirs.fileno())),
                *("--keep-fd", str(self._premises.alive_fd)),
                *("--scratch", os.path.join(self._premises.run_dir, WARMUP_FOLDER)),
                *(f"--provider={name}" for name in sorted(providers)),
            ],
            env=environment(os.environ, AGENT_ENVIRONMENT),
            pass_fds=[theirs.detach()],
        )
