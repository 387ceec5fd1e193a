"""How much of each request of a long conversation its vendor's cache can know, with blocks that change every step."""

from __future__ import annotations

import itertools

from goondan.agentproc.http import wire_of
from goondan.agentproc.providers.base import ModelRequest
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec
from goondan.schemas.models.model_providers import BY_NAME
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make

TURNS = 30
FIND = "tool-search__find"
TOOLS = [CatalogItem(name=f"files__tool{n}", description=f"Does the work number {n}. " * 4) for n in range(30)]
#: What the mark of a cache is in a body. It is no part of what a cache compares.
MARK = b',"cache_control":{"type":"ephemeral"}'


async def conversation(make: Make) -> list[ModelRequest]:
    """The requests of 30 turns. In the first one a search shows two more tools; each step has another block."""
    first = (("a", FIND, {"query": "work number 7"}),)
    calls = [first, *[((f"c{n}", "files__tool1", {"n": n}),) for n in range(1, TURNS)]]
    answers = [answer for call in calls for answer in (wants(*call), says("It is done, as you can see. " * 3))]
    model = FakeModel(*answers)
    extensions = [
        bundled("context-message", {"include": ["agent", "time", "step"]}),
        bundled("tool-search", {"keep": ["files__tool1"], "from": 5, "maxResults": 2}),
    ]
    system = "You are careful and say what you do. " * 200  # 7 kB, as prompts of agents are
    agent = {"registry": TOOLS, "catalog": [tool.name for tool in TOOLS], "extensions": extensions, "system": system}
    runner = make(FakeLink(), model, **agent)
    await runner.load_extensions()
    for turn in range(TURNS):
        await runner.run(event_frame(f"e{turn}", f"Do the work of day {turn}, please."))
    return model.whole


def same(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[:middle] == other[:middle] else (least, middle - 1)
    return least


async def test_nearly_all_of_each_request_is_the_beginning_of_the_one_before(make: Make) -> None:
    requests = await conversation(make)
    assert len(requests) == 2 * TURNS
    assert requests[0].blocks != requests[1].blocks, "blocks that change"
    assert len(requests[1].tools) == len(requests[0].tools) + 2, "more tools than before the search"
    assert all(request.tools == requests[1].tools for request in requests[1:])
    parts: list[float] = []
    for provider in BY_NAME:
        vendor = wire_of(provider).VENDOR()
        bodies: list[bytes] = []
        for request in requests:
            spec = ModelSpec(provider=provider, model="m")
            changed = ModelRequest(
                agent="a",
                model=spec,
                messages=request.messages,
                tools=request.tools,
                step=1,
                system=request.system,
                blocks=request.blocks,
            )
            bodies.append(b"".join(vendor.request(changed).body).replace(MARK, b""))
        pairs = itertools.pairwise(bodies[1:])  # behind the search: more tools are another beginning
        parts += [same(before, body) / len(body) for before, body in pairs]
    assert min(parts) >= 0.95, f"lowest {min(parts):.3f}, mean {sum(parts) / len(parts):.3f} of {len(parts)}"
