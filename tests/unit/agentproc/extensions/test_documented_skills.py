"""The skills example of the extension document of v0.9 (section 12), line by line, and the bundled extension beside it.

Both get the directories, the SKILL.md and the config of the document, and the same calls. They answer the same. The
bundled one runs commands in a jail: tests/features/skills/process/test_toolhost_skills.py has the same command there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from goondan.agentproc.machine.messages import ToolData
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec, ToolSource
from goondan.schemas.wire.codec import from_raw
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make

DOCUMENT = Path(__file__).parents[3] / "contract/spec_documents/extension_skills_all.yaml"
#: 12.5, `extensions/skills/index.ts`. `process.cwd()` is `api.workdir` here: the process is started by the kernel
#: (SKILL-17), and the workdir is known when the first turn begins.
INDEX = """
import asyncio
import os
import re

async def register(api):
    state = api.ext_state()
    config = api.extension.spec.config

    if not config:
        api.logger.warn("Skills Extension: config is missing")
        return

    skill_dirs = config["discovery"].get("repoSkillDirs") or [".claude/skills"]

    state["catalog"] = []
    state["rootDir"] = None
    state["openedSkills"] = {}

    # the scan at the beginning
    def scan_at_first():
        if state["rootDir"] is None:
            state["rootDir"] = api.workdir
            if config.get("autoScan", {}).get("onInit") is not False:
                state["catalog"] = scan_skills(state["rootDir"], skill_dirs, api.logger)

    # the scan on workspace.repoAvailable
    if config.get("autoScan", {}).get("onRepoAvailable") is not False:
        async def repo_available(payload):
            repo_path = payload.get("path") or state["rootDir"]
            state["rootDir"] = repo_path
            state["catalog"] = scan_skills(repo_path, skill_dirs, api.logger)
            api.logger.info(f"Skills rescanned: {len(state['catalog'])} found")

        api.events.on("workspace.repoAvailable", repo_available)

    # the catalog, and what is open, as blocks
    async def blocks_of(ctx):
        scan_at_first()
        blocks = [*ctx.blocks]

        if len(state["catalog"]) > 0:
            items = [{"name": s["name"], "description": s["description"]} for s in state["catalog"]]
            blocks.append({"type": "skills.catalog", "items": items})

        for name, content in state["openedSkills"].items():
            blocks.append({"type": "skills.open", "name": name, "content": content})

        return {**ctx, "blocks": blocks}

    api.pipelines.mutate("step.blocks", blocks_of)

    # skills.list
    async def list_skills(ctx, input):
        items = [{"name": s["name"], "description": s["description"], "path": s["path"]} for s in state["catalog"]]
        return {"items": items, "total": len(state["catalog"])}

    api.tools.register({
        "name": "skills.list",
        "description": "List all available skills with their descriptions",
        "handler": list_skills,
    })

    # skills.open
    async def open_skill(ctx, input):
        name = str(input["name"])
        skill = next((s for s in state["catalog"] if s["name"] == name), None)

        if skill is None:
            raise Exception(f"Skill not found: {name}")

        with open(skill["path"], encoding="utf-8") as file:
            content = file.read()

        state["openedSkills"][name] = content

        return {
            "name": skill["name"],
            "path": skill["path"],
            "dir": skill["dir"],
            "content": content,
            "hint": "Use skills.run to execute scripts in the skill directory",
        }

    api.tools.register({
        "name": "skills.open",
        "description": "Open a skill to read its full SKILL.md content and get the skill directory path",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Name of the skill to open"}},
            "required": ["name"],
        },
        "handler": open_skill,
    })

    # skills.close
    async def close_skill(ctx, input):
        name = str(input["name"])
        removed = state["openedSkills"].pop(name, None) is not None
        return {"closed": removed, "name": name}

    api.tools.register({
        "name": "skills.close",
        "description": "Close an opened skill (remove from context)",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Name of the skill to close"}},
            "required": ["name"],
        },
        "handler": close_skill,
    })

    # skills.run
    async def run_skill(ctx, input):
        name = str(input["name"])
        command = str(input["command"])
        args = [str(arg) for arg in input["args"]] if isinstance(input.get("args"), list) else []
        timeout = input.get("timeout") or 60000

        skill = next((s for s in state["catalog"] if s["name"] == name), None)
        if skill is None:
            raise Exception(f"Skill not found: {name}")

        try:
            proc = await asyncio.create_subprocess_shell(
                " ".join([command, *args]), cwd=skill["dir"],
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )
        except OSError as err:
            raise Exception(f"Failed to run command: {err}")
        stdout, stderr = await asyncio.wait_for(proc.communicate(), timeout / 1000)
        return {
            "code": proc.returncode,
            "stdout": stdout.decode().strip(),
            "stderr": stderr.decode().strip(),
            "skill": name,
            "command": command,
            "args": args,
        }

    api.tools.register({
        "name": "skills.run",
        "description": "Run a command in the skill directory",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "Name of the skill"},
                "command": {"type": "string", "description": 'Command to run (e.g., "./deploy.sh production")'},
                "args": {"type": "array", "items": {"type": "string"}, "description": "Command arguments"},
                "timeout": {"type": "number", "description": "Timeout in milliseconds (default: 60000)"},
            },
            "required": ["name", "command"],
        },
        "handler": run_skill,
    })


