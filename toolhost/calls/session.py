"""One jail and the calls in it, as far as decisions need it. Pure.

States: `launching` (there is no jail yet; its calls wait) -> `loading` (the worker has not said `ready`) -> `serving`
-> `gone`. Beside its state a session can be `closed`: it finishes what it runs, takes nothing new, and then ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct, field

from goondan.schemas.bundle.launch import ServerSpec
from goondan.schemas.wire.frames import ToolError
from goondan.toolhost.calls import call_registry, results

#: Calls in one jail at a time. More calls wait in the host, where cancelling them costs nothing.
MAX_CALLS_PER_JAIL: Final = 64
#: Calls in one jail that were answered with `pending` and whose work goes on there.
MAX_PENDING_PER_JAIL: Final = 256
#: Names of ended calls that a jail may still use in a question, by mistake. Whoever uses an older name is hostile.
ENDED_KNOWN: Final = 1024

#: (tool, generation, agent, instanceKey, workdir, its base), shorter or longer for other kinds of isolation.
Key = tuple[str, ...]
#: How many parts of a key name an instance.
_OF_INSTANCE: Final = 4

State = Literal["launching", "loading", "serving", "gone"]


class JailSession(Struct, eq=False):
    """The session of one jail. Calls are known by their worker call ids."""

    #: Calls with this key belong to it.
    key: Key
    #: How many calls it takes at a time.
    most: int = MAX_CALLS_PER_JAIL
    #: The root that it works for.
    root: str = ""
    #: Its number; no other session has it.
    number: int = 0
    #: Its state.
    state: State = "launching"
    #: Whether it takes nothing new, and ends after its last call.
    closed: bool = False
    #: Since when it runs nothing (seconds); None while it runs something, or before its first launch has ended.
    idle_since: float | None = None
    #: The calls that it runs.
    calls: dict[str, call_registry.Call] = {}
    #: Those of its calls that were answered and whose place is free.
    pending: set[str] = set()
    #: The work that goes on after its call was answered.
    works: dict[str, results.Work] = {}
    #: Calls that nobody waits for and whose handlers still run.
    abandoned: set[str] = set()
    #: The last calls that are over.
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=ENDED_KNOWN))
    #: Calls with processes of their own, until the last of these is gone.
    own: dict[str, call_registry.Call] = {}
    #: Whether each call has processes of its own.
    forks: bool = False
    #: The permissions of its tool.
    permissions: Sequence[str] = ()
    #: Why its calls fail, when that is something else than how the jail ended.
    reason: ToolError | None = None
    #: Whether it was ended because of another call, so that idempotent calls run again.
    rerun: bool = False
    #: Whether an export has run that may leave processes behind.
    background: bool = False
    #: Whether nothing has run since the last look for orphans.
    clean: bool = True
    #: Whether it is an MCP server's.
    server: bool = False
    #: Whether it ends after one call or listing: that of a stateless server.
    once: bool = False
    #: The agent instances that are attached to the server. It does not end because nothing runs while there are any.
    attached: set[tuple[str, str]] = set()
    #: Of a server that wants somebody to log in: what that person is told. Until then the session stays as well.
    login: ToolError | None = None

    @property
    def launching(self) -> bool:
        """Whether there is no jail yet."""
        return self.state == "launching"

    @property
    def room(self) -> int:
        """How many more calls it takes."""
        return 0 if self.state == "launching" else self.most - len(self.calls) + len(self.pending)

    @property
    def is_full_of_pending(self) -> bool:
        """Whether no more work can go on here after its call was answered."""
        return len(self.pending) >= MAX_PENDING_PER_JAIL

    @property
    def instance(self) -> tuple[str, str] | None:
        """The agent and the instance that the jail is for; None for a jail that serves several."""
        return (self.key[2], self.key[3]) if len(self.key) >= _OF_INSTANCE and self.key[2] else None

    @property
    def agent(self) -> str:
        """The agent that the jail is for; "" for one that several agents share."""
        return agent_of(self.key)

    def under_way(self) -> list[str] | None:
        """The names of the calls for which its jail must be watched; None when there are none. From any thread."""
        if not (self.calls or self.abandoned or self.background):
            return None
        return [*list(self.calls), *list(self.abandoned)]


def agent_of(key: Key) -> str:
    """The agent of a jail with this key; "" for one that several agents share."""
    return key[2] if len(key) > 2 else ""


def key_of(call: call_registry.Call, *, forks: bool) -> Key:
    """Calls with the same key share a jail.

    `forks`: the jail of a tool with `isolation: call` can keep its calls apart; else each call has its own.
    """
    tool = call.tool
    if tool.server is not None:
        return _server_key(call, tool.server)
    isolation = tool.sandbox.isolation
    if isolation == "shared":
        return (tool.name, call.generation)
    key: Key = (tool.name, call.generation, call.agent, call.instance_key, call.workdir or "", call.workdir_base or "")
    if call.folder is not None:
        key = (*key, call.folder.path, call.folder.identity)
    return (*key, call.id) if isolation == "call" and not forks else key


def _server_key(call: call_registry.Call, server: ServerSpec) -> Key:
    """Everybody of one scope shares a stateful server. Each call and each listing of a stateless one has its own."""
    if server.scope == "instance":
        key: Key = (call.tool.name, call.generation, "", call.instance_key)
    else:
        places = (call.workdir or "", call.workdir_base or "")
        key = (call.tool.name, call.generation, call.agent, call.instance_key, *places)
    return key if server.mode == "stateful" else (*key, call.id)
