"""Which jail a call goes to, and which jails there are: pure, with the time as an argument.

A slot is the place of one jail. States: `launching` (there is no jail yet; its calls wait) -> `open` (takes calls) ->
`closed` (finishes what it runs, takes nothing new, is on its way out) -> gone. There are never more slots than
`max_jails`, closed ones included, because their processes still live.

Rules.
- Calls with the same key share a slot, up to MAX_CALLS_PER_JAIL at a time; MAX_CALLS where each is forked. Work that
  goes on after its call was answered has places of its own, MAX_PENDING_PER_JAIL of them; where each is forked it
  stays in its own.
- A call that waits for a launch is an ordinary waiting call: it can be withdrawn for nothing. The jail comes anyway,
  and is there for the next one.
- When no slot is left for a new key, the idle slot that was used longest ago is closed; while none is idle, calls wait.
  The next slot goes to the agent that has the fewest, and among equals to who came first: an agent with many instances
  does not keep another one out.
- One root (the message that it all began with) leaves an eighth of the slots: there, nobody gets a further one who has
  more in use than would be left. Calls may block for long, and pending work for an hour.
- The host performs what is returned: start a jail for a slot, put calls into it, end it.

Source: sandbox.md sections 1 and 5; design section 6.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final

from msgspec import Struct

from toolhost.calls.taken import Call
from toolhost.policy.nested import MAX_CALLS

#: Calls in one jail at a time; more wait in the host, where they can be cancelled for nothing.
MAX_CALLS_PER_JAIL: Final = 64
#: Calls in one jail that were answered with `pending` and whose work goes on there.
MAX_PENDING_PER_JAIL: Final = 256

#: One slot in so many is left by whoever has some in use. Of fewer slots than that none is.
LEFT_PART: Final = 8

#: (tool, generation, agent, instanceKey, workdir, its base), with less or more of it for other kinds of isolation.
Key = tuple[str, ...]
#: Parts of a key that name an instance.
_OF_INSTANCE: Final = 4


class Slot:
    """The place of one jail. `calls` are those it runs, by their id in the jail, `most` so many at a time; `pending`
    those of them that were answered and whose work goes on. `root` is whose work it does.
    """

    __slots__ = ("calls", "closed", "idle_since", "jail", "key", "launching", "most", "pending", "root")

    def __init__(self, key: Key, most: int = MAX_CALLS_PER_JAIL, root: str = "") -> None:
        self.key = key
        self.root = root
        self.most = most
        self.launching = True
        self.calls: dict[str, Call] = {}
        self.pending: set[str] = set()
        self.closed = False
        self.idle_since: float | None = None
        self.jail: Any = None  # the live thing, the host's; None while it is being launched

    @property
    def room(self) -> int:
        """How many more calls it takes."""
        return 0 if self.launching else self.most - len(self.calls) + len(self.pending)

    @property
    def is_full_of_pending(self) -> bool:
        """Whether no more work can go on here."""
        return len(self.pending) >= MAX_PENDING_PER_JAIL


class Start(Struct, frozen=True):
    """Launch a jail for this slot, and say `launched` or `failed`. `call` is one of those that need it."""

    slot: Slot
    call: Call


class Assign(Struct, frozen=True):
    """Run this call in this slot, which has been launched."""

    slot: Slot
    call: Call


class End(Struct, frozen=True):
    """End this slot's jail; it runs nothing."""

    slot: Slot


Action = Start | Assign | End


def key_of(call: Call, *, forks: bool) -> Key:
    """Calls with the same key share a jail (sandbox.md section 1).

    `forks`: the jail of a tool with `isolation: call` can keep its calls apart; else each call has its own.
    """
    tool = call.tool
    isolation = tool.sandbox.isolation
    if isolation == "shared":
        return (tool.name, call.generation)
    key = (tool.name, call.generation, call.agent, call.instance_key, call.workdir or "", call.workdir_base or "")
    return (*key, call.id) if isolation == "call" and not forks else key


def instance_of(key: Key) -> tuple[str, str] | None:
    """The agent and the instance that a slot is for; None for one that is for several."""
    return (key[2], key[3]) if len(key) >= _OF_INSTANCE else None


def _agent(key: Key) -> str:
    """Whose jail it is; a shared one is nobody's."""
    return key[2] if len(key) > 2 else ""


def _root(call: Call) -> str:
    """Whose work a call is: what it began with, or its agent where nobody said that."""
    return call.root_event or call.agent


