"""One jail and the calls in it, as far as decisions need it: what pool.py and machine.py change. Pure.

States: `launching` (there is no jail yet; its calls wait) -> `loading` (the worker has not said `ready`) -> `serving`
-> `gone`. Beside its state a session can be `closed`: it finishes what it runs, takes nothing new, and then ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from schemas.frames import ToolError
from toolhost.calls.call_registry import Call
from toolhost.calls.pending import Work

#: Calls in one jail at a time; more wait in the host, where they can be cancelled for nothing.
MAX_CALLS_PER_JAIL: Final = 64
#: Calls in one jail that were answered with `pending` and whose work goes on there.
MAX_PENDING_PER_JAIL: Final = 256
#: Ended calls of a jail by whose names it may still ask something, by mistake; whoever names an older one is lying.
ENDED_KNOWN: Final = 1024

#: (tool, generation, agent, instanceKey, workdir, its base), with less or more of it for other kinds of isolation.
Key = tuple[str, ...]
#: Parts of a key that name an instance.
_OF_INSTANCE: Final = 4

State = Literal["launching", "loading", "serving", "gone"]


class Session:
    """One jail's. Calls are known by their names in the jail (`Call.worker_call_id`).

    `number` tells it from every other session, `key` says which calls belong to it, `root` whose work it does, `most`
    how many calls it takes at a time. `calls` are those that it runs, `pending` those of them that were answered and
    whose place is free, `works` the work that goes on after its call was answered. `abandoned` are calls that nobody
    waits for and whose handlers still run, `ended` the last that are over. `own` are calls with processes of their own
    (`forks`), until the last of these is gone. `permissions` are what its tool was granted of the bus.
    `reason` is why its calls fail when that is not simply how it ended; `rerun`: it was ended for another call's sake,
    so idempotent calls run again. `background`: an export that may leave processes behind has run; `clean`: nothing has
    run since strays were looked for.
    """

    __slots__ = (
        "abandoned", "background", "calls", "clean", "closed", "ended", "forks", "idle_since", "key", "most", "number",
        "own", "pending", "permissions", "reason", "rerun", "root", "state", "works",
    )  # fmt: skip

    def __init__(self, key: Key, most: int = MAX_CALLS_PER_JAIL, root: str = "", number: int = 0) -> None:
        self.number = number
        self.key = key
        self.root = root
        self.most = most
        self.state: State = "launching"
        self.closed = False
        self.idle_since: float | None = None
        self.calls: dict[str, Call] = {}
        self.pending: set[str] = set()
        self.works: dict[str, Work] = {}
        self.abandoned: set[str] = set()
        self.ended: deque[str] = deque(maxlen=ENDED_KNOWN)
        self.own: dict[str, Call] = {}
        self.forks = False
        self.permissions: Sequence[str] = ()
        self.reason: ToolError | None = None
        self.rerun = False
        self.background = False
        self.clean = True

    @property
    def launching(self) -> bool:
        """Whether there is no jail yet."""
        return self.state == "launching"

    @property
    def room(self) -> int:
        """How many more calls it takes."""
        return 0 if self.launching else self.most - len(self.calls) + len(self.pending)

    @property
    def is_full_of_pending(self) -> bool:
        """Whether no more work can go on here."""
        return len(self.pending) >= MAX_PENDING_PER_JAIL

    @property
    def instance(self) -> tuple[str, str] | None:
        """The agent and the instance that it is for; None for one that is for several."""
        return (self.key[2], self.key[3]) if len(self.key) >= _OF_INSTANCE else None

    @property
    def agent(self) -> str:
        """Whose jail it is; a shared one is nobody's."""
        return agent_of(self.key)

    def under_way(self) -> list[str] | None:
        """What its jail must be watched for: calls by their names; None when there is nothing. From any thread."""
        calls = [*list(self.calls), *list(self.abandoned)]
        return calls if calls or self.background else None


def agent_of(key: Key) -> str:
    """Whose jail one with this key is; a shared one is nobody's."""
    return key[2] if len(key) > 2 else ""


def key_of(call: Call, *, forks: bool) -> Key:
    """Calls with the same key share a jail.

    `forks`: the jail of a tool with `isolation: call` can keep its calls apart; else each call has its own.
    """
    tool = call.tool
    isolation = tool.sandbox.isolation
    if isolation == "shared":
        return (tool.name, call.generation)
    key = (tool.name, call.generation, call.agent, call.instance_key, call.workdir or "", call.workdir_base or "")
    return (*key, call.id) if isolation == "call" and not forks else key
