"""The numbers in docs/approvals.md and docs/reliability.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from goondan.agentproc.calls.caller import MAX_REPEATS
from goondan.kernel.broker.journal import tables as retention
from goondan.kernel.broker.state.mailbox import MAX_ATTEMPTS
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.bundle.resources import SwarmPolicy

DOCS = Path(__file__).parents[2] / "docs"
#: Words of numbers, as the pages write them.
WORDS = {3: "three", 5: "five"}


def page(name: str) -> str:
    """A page as one line."""
    return " ".join((DOCS / f"{name}.md").read_text(encoding="utf-8").split())


@pytest.mark.feature("approvals")
def test_approvals() -> None:
    from goondan.features.approvals.broker import decisions, items
    from goondan.features.approvals.wire import DEFAULT_EXPIRY_S, MAX_ARGS_BYTES, MAX_EXPIRY_S

    text = page("approvals")
    assert f"`{DEFAULT_EXPIRY_S // 86_400}d`" in text
    assert f"`{MAX_EXPIRY_S // 86_400}d`" in text
    kept, number, whole = f"{decisions.MAX_KEPT:,}", f"{items.MAX_ITEMS:,}", f"{items.MAX_ITEM_BYTES >> 20} MiB"
    item, bytes_of = f"{items.MAX_OF_EVENT + 1:,}", f"{items.MAX_BYTES_OF_EVENT >> 20} MiB"
    args = f"{MAX_ARGS_BYTES >> 10} KiB"
    wanted = [
        f"The last {kept} decisions", f"At most {number} items of {whole}", f"the {item}th item of one turn",
        f"more than {bytes_of}", f"of more than {args}",
    ]  # fmt: skip
    assert [words for words in wanted if words not in text] == []


def test_reliability() -> None:
    text = page("reliability")
    hours, days = retention.KEEP_ANSWERS_MS // 3_600_000, retention.KEEP_IDS_MS // 86_400_000
    whole, crowded = f"{retention.KEEP_ANSWER_BYTES >> 30} GiB", f"{retention.CROWDED_BYTES >> 30} GiB"
    ids = f"{retention.KEPT_IDS:,}"
    wanted = [f"kept {hours} hours (of all of them together the newest {whole})"]
    wanted += [f"an id {days} days (the newest {ids} when the journal has more than {crowded})"]
    wanted += [f"after {WORDS[MAX_ATTEMPTS]} ends", f"{WORDS[MAX_REPEATS]} times at most"]
    assert [part for part in wanted if part not in text] == []
    assert "`durability: power`" in text
    plan = {field.name: field.default for field in msgspec.structs.fields(KernelPlan)}
    assert SwarmPolicy().durability == plan["durability"] == "power"
