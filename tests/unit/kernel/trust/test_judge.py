"""Whether a bundle may run, and what a person is asked about."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.grants.powers import (
    Consent,
    Judgement,
    Module,
    Owner,
    OwnModel,
    Power,
    Reach,
    Variable,
    Writers,
    everything_trusted,
    judge,
    untrusted,
)

NET, ENV = Reach("t", "public"), Variable("A", "Agent")
OLD, NEW = Module("e", "e.py", "1"), Module("e", "e.py", "2")


def judged(*powers: Power, **consent: Any) -> Judgement:
    return judge(powers, Consent(**consent))


def test_a_bundle_of_jails_needs_no_answer() -> None:
    assert judged().reason == "nothing to ask"
    assert judged(OwnModel(asleep=True)).trusted
    assert not judged(OwnModel(asleep=False)).trusted


def test_a_first_run_asks_for_everything() -> None:
    found = judged(NET, ENV)
    assert (found.trusted, found.missing, found.known) == (False, [NET, ENV], False)


def test_what_was_agreed_to_is_not_asked_again_and_what_is_new_is() -> None:
    assert judged(NET, agreed=[NET, ENV], known=True).reason == "record"
    found = judged(NET, ENV, agreed=[NET], known=True)
    assert (found.trusted, found.missing) == (False, [ENV])
    assert judged(OwnModel(), agreed=[OwnModel(asleep=True)], known=True).trusted


@pytest.mark.parametrize(
    ("more", "consent", "trusted"),
    [
        ([], {}, True),  # in a folder of one's own, edits are one's own
        ([], {"elsewhere": True}, False),
        ([], {"elsewhere": True, "own": True}, True),
        ([Writers(None)], {}, False),
        ([Owner(1000)], {"own": True}, False),
    ],
)
def test_changed_modules(more: list[Power], consent: dict[str, Any], trusted: bool) -> None:
    found = judged(NEW, *more, agreed=[OLD, *more], known=True, **consent)
    assert found.trusted is trusted
    assert found.changed == ([] if trusted else [NEW])
    assert judged(OLD, *more, agreed=[OLD, *more], known=True, **consent).trusted


def test_a_command_trusts_everything_for_its_time() -> None:
    assert judged(NET, NEW, everything=True, elsewhere=True).reason == "command"
    assert everything_trusted({"GOONDAN_TRUST": "1"})
    assert not any(everything_trusted({"GOONDAN_TRUST": text}) for text in ("", "0", "yes", "true"))
    assert not everything_trusted({})


def test_the_quickstart_is_trusted_for_what_it_came_with() -> None:
    assert judged(OwnModel(), shipped=True).reason == "shipped"
    assert judged(OwnModel(), Writers(None), Owner(1000), shipped=True).trusted
    assert not judged(OwnModel(), NET, shipped=True).trusted


def test_a_kernel_that_runs_grows_by_nothing() -> None:
    assert judged(NET, running=[NET, ENV]).reason == "running"
    assert judged(NET, running=[NET], everything=False).trusted
    found = judged(NET, ENV, running=[NET])
    assert found.missing == [ENV]
    error = untrusted(found, "/b", running=True)
    assert error.info.code == "E_BUNDLE_UNTRUSTED"
    assert "the revision that runs stays" in error.info.message
    assert "gdn trust /b" in (error.info.suggestion or "")
    assert judged(NEW, running=[OLD], elsewhere=True).changed == [NEW]
    # What the user agrees to meanwhile counts as well.
    assert judged(NET, ENV, running=[NET], agreed=[ENV], known=True).trusted


def test_the_command_can_be_pasted() -> None:
    assert "gdn trust '/a b/$(x)'" in (untrusted(judged(NET), "/a b/$(x)").info.suggestion or "")
