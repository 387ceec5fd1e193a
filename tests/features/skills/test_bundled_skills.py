"""The bundled extension `skills`: what it finds, what the model reads, and its tools."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.machine.messages import ToolData
from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.skills.base.skills import skills
from goondan.features.skills.base.skills.skills import SkillPlace, find_skills, repository_place, served_skills
from goondan.schemas.bundle.launch import CatalogItem, ToolSource
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.frames import ToolCallPayload, ToolResult
from goondan.schemas.worker.servers import SHARED_RESOURCES, ServerResource
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of

#: The sample of the specification.
DEPLOY = """\
# Deploy to Production

Production 환경에 애플리케이션을 배포합니다.

## 사용법

```bash
./deploy.sh [environment] [version]
```
"""
#: A skill in the public format.
PUBLIC = """\
---
name: pdf
description: Fill in forms of PDF files. Use when somebody has a form.
license: Apache-2.0
allowed-tools: Bash(python3:*), Read
metadata:
  version: "1.0"
---

# PDF
"""
RUN = CatalogItem(name="skills__run", parameters={"type": "object"}, source=ToolSource("extension", "skills"))


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A workdir with two skills."""
    write(tmp_path / "work/.claude/skills/deploy", DEPLOY)
    write(tmp_path / "work/.claude/skills/pdf", PUBLIC)
    (tmp_path / "work/.claude/skills/notes").mkdir()
    (tmp_path / "work/.claude/skills/README.md").write_text("# Skills")
    return tmp_path / "work"