def scan_skills(root_dir, dirs, logger):
    items = []

    for dir in dirs:
        skill_root = os.path.join(root_dir, dir)

        try:
            for entry in sorted(os.scandir(skill_root), key=lambda entry: entry.name):
                if not entry.is_dir():
                    continue

                skill_dir = os.path.join(skill_root, entry.name)
                skill_md_path = os.path.join(skill_dir, "SKILL.md")

                try:
                    with open(skill_md_path, encoding="utf-8") as file:
                        content = file.read()
                    first_line = content.split("\\n")[0] or ""
                    description = re.sub(r"^#\\s*", "", first_line).strip()

                    items.append({
                        "name": entry.name,
                        "path": skill_md_path,
                        "dir": skill_dir,
                        "description": description or f"Skill: {entry.name}",
                    })

                    logger.debug(f"Skill found: {entry.name}")
                except OSError:
                    pass  # no SKILL.md: skipped
        except OSError:
            # no directory: skipped
            logger.debug(f"Skill directory not found: {skill_root}")

    return items
"""
#: 12.4, as it stands there.
DEPLOY = """\
# Deploy to Production

Production 환경에 애플리케이션을 배포합니다.

## 사용법

```bash
./deploy.sh [environment] [version]
```

## 파라미터

- `environment`: 배포 환경 (staging, production)
- `version`: 배포할 버전 태그

## 예시

```bash
./deploy.sh production v1.2.3
```

## 주의사항

