"""Changesets and patches while processes of every kind are killed: serial, nothing lost, no half change, nothing left.

The bounded part kills one process of each kind and then some. `make chaos` runs it in full: GOONDAN_CHAOS_KILLS=200
means 50 proposals and so many kills.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from goondan.schemas.wire.errors import GoondanError
from tests.features.changesets.process.changeset_bundles import DOCUMENTS, Changing, git
from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.process.scripted_model import scripted_model

pytestmark = pytest.mark.feature("changesets")

CHAOS: Final = int(os.environ.get("GOONDAN_CHAOS_KILLS", "0"))
#: Proposals: fifty at once is what must hold.
PROPOSALS: Final = 50 if CHAOS else 6
#: Senders at once, each with an instance of its own.
LANES: Final = 10 if CHAOS else 4
#: One of each is killed before any is killed again.
ROLES: Final = ("changesets", "agent", "broker", "forkserver", "toolhost", "supervisor")
#: Between two kills (seconds): on average 0.7, at which changesets used to fail.
PACE_S: Final = (0.4, 1.0)
#: How long a proposal may take until it is through, whoever is killed meanwhile (seconds).
THROUGH_S: Final = 90.0
#: What a call may end with whose process was killed: it may have been done.
UNKNOWN: Final = "E_TOOL_OUTCOME_UNKNOWN"
SEED: Final = 13

#: A tool that commits a file of its own.
PROPOSING = """\
from pathlib import Path


def register(api):
    async def propose(ctx, input):
        opened = await api.swarm_bundle.open_changeset({"reason": "a proposal"})
        path = Path(opened["workdir"], "prompts", input["file"])
        path.write_text(input["text"])
        return await api.swarm_bundle.commit_changeset({"changesetId": opened["changesetId"]})

    api.tools.register({"name": "myExt.propose", "description": "Proposes.", "handler": propose})
