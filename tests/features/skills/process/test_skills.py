"""Skills through the real kernel: found in the workdir, opened, run in a jail, and pinned by the operator."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.features.skills.process.test_toolhost_skills import make_skill
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox

SKILLS = BUNDLE.replace(
    "  tools: [Tool/bash]",
    "  tools: [Tool/bash]\n  extensions: [{ref: Extension/skills, config: {discovery: {skillDirs: [more]}}}]",
)
TOKEN = "deploy-secret-8642"


def run_each(kernel: Sandbox, workdir: Path, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """What each call gives; the error's message where one fails."""
    lines = [f"/{name} {json.dumps(args)}" for name, args in calls]
    ended = kernel.gdn("run", "--json", "--workdir", str(workdir), input="\n".join(lines) + "\n")
    answers = [answer["response"] for answer in json.loads(ended.out)["answers"]]
    return [json.loads(text) if text.startswith("{") else text for text in answers]


@pytest.mark.requirement("SKILL-01", "SKILL-17", "SKILL-18")
def test_skills_of_a_workdir_run_in_jails_and_a_pinned_one_has_its_grant() -> None:
    with sandbox(SKILLS, {"DEPLOY_TOKEN": TOKEN}) as kernel:
        workdir = kernel.home / "work"
        deploy = make_skill(workdir / ".claude/skills/deploy")
        make_skill(workdir / ".claude/skills/other")
        (deploy / "SKILL.md").write_text("# Deploy to Production\n\nProduction 환경에 애플리케이션을 배포합니다.\n")
        make_skill(kernel.home / "more/bundled")
        shown = kernel.gdn("grant", "skill", str(deploy), "--json").json
        assert (shown["pinned"], shown["description"]) == (False, "Deploy to Production")
        pinned = kernel.gdn("grant", "skill", str(deploy), "--pin", "--env", "DEPLOY_TOKEN")
        assert "+ env: DEPLOY_TOKEN" in pinned.out, pinned.err
        token = {
            "command": "./scripts/run.sh x; echo token=$(printf %s $DEPLOY_TOKEN | md5sum); ls /root /home 2>&1 | wc -l"
        }
        script = {"name": "bundled", "command": "./scripts/run.py", "args": ["a b"]}
        node = {"name": "other", "command": "scripts/run.js z" if shutil.which("node") else "echo node z known"}
        listed, one, other, bundled, js, unknown, fine = run_each(
            kernel,
            workdir,
            ("skills__list", {}),
            ("skills__run", {"name": "deploy", **token}),
            ("skills__run", {"name": "other", **token}),
            ("skills__run", script),
            ("skills__run", node),
            ("skills__run", {"name": "nothing", "command": "ls"}),
            ("bash__exec", {"command": "cat by-bash by-python"}),
        )
        assert {item["name"]: item["description"] for item in listed["items"]} == {
            "deploy": "Deploy to Production", "other": "Runs.", "bundled": "Runs.",
        }  # fmt: skip
        assert one["stdout"].splitlines()[:2] == [
            f"bash x in {deploy}",
            f"token={hashlib.md5(TOKEN.encode()).hexdigest()} -",
        ]
        assert other["stdout"].splitlines()[:2] == [
            f"bash x in {deploy.parent}/other",
            f"token={hashlib.md5().hexdigest()} -",
        ]
        assert bundled["stdout"] == "python ['a b'] known"
        assert js["stdout"] == "node z known"
        assert "Skill not found: nothing" in unknown
        assert fine.split() == ["made", "made"]
        assert not (deploy / "left").exists()
        assert TOKEN not in kernel.log("agent") + kernel.log("toolhost")


def test_the_operator_looks_at_a_skill_pins_it_and_takes_it_back() -> None:
    with sandbox(BUNDLE) as kernel:
        folder = make_skill(kernel.home / "deploy")
        (folder / "SKILL.md").write_text("---\nname: x\ndescription: D\nallowed-tools: Bash(git:*), Read\n---\n")

        def grant(*args: str) -> tuple[int, str]:
            ended = kernel.gdn("grant", "skill", str(folder), *args)
            return ended.status, ended.out + ended.err

        status, text = grant()
        assert status == 0
        assert "asks for the tool Bash(git:*), which grants nothing" in text
        assert "it calls itself 'x'" in text
        assert "not pinned" in text
        assert "+ network: a.example:443" in grant("--pin", "--network", "a.example:443", "--read", "/srv")[1]
        assert "+ read: /srv" in grant()[1]
        (folder / "data.txt").write_text("another byte")
        assert "not pinned" in grant()[1]
        assert "is not pinned as it is now" in grant("--unpin")[1]
        (folder / "data.txt").write_text("known\n")
        assert "not pinned" in grant("--unpin")[1]
        for wrong, code in (
            (("--pin", "--write", "/etc"), "E_CONFIG_DANGEROUS"),
            (("--pin", "--network", "nonsense"), "E_USAGE"),
            (("--pin", "--env", "A B"), "E_USAGE"),
            (("--env", "A"), "E_USAGE"),
            (("--pin", "--unpin"), "E_USAGE"),
        ):
            status, text = grant(*wrong)
            assert status != 0
            assert code in text
        assert "there is no skill" in kernel.gdn("grant", "skill", str(kernel.home / "nothing")).err
        policy = kernel.home / "state/policy.yaml"
        assert not policy.exists() or "pinned:" not in policy.read_text()