def write(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def as_repository(workdir: Path) -> None:
    (workdir / ".git").mkdir()
    (workdir / ".git/HEAD").write_text("ref: refs/heads/main\n")


async def run(
    make: Make,
    workdir: Path,
    *calls: tuple[str, dict[str, Any]],
    config: dict[str, Any] | None = None,
    event: str = "e1",
) -> tuple[TurnRunner, FakeLink, FakeModel]:
    """A turn in which each step makes one call."""
    steps = [wants((f"c{number}", name, args)) for number, (name, args) in enumerate(calls)]
    link, model = FakeLink(), FakeModel(*steps, says("done"))
    agent = {"registry": [RUN], "catalog": [], "addable": [RUN.name], "extensions": [bundled("skills", config or {})]}
    runner = make(link, model, **agent)
    await runner.load_extensions()
    await runner.run(event_frame(event, "go", workdir=str(workdir)))
    return runner, link, model


def results(model: FakeModel) -> list[Any]:
    """The outputs of the turn's calls; the error where one failed."""
    messages = [message.data for message in model.requests[-1].messages]
    found = [part.result for data in messages if isinstance(data, ToolData) for part in data.content]
    return [from_raw(result.output, object) if result.output is not None else result.error for result in found]


def found_in(*places: Path) -> skills.Found:
    return find_skills([SkillPlace(str(place)) for place in places])


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SKILL-04", "SKILL-07")
async def test_without_skills_nothing_is_shown(make: Make, tmp_path: Path) -> None:
    _, _, model = await run(make, tmp_path, ("skills__list", {}))
    assert results(model) == [{"items": [], "total": 0}]
    assert model.requests[0].blocks == []


@pytest.mark.requirement("SKILL-02", "SKILL-05")
async def test_directories_are_named_and_the_earlier_one_wins(
    make: Make, workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(workdir / ".agents/skills/deploy", "# Another")
    write(workdir / ".agents/skills/mine", "## Mine")
    elsewhere = write(tmp_path / "elsewhere/far", "# Far")
    config = {
        "discovery": {
            "repoSkillDirs": [".agents/skills", ".claude/skills", "nothing/here", "../elsewhere"],
            "skillDirs": [str(elsewhere.parent), "relative"],
        }
    }
    _, _, model = await run(make, workdir, ("skills__list", {}), config=config)
    (listed,) = results(model)
    assert {item["name"]: item["description"] for item in listed["items"]} == {
        "deploy": "Another",
        "mine": "Mine",
        "pdf": "Fill in forms of PDF files. Use when somebody has a form.",
        "far": "Far",
    }
    assert listed["items"][-1]["path"] == f"{elsewhere}/SKILL.md"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("there are two skills 'deploy'" in line and ".claude/skills/deploy" in line for line in said)
    assert any("'../elsewhere' leads out of the repository" in line for line in said)
    assert any("'relative' is no absolute path" in line for line in said)


@pytest.mark.requirement("SKILL-03", "SKILL-06")
async def test_a_repository_is_scanned_when_it_is_entered(
    make: Make, workdir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    as_repository(workdir)
    _, _, model = await run(make, workdir, config={"autoScan": {"onInit": False}})
    assert [item["name"] for item in model.requests[0].blocks[0]["items"]] == ["deploy", "pdf"]
    assert "skills: Skills rescanned: 2 found" in [record.getMessage() for record in caplog.records]


@pytest.mark.requirement("SKILL-03", "SKILL-06")
async def test_each_scan_can_be_turned_off(make: Make, workdir: Path) -> None:
    as_repository(workdir)
    off = {"autoScan": {"onInit": False, "onRepoAvailable": False}}
    runner, _, model = await run(make, workdir, ("skills__list", {}), config=off)
    assert model.requests[0].blocks == []
    assert results(model) == [{"items": [], "total": 0}]
    runner.instance.events.emit("workspace.repoAvailable", {"path": str(workdir)}, emitter="the test")
    await runner.run(event_frame("e2", "again", workdir=str(workdir)))
    assert model.requests[-1].blocks == []


@pytest.mark.requirement("SKILL-06", "SKILL-17")
async def test_the_repository_that_the_event_names_counts(make: Make, workdir: Path, tmp_path: Path) -> None:
    write(tmp_path / "other/.claude/skills/there", "# There")
    link, model = FakeLink(), FakeModel(says("one"), says("two"), says("three"))
    agent = {"registry": [RUN], "catalog": [], "extensions": [bundled("skills", {})]}
    runner = make(link, model, **agent)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go", workdir=str(workdir)))
    runner.instance.events.emit("workspace.repoAvailable", {"path": str(tmp_path / "other")}, emitter="the test")
    await runner.run(event_frame("e2", "again", workdir=str(workdir)))
    write(tmp_path / "other/.claude/skills/more", "# More")
    runner.instance.events.emit("workspace.repoAvailable", {}, emitter="the test")
    await runner.run(event_frame("e3", "again", workdir=str(workdir)))
    names = [[item["name"] for item in request.blocks[0]["items"]] for request in model.requests]
    assert names == [["deploy", "pdf"], ["there"], ["more", "there"]]


@pytest.mark.requirement("SKILL-16")
async def test_without_config_it_only_warns(make: Make, workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = bundled("skills")
    spec.resource["spec"]["config"] = None
    model = FakeModel(says("done"))
    runner = make(FakeLink(), model, registry=[RUN], catalog=[], extensions=[spec])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go", workdir=str(workdir)))
    assert "skills: Skills Extension: config is missing" in [record.getMessage() for record in caplog.records]
    assert (model.requests[0].tools, model.requests[0].blocks) == ([], [])


# --- its tools --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SKILL-08")
async def test_another_process_shows_what_was_opened(make: Make, workdir: Path) -> None:
    await run(make, workdir, ("skills__open", {"name": "deploy"}))
    _, _, model = await run(make, workdir / "..", ("skills__close", {"name": "deploy"}), event="e2")
    assert [block["type"] for block in model.requests[0].blocks] == ["skills.open"]


@pytest.mark.requirement("SKILL-11")
async def test_a_skill_that_there_is_not(make: Make, workdir: Path) -> None:
    calls = [("skills__open", {"name": "nothing"}), ("skills__run", {"name": "nothing", "command": "ls"})]
    _, link, model = await run(make, workdir, *calls)
    for error in results(model):
        assert error.message == "Skill not found: nothing"
        assert error.code == "E_TOOL"
    assert link.calls == []


@pytest.mark.requirement("SKILL-14")
async def test_a_run_goes_to_the_tool_host_with_the_folder_of_the_skill(make: Make, workdir: Path) -> None:
    args = {"name": "deploy", "command": "./deploy.sh", "args": ["production"]}
    _, link, _ = await run(make, workdir, ("skills.run", args))
    (call,) = link.calls
    payload = from_raw(call.payload, ToolCallPayload)
    assert (call.tool, payload.folder) == ("skills__run", f"{workdir}/.claude/skills/deploy")
    assert from_raw(payload.args, object) == args


async def test_what_was_written_meanwhile_is_listed_and_can_be_opened(make: Make, workdir: Path) -> None:
    runner, _, _ = await run(make, workdir, ("skills__list", {}))
    write(workdir / ".claude/skills/later", "# Later")
    model = FakeModel(wants(("a", "skills__list", {}), ("b", "skills__open", {"name": "later"})), says("done"))
    runner.instance._provider = model
    await runner.run(event_frame("e2", "again", workdir=str(workdir)))
    listed, *_ = results(model)[-2:]
    assert [item["name"] for item in listed["items"]] == ["deploy", "later", "pdf"]


async def test_allowed_tools_are_a_request_and_never_a_grant(make: Make, workdir: Path) -> None:
    write(workdir / ".claude/skills/greedy", "---\nname: greedy\ndescription: d\nallowed-tools: bash__exec\n---\n")
    calls = [("skills__open", {"name": "greedy"}), ("bash__exec", {"command": "ls"})]
    _, link, model = await run(make, workdir, *calls)
    opened, refused = results(model)
    assert "allowed-tools: bash__exec" in opened["content"]
    assert refused.code == "E_TOOL_NOT_IN_CATALOG"
    assert link.calls == []


async def test_opened_skills_have_a_bound_together(make: Make, workdir: Path) -> None:
    large = "# x\n" + "é" * 100_000
    for name in ("a", "b", "c"):
        write(workdir / f".claude/skills/{name}", large)
    calls = [("skills__open", {"name": name}) for name in ("a", "b", "c")]
    _, _, model = await run(make, workdir, *calls)
    first, second, third = results(model)
    assert (first["content"], second["content"]) == (large, large)
    assert (third.code, third.suggestion) == ("E_TOOL_LIMIT", "Close one with skills.close first.")


# --- hostile folders --------------------------------------------------------------------------------------------------


def test_links_pipes_and_large_files_are_no_skills(workdir: Path, tmp_path: Path) -> None:
    top = workdir / ".claude/skills"
    secret = write(tmp_path / "secret", "# Secret")
    (top / "linked").symlink_to(secret)
    (top / "inner").mkdir()
    (top / "inner/SKILL.md").symlink_to(secret / "SKILL.md")
    (top / "pipe").mkdir()
    os.mkfifo(top / "pipe/SKILL.md")
    (top / "folder/SKILL.md").mkdir(parents=True)
    write(top / "huge", b"# " + b"x" * skills.MAX_SKILL_FILE)
    write(top / "sparse", "# s")
    os.truncate(top / "sparse/SKILL.md", 1 << 40)
    write(top / "steering\x1b[31m", "# s")
    write(top / ("n" * 65), "# s")
    found = found_in(top)
    assert list(found.skills) == ["deploy", "pdf"]
    text = "\n".join(found.problems)
    assert "Secret" not in text
    assert "\x1b" not in text
    for name in ("inner", "pipe", "folder", "huge", "sparse", "steering"):
        assert f"/{name}" in text, text


def test_a_link_on_the_way_to_a_directory_of_skills_is_not_followed(workdir: Path, tmp_path: Path) -> None:
    write(tmp_path / "secret/skills/deploy", "# Secret")
    (workdir / "linked").symlink_to(tmp_path / "secret")
    place = repository_place(str(workdir), "linked/skills")
    assert place is not None
    assert find_skills([place]).skills == {}
    (tmp_path / "alias").symlink_to(workdir)
    place = repository_place(str(tmp_path / "alias"), "./.claude//skills/")
    assert place is not None
    assert list(find_skills([place]).skills) == ["deploy", "pdf"], "the root itself may be named through a link"


@pytest.mark.parametrize("directory", ["/etc", "../x", "a/../../x", "a\0b"])
def test_a_directory_outside_of_the_repository_is_none(directory: str) -> None:
    assert repository_place("/w", directory) is None


def test_thousands_of_folders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skills, "MAX_NAMES", 30)
    monkeypatch.setattr(skills, "MAX_SKILLS", 7)
    for number in range(40):
        write(tmp_path / f"s{number:03}", "---\nname: other\n---\n# x")
    found = found_in(tmp_path)
    assert len(found.skills) == 7
    assert found.problems[0] == f"{tmp_path} has more than 30 names; some were left out"
    assert found.problems[-1] == "there are more than 7 skills; 23 were left out"
    monkeypatch.setattr(skills, "MAX_PROBLEMS", 3)
    assert found_in(tmp_path).problems[-1] == "and 6 more"


def test_what_is_no_utf_8_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "bad", b"# A \xff\xfe skill\n\x80")
    found = found_in(tmp_path)
    assert found.skills["bad"].description == "A �� skill"
    assert skills.read_skill(found.skills["bad"]) == "# A �� skill\n�"


async def test_a_skill_that_went_or_was_exchanged_is_said(make: Make, workdir: Path, tmp_path: Path) -> None:
    runner, _, _ = await run(make, workdir)
    secret = write(tmp_path / "secret", "# Secret")
    top = workdir / ".claude/skills"
    (top / "deploy").rename(workdir / "gone")
    (top / "pdf").rename(workdir / "moved")
    (top / "pdf").symlink_to(secret)
    model = FakeModel(
        wants(("a", "skills__open", {"name": "deploy"}), ("b", "skills__open", {"name": "pdf"})), says("")
    )
    runner.instance._provider = model
    await runner.run(event_frame("e2", "again", workdir=str(workdir)))
    gone, exchanged = results(model)[-2:]
    assert gone.message == "Skill not found: deploy"
    assert "cannot be read" in exchanged.message
    assert code_of(ToolResult(status="error", error=exchanged)) == "E_TOOL"


@pytest.mark.requirement("SKILL-02")
def test_the_defaults_are_those_of_the_specification() -> None:
    assert skills.REPO_SKILL_DIRS == (".claude/skills",)


# --- skills of MCP servers --------------------------------------------------------------------------------------------


def resource(uri: str, description: str | None = "Reads bills.", name: str = "bills") -> ServerResource:
    return ServerResource(uri=uri, name=name, description=description)


async def test_a_skill_of_a_server_is_listed_and_says_how_it_is_read(make: Make, workdir: Path) -> None:
    calls = [
        ("skills__list", {}), ("skills__open", {"name": "bills"}), ("skills__run", {"name": "bills", "command": "ls"}),
    ]  # fmt: skip
    steps = [wants((f"c{number}", name, args)) for number, (name, args) in enumerate(calls)]
    link, model = FakeLink(), FakeModel(*steps, says("done"))
    agent = {"registry": [RUN], "catalog": [], "addable": [RUN.name], "extensions": [bundled("skills", {})]}
    runner = make(link, model, **agent)
    await runner.load_extensions()
    uri = "skill://office/bills/SKILL.md"
    shared = {"office": [resource(uri), resource("skill://deploy/SKILL.md"), resource("file:///bills/SKILL.md")]}
    runner.instance.extensions._shared[SHARED_RESOURCES] = shared
    await runner.run(event_frame("e1", "go", workdir=str(workdir)))
    listed, opened, refused = results(model)
    assert listed["items"][-1] == {"name": "bills", "description": "Reads bills.", "path": uri}
    assert [item["name"] for item in listed["items"]] == ["deploy", "pdf", "bills"]
    assert listed["items"][0]["description"] == "Deploy to Production", "the one on disk counts"
    assert model.requests[0].blocks[0]["items"][-1] == {"name": "bills", "description": "Reads bills."}
    hint = f"Read it with office__read_resource, uri {uri}; its other files are resources below skill://office/bills/"
    assert opened == {"name": "bills", "path": uri, "dir": "skill://office/bills", "content": "", "hint": hint}
    assert "it has no directory here" in refused.message
    assert link.calls == []


@pytest.mark.parametrize(
    "uri",
    [
        "skill://SKILL.md", "skill://a/b", "skill://a/SKILL.md?x", "https://a/SKILL.md", "skill://a b/SKILL.md",
        "skill://" + "a" * 65 + "/SKILL.md", "skill://" + "a/" * 1000 + "SKILL.md", "skill://\x1b[31m/SKILL.md",
        "skill:///SKILL.md", "skill://a/SKILL.md/",
    ],
)  # fmt: skip
def test_what_is_no_skill_of_a_server(uri: str) -> None:
    assert served_skills({"s": [resource(uri)]}, 10) == {}


def test_what_a_server_says_of_its_skills_is_bounded() -> None:
    many = [resource(f"skill://s{number}/SKILL.md", "---\nname: x\n" + "\x1b" + "d" * 5000) for number in range(20)]
    found = served_skills({"s": many, "t": many, "u": ["nonsense", None]}, 7)
    assert list(found) == [f"s{number}" for number in range(7)]
    assert all(len(skill.description) <= 1024 and "\x1b" not in skill.description for skill in found.values())
    assert found["s0"].reader == "s__read_resource"