"""


class Killer(threading.Thread):
    """Kills processes of a kernel, and starts it again when that was its supervisor."""

    def __init__(self, kernel: Sandbox, roles: Sequence[str], pace_s: tuple[float, float]) -> None:
        super().__init__()
        self.killed: Counter[str] = Counter()
        self._kernel = kernel
        self._roles = roles
        self._pace_s = pace_s
        self._over = threading.Event()
        self._chance = random.Random(SEED)

    @property
    def through(self) -> bool:
        """Whether one of each kind was killed."""
        return self.killed.keys() == set(self._roles)

    def run(self) -> None:
        deck: list[str] = []
        while not self._over.wait(self._chance.uniform(*self._pace_s)):
            deck = deck or self._chance.sample(self._roles, len(self._roles))
            role = next((role for role in deck if processes(self._kernel, role)), None)
            if role is None:
                continue
            deck.remove(role)
            for pid in processes(self._kernel, role)[: 1 if role != "changesets" else None]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed[role] += 1
            if role == "supervisor":
                self._start_again()

    def end(self) -> None:
        self._over.set()
        self.join()

    def _start_again(self) -> None:
        wait_until(lambda: self._kernel.gdn("run", "--detach").status == 0, 30, "the kernel starts again")


@contextmanager
def kills(kernel: Sandbox, roles: Sequence[str] = ROLES, pace_s: tuple[float, float] = PACE_S) -> Iterator[Killer]:
    """Somebody who kills, until this is left."""
    killer = Killer(kernel, roles, pace_s)
    killer.start()
    try:
        yield killer
    finally:
        killer.end()


def processes(kernel: Sandbox, role: str) -> list[int]:
    """The kernel's processes of a role. Workers of changesets are in no list. They are known by name and parent, which
    an ordinary user can read as well.
    """
    if role != "changesets":
        with suppress(GoondanError, OSError):  # nobody answers: it was killed a moment ago
            return [row["pid"] for row in kernel.ps() if row["role"] == role and row["pid"]]
        return []
    found = []
    supervisors = processes(kernel, "supervisor")
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            named, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if named == "gdn-changesets" and int(rest.split()[1]) in supervisors:
                found.append(pid)
    return found


class Proposer:
    """Proposes until it is through. Who hears nothing asks again under the same id (docs/reliability.md); who hears
    that nobody knows what became of it proposes anew.
    """

    def __init__(self, changing: Changing) -> None:
        self.changing = changing
        self.refused: list[str] = []
        self.unsure: Counter[str] = Counter()

    def propose(self, number: int) -> bool:
        until = time.monotonic() + THROUGH_S
        asked = json.dumps({"file": f"p{number}.md", "text": f"proposal {number}"})
        times = 1
        while time.monotonic() < until:
            told = self.changing.kernel.gdn(
                *("send", f"/myExt__propose {asked}", "--instance", f"i{number % LANES}"),
                *("--event-id", f"proposal{number}.{times}"),
                timeout=60,
            )
            answer = _object(told.out)
            if answer.get("status") == "ok":
                return True
            if answer.get("status") in ("rejected", "failed"):
                self.refused.append(told.out)
                return False
            unknown = UNKNOWN in told.out + told.err
            times += unknown
            self.unsure[UNKNOWN if unknown else (told.out + told.err)[:300]] += 1
            time.sleep(0.1)
        return False


def _object(text: str) -> dict[str, Any]:
    """The JSON object in what a model said."""
    if "{" not in text:
        return {}
    with suppress(json.JSONDecodeError):
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
        return found if isinstance(found, dict) else {}
    return {}


@pytest.mark.timeout(600)
def test_many_proposals_at_once_and_kills_of_everything() -> None:
    with sandbox(DOCUMENTS) as kernel:
        changing = Changing(kernel, PROPOSING)
        kernel.detach()
        proposer, numbers, done = Proposer(changing), itertools.count(), []
        before = len(changing.log)
        # Nobody kills any more when this is left, and then all lanes end, also those of a test that is stopped.
        with ThreadPoolExecutor(LANES) as pool, kills(kernel) as killer:

            def work() -> None:
                for number in numbers:
                    assert killer.is_alive(), "nobody kills any more"
                    if number >= PROPOSALS and killer.through and sum(killer.killed.values()) >= CHAOS // 5:
                        return
                    done.append((number, proposer.propose(number)))

            for lane in [pool.submit(work) for _ in range(LANES)]:
                lane.result()
        print(f"kills {dict(killer.killed)}; proposals {len(done)}; unsure {dict(proposer.unsure)}")

        assert proposer.refused == []
        assert [number for number, through in done if not through] == []
        files = sorted(f"prompts/p{number}.md" for number, _ in done)
        for number, _ in done:
            assert (changing.root / f"prompts/p{number}.md").read_text() == f"proposal {number}"
        # A chain of one commit after the other, each of which adds its own file once and takes none away.
        assert len(changing.log) == before + len(done)
        names = git(changing.root, "log", f"-{len(done)}", "--name-status", "--format=").split()
        assert sorted(names[1::2]) == files
        assert set(names[::2]) == {"A"}
        assert changing.status == ""
        wait_until(lambda: changing.worktrees == [] and changing.remains == [])
        errors = [text for text in proposer.unsure if text != UNKNOWN and "E_KERNEL" not in text]
        assert errors == []


#: Two facts that must agree lie in two files: the prompt, and the config of the extension that names a tool by it. Two
#: more are patched together. Calls take their time, so that some are killed in the middle.
FACTS = """\
import asyncio
import os
import re
from pathlib import Path

NOTES = Path(os.environ["GOONDAN_STATE_ROOT"], "extensions", "prompts", "notes")


def register(api, config):
    async def commit(ctx, input):
        opened = await api.swarm_bundle.open_changeset()
        root, number = Path(opened["workdir"]), input["number"]
        (root / "prompts" / "system.md").write_text(f"number {number}")
        documents = root / "goondan.yaml"
        documents.write_text(re.sub("number: [0-9]+", f"number: {number}", documents.read_text()))
        answer = await api.swarm_bundle.commit_changeset(
            {"changesetId": opened["changesetId"], "message": f"number {number}"}
        )
        await asyncio.sleep(0.1)
        return {"status": answer["status"]}

    async def patch(ctx, input):
        await asyncio.sleep(0.1)
        both = [
            {"op": "replace", "path": f"/extensions/0/config/{name}", "value": input["value"]}
            for name in ("left", "right")
        ]
        answer = await api.live_config.propose_patch({"patches": both, "scope": "agent"})
        return {"status": answer["status"]}

    for name, handler in (("commit", commit), ("patch", patch)):
        api.tools.register({"name": "facts." + name, "description": name, "handler": handler})
    told = f"{config['left']} {config['right']}"
    api.tools.register({"name": f"facts.n{config['number']}", "description": told, "handler": patch})

    def seen(ctx):
        prompt = ctx.effective_config["prompt"]["system"].split()[-1]
        own = ctx.effective_config["extensions"][0]["config"]
        fact = (ctx.turn.input_event.input, ctx.step.index, prompt, own["number"], config["number"], told)
        with open(NOTES, "a") as notes:
            notes.write("|".join(str(one) for one in fact) + "\\n")
        return ctx

    async def slowly(ctx):
        await asyncio.sleep(0.1)  # changes come in the middle of steps, before the model is asked
        return ctx

    api.pipelines.mutate("step.blocks", slowly)
    api.pipelines.mutate("toolCall.pre", seen)
