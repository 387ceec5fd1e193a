"""The messages of the broker and the supervisor: payloads of `runtime.event` frames on the control socket.

Level-triggered: the broker sends the whole set of wanted principals at each control connect and changes after; the
supervisor reconciles to the set. Nothing here is ever seen by an agent, a tool host or a client.

Source: docs/design/processes.md section 4.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from msgspec import Raw, Struct

from goondan.schemas.wire.frames import ErrorPayload, ShutdownReason


class Principal(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One process that can be wanted, run or lost."""

    #: `agent` or `toolhost`.
    role: str
    #: The name of the agent or of the tool host.
    name: str
    #: The instance key of the agent. None: a tool host.
    instance_key: str | None = None


class Running(Struct, frozen=True, rename="camel"):
    """A principal whose process the supervisor has running."""

    #: The principal.
    principal: Principal
    #: The number of its launch, as in its token.
    launch: int
    #: It has loaded what it needs.
    ready: bool = True


class ForFeature(Struct, frozen=True, tag="for_feature", tag_field="kind"):
    """A message between the halves of a feature in the broker and in the supervisor, both ways."""

    #: The name of the feature.
    feature: str
    #: The message, as the feature's `wire` has it.
    payload: Raw


# --- broker to supervisor -------------------------------------------------------------------------------------------


class Wanted(Struct, frozen=True, tag="wanted", tag_field="kind", rename="camel"):
    """Principals that should run. With `full` the list is the whole set, else an addition to it."""

    #: The principals.
    principals: list[Principal]
    #: The list is the whole set.
    full: bool = False


class Retire(Struct, frozen=True, tag="retire", tag_field="kind", rename="camel"):
    """The broker has confirmed an agent's `bye`, or wants room: this launch is no longer wanted and will exit."""

    #: The agent and its instance.
    principal: Principal
    #: The number of the launch.
    launch: int
    #: It has said goodbye: it holds nothing any more.
    done: bool = False


class Kill(Struct, frozen=True, tag="kill", tag_field="kind", rename="camel"):
    """End this launch now and report its exit."""

    #: The principal.
    principal: Principal
    #: The number of its launch.
    launch: int
    #: Why: for example it hangs, or its lease expired.
    reason: str


class CheckBundle(Struct, frozen=True, tag="check_bundle", tag_field="kind", rename="camel"):
    """See whether the bundle as it is now may run. One BundleChecked with the same name follows."""

    #: The name of the question.
    name: str


class RestartDue(Struct, frozen=True, tag="restart_due", tag_field="kind", rename="camel"):
    """Restart: the journal has the request, and the step of the turn that asked has ended. Nothing is handed out any
    more.
    """

    #: Why.
    reason: str


class BegunAnew(Struct, frozen=True, tag="begun_anew", tag_field="kind", rename="camel"):
    """The answer to BeginAnew: the journal has it."""

    #: The agent; "": all of them.
    agent: str


class ProgramWanted(Struct, frozen=True, tag="program_wanted", tag_field="kind"):
    """Somebody has work for this program of a feature, and it is not connected: start it, if it does not run."""

    #: Its name.
    name: str


class Revised(Struct, frozen=True, tag="revised", tag_field="kind", rename="camel"):
    """The answer to the last Revise: this revision is what the broker serves now."""

    #: The revision.
    revision: str


# --- supervisor to broker -------------------------------------------------------------------------------------------


class Inventory(Struct, frozen=True, tag="inventory", tag_field="kind", rename="camel"):
    """Everything that runs: sent once after every control `welcome`."""

    #: What runs.
    running: list[Running]


class Exited(Struct, frozen=True, tag="exited", tag_field="kind", rename="camel"):
    """The process of a launch has ended. The supervisor has observed it."""

    #: The principal.
    principal: Principal
    #: The number of its launch.
    launch: int
    #: Why it ended, for a person: for example `signal SIGKILL`.
    cause: str
    #: Its end was asked for.
    ordered: bool = False
    #: It had become ready. The supervisor counts the starts of agents that did not become ready, until it sends
    #: SpawnFailed.
    started: bool = True


class Ready(Struct, frozen=True, tag="ready", tag_field="kind", rename="camel"):
    """An agent's launch has loaded what it needs, and takes events."""

    #: The agent and its instance.
    principal: Principal
    #: The number of the launch.
    launch: int


class SpawnFailed(Struct, frozen=True, tag="spawn_failed", tag_field="kind", rename="camel"):
    """A principal could not be started. Its events end as E_AGENT_SPAWN_FAILED."""

    #: The principal.
    principal: Principal
    #: How many starts in a row failed.
    attempts: int
    #: Why the last one failed.
    message: str


class Drain(Struct, frozen=True, tag="drain", tag_field="kind", rename="camel"):
    """The kernel ends: every agent gets a `shutdown` frame with these values. Nothing new is taken or handed out."""

    #: The time that is given (milliseconds). None: no limit.
    grace_period_ms: int
    #: Why the kernel ends.
    reason: ShutdownReason


class BundleChecked(Struct, frozen=True, tag="bundle_checked", tag_field="kind", rename="camel"):
    """The answer to CheckBundle: the bundle may run; with `error`: it may not, or nobody can say."""

    #: The name of the question.
    name: str
    #: Why the bundle may not run; None: it may.
    error: ErrorPayload | None = None


class RestartUndone(Struct, frozen=True, tag="restart_undone", tag_field="kind", rename="camel"):
    """What was due is not done, for this reason. The kernel goes on."""

    #: Why it is not done.
    error: ErrorPayload


class BeginAnew(Struct, frozen=True, tag="begin_anew", tag_field="kind", rename="camel"):
    """Conversations of this agent, or of all ("" for the name), begin again with their next process."""

    #: The agent; "": all of them.
    agent: str


class RestartAgents(Struct, frozen=True, tag="restart_agents", tag_field="kind", rename="camel"):
    """Every process of these agents is to come to a step boundary and to leave. A principal that has work gets a new
    process.
    """

    #: Names of the agents.
    agents: list[str]
    #: After how many milliseconds a process is cut off. None: it is never cut off.
    grace_period_ms: int | None
    #: Why they restart.
    reason: ShutdownReason = "restart"
    #: Only the processes of these launches. None: all.
    launches: list[int] | None = None


class Revise(Struct, frozen=True, tag="revise", tag_field="kind", rename="camel"):
    """One piece of a plan (msgpack of KernelPlan) that takes the place of the one that the broker has. Pieces come in
    order.
    """

    #: The number of this piece, from 0.
    piece: int
    #: How many pieces there are.
    pieces: int
    #: The bytes of the piece.
    data: bytes


#: What is about the bundle: the conductor's of the supervisor.
AboutBundle = CheckBundle | RestartDue | BegunAnew | Revised | ForFeature
ToSupervisor = Wanted | Retire | Kill | AboutBundle | ProgramWanted
ToBroker = (
    Inventory
    | Ready
    | Exited
    | SpawnFailed
    | Drain
    | BundleChecked
    | RestartUndone
    | BeginAnew
    | RestartAgents
    | Revise
    | ForFeature
)