- Production 배포 전 staging에서 테스트 필수
- 배포 시간: 약 5-10분 소요
"""
HINT = "Use skills.run to execute scripts in the skill directory"
KINDS = ["documented", pytest.param("bundled", marks=pytest.mark.feature("skills"))]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """12.3: the directory of skills."""
    top = tmp_path / "work/.claude/skills"
    for name, script, text in (
        ("deploy", "deploy.sh", DEPLOY), ("test", "run-tests.sh", "# Test"), ("refactor", "refactor.py", ""),
    ):  # fmt: skip
        (top / name).mkdir(parents=True)
        (top / name / "SKILL.md").write_text(text)
        (top / name / script).write_text('#!/bin/sh\necho " deployed $1 $2 "\n')
        (top / name / script).chmod(0o755)
    (top / "deploy/config.yaml").write_text("x: 1\n")
    return tmp_path / "work"


def config() -> dict[str, Any]:
    """12.2: the config of the document."""
    found: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text())["spec"]["config"]
    return found


async def start(make: Make, place: Path, kind: str, model: FakeModel) -> TurnRunner:
    if kind == "bundled":
        run = CatalogItem(name="skills__run", parameters={}, source=ToolSource("extension", "skills"))
        runner = make(FakeLink(), model, registry=[run], catalog=[], extensions=[bundled("skills", config())])
    else:
        (place / "extensions/skills").mkdir(parents=True)
        entry = place / "extensions/skills/index.py"
        entry.write_text(INDEX)
        resource = {"kind": "Extension", "metadata": {"name": "skills"}, "spec": {"config": config()}}
        spec = ExtensionSpec(name="skills", entry=str(entry), resource=resource, config=config())
        runner = make(FakeLink(), model, registry=[], catalog=[], extensions=[spec])
    await runner.load_extensions()
    return runner


def outputs(model: FakeModel) -> list[Any]:
    messages = [message.data for message in model.requests[-1].messages]
    found = [part.result for data in messages if isinstance(data, ToolData) for part in data.content]
    return [from_raw(result.output, object) if result.output is not None else result.error for result in found]


@pytest.mark.requirement("SKILL-01", "SKILL-05", "SKILL-07", "SKILL-08", "SKILL-09", "SKILL-10", "SKILL-12", "SKILL-18")
@pytest.mark.parametrize("kind", KINDS)
async def test_the_skills_are_found_opened_and_closed(make: Make, tmp_path: Path, workdir: Path, kind: str) -> None:
    name = {"name": "deploy"}
    model = FakeModel(
        wants(("a", "skills__list", {})),
        wants(("b", "skills__open", name)),
        wants(("c", "skills__close", name)),
        wants(("d", "skills__close", name), ("e", "skills__open", {"name": "nothing"})),
        says("done"),
    )
    runner = await start(make, tmp_path, kind, model)
    await runner.run(event_frame("e1", "go", workdir=str(workdir)))
    top = f"{workdir}/.claude/skills"
    described = {"deploy": "Deploy to Production", "refactor": "Skill: refactor", "test": "Test"}
    items = [{"name": name, "description": text} for name, text in described.items()]
    listed, opened, closed, again, unknown = outputs(model)
    assert listed == {"items": [{**item, "path": f"{top}/{item['name']}/SKILL.md"} for item in items], "total": 3}
    deploy = f"{top}/deploy"
    assert opened == {
        "name": "deploy", "path": f"{deploy}/SKILL.md", "dir": deploy, "content": DEPLOY, "hint": HINT,
    }  # fmt: skip
    assert (closed, again) == ({"closed": True, "name": "deploy"}, {"closed": False, "name": "deploy"})
    assert unknown.message == "Skill not found: nothing"
    catalog = {"type": "skills.catalog", "items": items}
    block = {"type": "skills.open", "name": "deploy", "content": DEPLOY}
    assert [request.blocks for request in model.requests] == [
        [catalog],
        [catalog],
        [catalog, block],
        [catalog],
        [catalog],
    ]
    shown = ["skills__close", "skills__list", "skills__open", "skills__run"]
    assert sorted(item.name for item in model.requests[0].tools) == shown


@pytest.mark.requirement("SKILL-03", "SKILL-06")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_repository_is_scanned(
    make: Make, tmp_path: Path, workdir: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (workdir / ".git").write_text("gitdir: elsewhere")
    runner = await start(make, tmp_path, kind, model := FakeModel(says("done"), says("done")))
    await runner.run(event_frame("e1", "go", workdir=str(workdir)))
    assert "skills: Skills rescanned: 3 found" in [record.getMessage() for record in caplog.records]
    (workdir / ".claude/skills/test/SKILL.md").unlink()
    runner.instance.events.emit("workspace.repoAvailable", {"path": str(workdir)}, emitter="the test")
    await runner.run(event_frame("e2", "again", workdir=str(workdir)))
    assert [[item["name"] for item in request.blocks[0]["items"]] for request in model.requests] == [
        ["deploy", "refactor", "test"],
        ["deploy", "refactor"],
    ]


async def test_a_command_of_the_documented_extension(make: Make, tmp_path: Path, workdir: Path) -> None:
    args = {"name": "deploy", "command": "./deploy.sh", "args": ["production", "v1.2.3"]}
    model = FakeModel(wants(("a", "skills__run", args)), says("done"))
    runner = await start(make, tmp_path, "documented", model)
    await runner.run(event_frame("e1", "go", workdir=str(workdir)))
    assert outputs(model) == [
        {
            "code": 0,
            "stdout": "deployed production v1.2.3",
            "stderr": "",
            "skill": "deploy",
            "command": "./deploy.sh",
            "args": ["production", "v1.2.3"],
        }
    ]
