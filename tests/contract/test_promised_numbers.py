"""The numbers in docs/approvals.md and docs/reliability.md, in both languages, are those of the code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from goondan.agentproc.calls import MAX_REPEATS
from goondan.kernel.broker.approvals import history, room
from goondan.kernel.broker.journal import retention
from goondan.kernel.broker.mailbox import MAX_ATTEMPTS
from goondan.schemas.approval_rules import DEFAULT_EXPIRY_S, MAX_EXPIRY_S
from goondan.schemas.approvals import MAX_ARGS_BYTES
from goondan.schemas.launch import KernelPlan
from goondan.schemas.policies import SwarmPolicy

DOCS = Path(__file__).parents[2] / "docs"
#: Words of numbers, as the pages write them.
WORDS = {"en": {3: "three", 5: "five"}, "ko": {3: "세", 5: "다섯"}}


def page(name: str, language: str) -> str:
    """A page as one line."""
    return " ".join((DOCS / (f"{name}.md" if language == "en" else f"{name}.ko.md")).read_text().split())


@pytest.mark.parametrize("language", ["en", "ko"])
def test_approvals(language: str) -> None:
    text = page("approvals", language)
    assert f"`{DEFAULT_EXPIRY_S // 86_400}d`" in text
    assert f"`{MAX_EXPIRY_S // 86_400}d`" in text
    kept, items, whole = f"{history.MAX_KEPT:,}", f"{room.MAX_ITEMS:,}", f"{room.MAX_ITEM_BYTES >> 20} MiB"
    item, bytes_of = f"{room.MAX_OF_EVENT + 1:,}", f"{room.MAX_BYTES_OF_EVENT >> 20} MiB"
    args = f"{MAX_ARGS_BYTES >> 10} KiB"
    if language == "en":
        wanted = [
            f"The last {kept} decisions", f"At most {items} items of {whole}", f"the {item}th item of one turn",
            f"more than {bytes_of}", f"of more than {args}",
        ]  # fmt: skip
    else:
        wanted = [f"{kept}개가", f"{items}개, {whole}", f"{item}번째 항목", f"{bytes_of}를 넘게", f"{args}가 넘는"]
    assert [words for words in wanted if words not in text] == []


@pytest.mark.parametrize("language", ["en", "ko"])
def test_reliability(language: str) -> None:
    text, words = page("reliability", language), WORDS[language]
    hours, days = retention.KEEP_ANSWERS_MS // 3_600_000, retention.KEEP_IDS_MS // 86_400_000
    whole, crowded = f"{retention.KEEP_ANSWER_BYTES >> 30} GiB", f"{retention.CROWDED_BYTES >> 30} GiB"
    ids = f"{retention.KEPT_IDS:,}"
    if language == "en":
        wanted = [f"kept {hours} hours (of all of them together the newest {whole})"]
        wanted += [f"an id {days} days (the newest {ids} when the journal has more than {crowded})"]
        wanted += [f"after {words[MAX_ATTEMPTS]} ends", f"{words[MAX_REPEATS]} times at most"]
    else:
        wanted = [f"{hours}시간(모두 합해 가장 새로운 {whole})"]
        wanted += [f"id는 {days}일(저널이 {crowded}를 넘으면 가장 새로운 {ids}개)"]
        wanted += [f"{words[MAX_ATTEMPTS]} 번 끝나면", f"{words[MAX_REPEATS]} 번까지"]
    assert [part for part in wanted if part not in text] == []
    assert "`durability: power`" in text
    plan = {field.name: field.default for field in msgspec.structs.fields(KernelPlan)}
    assert SwarmPolicy().durability == plan["durability"] == "power"
