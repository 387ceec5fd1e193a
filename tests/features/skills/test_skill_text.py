"""What the text of a SKILL.md says, whoever wrote it."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.skills.api import (
    MAX_DESCRIPTION,
    BadFrontMatter,
    SkillText,
    is_skill_name,
    read_front_matter,
    read_skill_text,
)
from goondan.schemas.text.visible import visible_line

PUBLIC = """\
---
name: pdf-forms
description: >-
  Fill in forms of PDF files.
  Use when somebody has a form.
license: Apache-2.0
allowed-tools: Bash(python3:*), Read
metadata:
  author: somebody
  version: 1.0
---

# PDF forms
"""


def test_the_public_format_is_read() -> None:
    assert read_skill_text(PUBLIC, "pdf-forms") == SkillText(
        description="Fill in forms of PDF files. Use when somebody has a form.",
        name="pdf-forms",
        allowed_tools=["Bash(python3:*)", "Read"],
        license="Apache-2.0",
    )


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("# Deploy to Production\n\nText", "Deploy to Production"),
        ("#Deploy", "Deploy"),
        ("##  Deploy  ", "Deploy"),
        ("Deploy", "Deploy"),
        ("\ufeff# Deploy\r\nText", "Deploy"),
        ("", "Skill: deploy"),
        ("#\nText", "Skill: deploy"),
        ("\n# Later", "Skill: deploy"),
        ("---\nname: deploy\n---\n\n\n# Deploy\n", "Deploy"),
        ("---\nname: deploy\ndescription: ''\n---\n", "Skill: deploy"),
        ("---\nname: deploy\n...\nDeploy\n", "Deploy"),
        ("---\ndescription: |\n  one\n  two\n---\n# No", "one two"),
        ("---\ndescription: yes\n---\n", "yes"),
        ("# A \x1b[31mred\x07 one", "A \\x1b[31mred\\x07 one"),
    ],
)
@pytest.mark.requirement("SKILL-05")
def test_the_description_is_one_line(text: str, description: str) -> None:
    found = read_skill_text(text, "deploy")
    assert (found.description, found.problems) == (description, [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("---\nname: other\n---\n# D", "it calls itself 'other', and its folder is 'deploy'"),
        ("---\nname: deploy\n# D", "it has no end within"),
        ("---\n: [\n---\n# D", "the front matter cannot be used: "),
        ("---\n- a\n---\n# D", "it is no mapping"),
        ("---\na: b\n--- \n...\n", ""),
        ("---\n[a]: b\n---\n# D", "a key is no text"),
        ("---\n? {a: b}\n: c\n---\n# D", "a key is no text"),
        ("---\na: &x 1\nb: *x\n---\n# D", "it has an alias"),
        ("---\na: {b: {c: {d: {e: f}}}}\n---\n# D", "deeper than"),
        ("---\na: [" + "x," * 300 + "]\n---\n# D", "more than 256 values"),
        ("---\n" + "[" * 5000 + "\n---\n# D", "the front matter cannot be used: "),
        ("---\ndescription: " + "x" * 20_000 + "\n---\n# D", "it has no end within"),
    ],
)
def test_bad_front_matter_leaves_the_skill_with_a_problem(text: str, problem: str) -> None:
    found = read_skill_text(text, "deploy")
    assert problem in " ".join(found.problems)
    assert found.description


def test_a_long_description_is_cut() -> None:
    found = read_skill_text("# " + "x" * 5000, "deploy")
    assert len(found.description) == MAX_DESCRIPTION
    assert found.description.endswith("…")
    assert found.problems == ["its description has more than 1024 characters"]


def test_a_bomb_costs_nothing() -> None:
    names = [chr(97 + number) for number in range(20)]
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in pairwise(names)
    )
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(BadFrontMatter, match="alias"):
        read_front_matter(bomb)
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@given(st.text(max_size=300) | st.from_regex(r"(?s)\A---\n.{0,200}\n---\n.{0,40}\Z"))
def test_every_text_is_read_and_gives_one_line(text: str) -> None:
    found = read_skill_text(text, "deploy")
    assert 0 < len(found.description) <= MAX_DESCRIPTION
    assert visible_line(found.description) == found.description


@pytest.mark.parametrize("name", ["deploy", "a", "n" * 64, "pdf-forms", "배포", "My Skill"])
def test_names_of_skills(name: str) -> None:
    assert is_skill_name(name)


@pytest.mark.parametrize("name", ["", "n" * 65, " a", "a\n", "a\x1b[0m", "a\udc80"])
def test_what_is_no_name_of_a_skill(name: str) -> None:
    assert not is_skill_name(name)