class Pool:
    """All slots, and the calls that wait for one."""

    def __init__(self, max_jails: int) -> None:
        self.max_jails = max(1, max_jails)
        self._by_key: dict[Key, Slot] = {}
        self._idle: dict[Slot, None] = {}  # longest idle first
        self._waiting: dict[Key, deque[Call]] = {}  # in order of arrival
        self._slots: set[Slot] = set()

    # --- the hot path

    def find(self, key: Key) -> Slot | None:
        """An open slot of this key with room; mark it with `enter`."""
        slot = self._by_key.get(key)
        return slot if slot is not None and slot.room > 0 else None

    def enter(self, slot: Slot, jail_id: str, call: Call) -> None:
        """The call is now run by the slot's jail."""
        slot.calls[jail_id] = call
        if slot.idle_since is not None:
            slot.idle_since = None
            slot.root = _root(call)
            self._idle.pop(slot, None)

    def leave(self, slot: Slot, jail_id: str, now: float) -> list[Action]:
        """The slot's jail is through with a call (whoever has answered it)."""
        slot.calls.pop(jail_id, None)
        slot.pending.discard(jail_id)
        if not slot.calls:
            if slot.closed:
                return [End(slot)]
            self._rest(slot, now)
        return self._serve() if self._waiting else []

    # --- the rest

    def launched(self, slot: Slot, now: float) -> list[Action]:
        """The slot's jail is there: its calls may begin."""
        slot.launching = False
        if slot.closed:
            return [End(slot)]
        if slot.key not in self._waiting:  # they have all been withdrawn
            self._rest(slot, now)
        return self._serve() if self._waiting else []

    def failed(self, slot: Slot) -> tuple[list[Call], list[Action]]:
        """The slot's jail could not be launched: the calls that have waited for it, which are the host's affair."""
        calls = [] if slot.closed else list(self._waiting.pop(slot.key, ()))
        return calls, self.gone(slot)

    def goes_on(self, slot: Slot, jail_id: str) -> list[Action]:
        """A call was answered with `pending`, and its work goes on: its place among the calls is free."""
        slot.pending.add(jail_id)
        return self._serve() if self._waiting else []

    def place(self, key: Key, call: Call) -> list[Action]:
        """Find a place for a call that `find` had none for."""
        self._waiting.setdefault(key, deque()).append(call)
        return self._serve()

    def withdraw(self, key: Key, call: Call) -> None:
        """The call needs no place any more. No matter if it has none."""
        waiting = self._waiting.get(key)
        if waiting is not None and call in waiting:
            waiting.remove(call)
            if not waiting:
                del self._waiting[key]

    def close(self, slot: Slot) -> list[Action]:
        """Nothing new goes to this slot. End it now if it is idle; else `leave` does when its last call is through."""
        if slot.closed or slot not in self._slots:
            return []
        self._unlist(slot)
        actions: list[Action] = [] if slot.calls or slot.launching else [End(slot)]
        return actions + (self._serve() if self._waiting else [])

    def gone(self, slot: Slot) -> list[Action]:
        """The slot's jail has ended for good; its calls are the host's affair."""
        self._unlist(slot)
        self._slots.discard(slot)
        return self._serve() if self._waiting else []

    def retire(self, before: float) -> list[Action]:
        """End what has been idle since `before` or longer."""
        actions: list[Action] = []
        for slot in list(self._idle):
            if slot.idle_since is None or slot.idle_since > before:
                break
            actions += self.close(slot)
        return actions

    def slots(self) -> list[Slot]:
        """Every slot, closed ones included."""
        return list(self._slots)

    def idle(self) -> list[Slot]:
        """The idle ones, longest idle first."""
        return list(self._idle)

    @property
    def waiting_count(self) -> int:
        """Calls without a place."""
        return sum(map(len, self._waiting.values()))

    def _serve(self) -> list[Action]:
        """Give waiting calls what places there are."""
        actions: list[Action] = []
        short = 0  # keys that need a slot while there is none
        held = Counter(_agent(slot.key) for slot in self._slots)
        in_use = Counter(slot.root for slot in self._slots if slot not in self._idle)
        waiting = list(self._waiting)
        while waiting:
            key = min(waiting, key=lambda key: (key not in self._by_key, held[_agent(key)]))  # the first of equals
            waiting.remove(key)
            calls = self._waiting[key]
            slot = self._by_key.get(key)
            if slot is None:
                root = _root(calls[0])
                if not self._leaves_enough(in_use, root):
                    continue
                if len(self._slots) >= self.max_jails:
                    short += 1
                    continue
                of_a_call = calls[0].tool.sandbox.isolation == "call"
                slot = Slot(key, MAX_CALLS if of_a_call else MAX_CALLS_PER_JAIL, root)
                self._slots.add(slot)
                in_use[root] += 1
                held[_agent(key)] += 1
                self._by_key[key] = slot
                actions.append(Start(slot, calls[0]))
            room = slot.room - sum(1 for action in actions if isinstance(action, Assign) and action.slot is slot)
            actions += [Assign(slot, calls.popleft()) for _ in range(min(room, len(calls)))]
            if not calls:
                del self._waiting[key]
        # Slots that are being ended already will serve the first of them.
        leaving = sum(1 for slot in self._slots if slot.closed and not slot.calls)
        for slot in list(self._idle)[: max(0, short - leaving)]:
            self._unlist(slot)
            actions.append(End(slot))
        return actions

    def _leaves_enough(self, in_use: Counter[str], root: str) -> bool:
        """Whether this root may have one more slot in use."""
        left = self.max_jails - in_use.total() - 1
        return left >= self.max_jails // LEFT_PART or in_use[root] <= left

    def _rest(self, slot: Slot, now: float) -> None:
        """The slot runs nothing."""
        if slot.idle_since is None:
            slot.idle_since = now
            self._idle[slot] = None

    def _unlist(self, slot: Slot) -> None:
        slot.closed = True
        self._idle.pop(slot, None)
        if self._by_key.get(slot.key) is slot:
            del self._by_key[slot.key]