"""
#: Turns with a commit and a patch each. They are repeated until something of all that is judged has happened: on a busy
#: machine every call may meet a kill.
TURNS: Final = 90 if CHAOS else 6
MOST_TURNS: Final = 10 * TURNS


class Fact:
    """What one model request says."""

    def __init__(self, body: dict[str, Any]) -> None:
        system = next(message["content"] for message in body["messages"] if message["role"] == "system")
        self.prompt = str(system).split()[-1]
        tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
        self.tools = [name.removeprefix("facts__n") for name in tools if name.startswith("facts__n")]
        self.left, self.right = tools[f"facts__n{self.tools[0]}"]["description"].split()
        last = max(at for at, message in enumerate(body["messages"]) if message["role"] == "user")
        self.step = sum(1 for message in body["messages"][last:] if message["role"] == "assistant")

    @property
    def agrees(self) -> bool:
        return self.tools == [self.prompt] and self.left == self.right


@pytest.mark.requirement("CONFIG-02", "BUNDLE-10")
@pytest.mark.timeout(600)
def test_no_step_sees_half_a_change() -> None:
    with scripted_model() as model:
        documents = DOCUMENTS.replace(
            "{provider: embedded}", f"{{provider: openai, model: m, endpoint: '{model.base}'}}"
        )
        documents = documents.replace("{level: 1}", "{number: 0, left: 0, right: 0}")
        with sandbox(documents, {"OPENAI_API_KEY": "k"}) as kernel:
            changing = Changing(kernel, FACTS, **{"goondan.yaml": documents, "prompts/system.md": "number 0"})
            model.otherwise = "done"
            kernel.detach()

            def turn(number: int) -> None:
                said = f"turn {number}"
                model.scripts[said] = [
                    [(f"commit{number}", "facts__commit", {"number": number})],
                    [(f"patch{number}", "facts__patch", {"value": number})],
                    "done",
                ]
                answer = kernel.gdn("send", said, "--instance", f"i{number % 3}", timeout=60)
                assert answer.status == 0, answer.err

            roles = ("agent", "agent", "broker", "changesets")
            with kills(kernel, roles, PACE_S) as killer, ThreadPoolExecutor(3) as pool:
                before = 0
                while True:
                    for done in [pool.submit(turn, before + one) for one in range(1, TURNS + 1)]:
                        done.result()
                    before += TURNS
                    facts = {said: [Fact(body) for body in bodies] for said, bodies in model.requests.items()}
                    commits = ["0", *(subject.split()[-1] for subject in reversed(changing.log[:-1]))]
                    results = {call: value for said in facts for call, value in model.results(said).items()}
                    told_so = [number for number in commits if results.get(f"commit{number}") == {"status": "ok"}]
                    patched = {fact.left for told in facts.values() for fact in told}
                    if (told_so and len(commits) > TURNS // 4 and len(patched) > 2) or before == MOST_TURNS:
                        break
            print(f"kills {dict(killer.killed)}; commits {len(commits) - 1}; requests {sum(map(len, facts.values()))}")

            halves = [vars(fact) for told in facts.values() for fact in told if not fact.agrees]
            assert halves == []
            # A call runs with what its step began with, whichever process takes it up.
            for line in changing.notes:
                said, step, prompt, effective, own, told = line.split("|")
                begun = [fact for fact in facts[said] if fact.step == int(step)][-1]
                assert (prompt, effective, own) == (begun.prompt,) * 3, line
                assert told == f"{begun.left} {begun.right}", line
            # What a turn has committed is there in its next step, with what came after it. Where the agent was killed
            # in the call, nobody has told the turn that it is committed.
            for number in told_so:
                later = [commits.index(fact.prompt) for fact in facts[f"turn {number}"] if fact.step > 0]
                assert min(later) >= commits.index(number), number
            assert told_so, results
            assert len(commits) > TURNS // 4, "it was little else than conflicts"
            assert len(patched) > 2
            assert changing.status == ""
            wait_until(lambda: changing.worktrees == [] and changing.remains == [])
