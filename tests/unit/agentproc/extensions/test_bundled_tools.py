"""Bundled extensions about tools: tool-search and required-tools-guard."""

from __future__ import annotations

import pytest

from goondan.agentproc.machine.catalog import best
from goondan.agentproc.machine.messages import ToolData, UserData
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, failed, the_answer

TEXTS = {
    "files__read": "Read a text file.",
    "files__write": "Write a text file.",
    "mail__send": "Send a message to somebody.",
    "weather__get": "The weather of a city.",
    "bash__exec": "Run a command.",
}
REGISTRY = [CatalogItem(name=name, description=text) for name, text in TEXTS.items()]
FIND = "tool-search__find"


def shown(model: FakeModel) -> list[list[str]]:
    return [[item.name for item in request.tools] for request in model.requests]


async def test_the_model_sees_few_tools_finds_others_and_can_call_all(make: Make, link: FakeLink) -> None:
    model = FakeModel(
        wants(("a", FIND, {"query": "write files"}), ("b", "mail__send", {})),
        wants(("c", "files__write", {}), ("d", FIND, {"query": "forecast weather"})),
        says("done"),
    )
    config = {"keep": ["bash__*"], "from": 3, "maxResults": 1, "maxShown": 1}
    agent = {"registry": REGISTRY, "catalog": list(TEXTS), "extensions": [bundled("tool-search", config)]}
    runner = make(link, model, **agent)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    always = ["bash__exec", FIND]
    assert shown(model) == [always, [*always, "files__write"], [*always, "weather__get"]]
    assert [str(frame.tool) for frame in link.calls] == ["mail__send", "files__write"], "deferred tools can be called"
    data = model.requests[1].messages[2].data
    assert isinstance(data, ToolData)
    output = data.content[0].result.output
    assert output is not None
    found = from_raw(output, dict)
    assert found["searched"] == 5
    assert found["tools"] == [{"name": "files__write", "description": "Write a text file.", "parameters": None}]
    again = FakeModel(says("hello"))
    other = make(FakeLink(), again, **agent)
    await other.load_extensions()
    await other.run(event_frame("e2", "go"))
    assert shown(again) == [["bash__exec", FIND, "weather__get"]], "another process shows what was found"


async def test_found_tools_keep_their_places_behind_the_others(make: Make) -> None:
    asks = [
        wants((name, FIND, {"query": query}))
        for name, query in zip("abc", ("weather", "files", "weather"), strict=True)
    ]
    model = FakeModel(*asks, wants(("d", FIND, {"query": "message somebody"})), says("done"))
    config = {"keep": ["bash__*"], "from": 3, "maxResults": 2, "maxShown": 3}
    agent = {"registry": REGISTRY, "catalog": list(TEXTS), "extensions": [bundled("tool-search", config)]}
    runner = make(FakeLink(), model, **agent)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    always = ["bash__exec", FIND]
    files = ["files__read", "files__write"]
    assert shown(model)[:2] == [always, [*always, "weather__get"]]
    assert [sorted(names[3:]) for names in shown(model)[2:4]] == [files, files]
    assert shown(model)[2] == shown(model)[3], "what is found again keeps its place"
    assert shown(model)[4][2:] == [*shown(model)[3][3:], "mail__send"], "the one that was found first has gone"


async def test_few_tools_are_all_shown_without_a_search(make: Make) -> None:
    model = FakeModel(says("done"))
    runner = make(FakeLink(), model, extensions=[bundled("tool-search", {"from": 2})])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    assert shown(model) == [["bash__exec", "notes__add"]]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("read", ["files__read"]),
        ("file", ["files__read", "files__write"]),
        ("writing FILES", ["files__write", "files__read"]),
        ("what is the weather", ["weather__get"]),
        ("nothing fits", []),
        ("", []),
    ],
)
def test_what_fits_a_query_best_comes_first(query: str, names: list[str]) -> None:
    assert [item.name for item in best(REGISTRY, query, 2)] == names


# --- required-tools-guard -------------------------------------------------------------------------------------------


def texts(model: FakeModel) -> list[str]:
    """What the user's messages of the last request say."""
    return [m.data.content for m in model.requests[-1].messages if isinstance(m.data, UserData)]


async def test_a_turn_ends_when_its_required_tools_were_called(make: Make) -> None:
    link, model = FakeLink(), FakeModel(says("early"), wants(("a", "notes__add", {})), says("done"), says("again"))
    config = {"tools": ["notes__*"], "message": "First call:"}
    runner = make(link, model, extensions=[bundled("required-tools-guard", config)])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    assert the_answer(link).response == "done"
    assert texts(model) == ["go", "First call: notes__*"]
    await runner.run(event_frame("e2", "and now"))
    assert link.answers()[-1].status == "failed", "each turn needs them"


async def test_a_call_that_fails_does_not_count_and_the_turn_fails_after_the_reminders(make: Make) -> None:
    broken = ToolResult(status="error", error=tool_error("E_TOOL", "no", name="X"))
    link = FakeLink(lambda tool, args: broken)
    model = FakeModel(wants(("a", "notes__add", {})), says("one"), says("two"), says("three"))
    runner = make(link, model, extensions=[bundled("required-tools-guard", {"tools": ["notes__add"]})])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    failed(the_answer(link), "E_MIDDLEWARE", "required tools were not called with success: notes__add")
    assert len(model.requests) == 4


@pytest.mark.parametrize("way", ["fail", "pass"])
async def test_what_cannot_be_called_is_not_asked_for(make: Make, caplog: pytest.LogCaptureFixture, way: str) -> None:
    link, model = FakeLink(), FakeModel(says("one"), says("never"))
    config = {"tools": ["nothing__here"], "onMissing": way}
    runner = make(link, model, extensions=[bundled("required-tools-guard", config)])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert len(model.requests) == 1
    if way == "fail":
        assert answer.error is not None
        assert "not in the catalog: nothing__here" in answer.error.message
    else:
        assert answer.response == "one"
        assert "nothing__here" in caplog.text
