"""Fixtures and hooks of every test.

`@pytest.mark.requirement("NAME-01", …)` says which entries of requirements.yaml a test proves; an id that is not in
the list stops the run, so that a misspelt claim is not taken for a proof. `scripts/requirements.py` counts the claims.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

from goondan.features import parts
from tests.machine import settle
from tests.time_spent import TimeSpent

settle()
parts("wire")  # one process tests the halves of all processes: the error codes of features are known
#: What scripts/test sets for a run of all tests, which is two runs beside each other.
WHOLE_RUN = "GOONDAN_WHOLE_RUN" in os.environ
# A busy machine is no failure; and what CI runs must be the same twice. Each run elsewhere draws other examples: where
# everything is run, half as many do.
EXAMPLES = 25 if WHOLE_RUN else 50
settings.register_profile("house", deadline=None, max_examples=EXAMPLES, derandomize="CI" in os.environ)
settings.load_profile("house")

# What tests run is our own: nobody is there to be asked whether a bundle is trusted. Tests of that question unset it.
os.environ["GOONDAN_TRUST"] = "1"

REQUIREMENTS = Path(__file__).parent / "requirements.yaml"
#: Files that take long (20 s and more on a busy machine) run first, so that all workers of a whole run end at about the
#: same time. At its end such a run names the longest: tests/time_spent.py.
LONG = (
    "chaos/",
    *("containment/test_totals", "containment/test_no_user_namespaces", "features/certify/process/"),
    *("features/changesets/process/test_changeset_engine", "features/try_out/process/test_cli_tool"),
    *(f"features/mcp/process/test_mcp_{name}" for name in ("add", "agents", "host", "serve")),
    *(
        f"process/test_{name}"
        for name in (
            *("broker", "cli_harmless", "cli_init", "grants", "kernel_run", "live", "pending"),
            *("quickstart", "restart", "rust_client", "secrecy", "setup", "shutdown", "toolhost_app"),
            *("toolhost_javascript", "trust", "walkthrough"),
        )
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    """What is collected lives to the end: looking for garbage in it takes a quarter of the time of the collection."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):  # a controller of workers collects nothing
        gc.disable()
    if not is_worker:
        config.pluginmanager.register(TimeSpent(shown=WHOLE_RUN))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: the commands would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """From here on there is garbage, but none in what was collected; and little, so it is looked for seldom."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True)
def _state_root_stays() -> Iterator[None]:
    """An agent that loads extensions sets this variable for them. The next test starts without it."""
    before = os.environ.get("GOONDAN_STATE_ROOT")
    yield
    if before is None:
        os.environ.pop("GOONDAN_STATE_ROOT", None)
    else:
        os.environ["GOONDAN_STATE_ROOT"] = before


def pytest_xdist_auto_num_workers() -> int:
    """Two for each processor: a test of programs waits for half of its time, for an end, a deadline, a pause.

    The process beside them that runs all tests without programs (scripts/test) ends before they do.
    """
    return 2 * len(os.sched_getaffinity(0))


def pytest_collection(session: pytest.Session) -> None:
    """Each worker of a whole run first imports a share of the test modules: so all of them are compiled once, not once
    by each worker, which takes longer than anything else before the first test.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number and WHOLE_RUN:
        root = REQUIREMENTS.parent
        files = [path for folder in session.config.args for path in (root.parent / folder).rglob("test_*.py")]
        modules = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in files]
        for name in sorted(modules)[int(number) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            with suppress(Exception):  # whoever collects it says what is wrong with it
                import_module(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    known = set(re.findall(r"^- id: (\S+)$", REQUIREMENTS.read_text(encoding="utf-8"), flags=re.MULTILINE))
    claims = {id_: item.nodeid for item in items for mark in item.iter_markers("requirement") for id_ in mark.args}
    unknown = sorted(claims.keys() - known)
    if unknown:
        lines = [f"{id_} (claimed by {claims[id_]})" for id_ in unknown]
        raise pytest.UsageError("no such requirement in tests/requirements.yaml: " + ", ".join(lines))


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A fresh directory with a short path, closed to others: ipc socket paths are limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="gd", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def workdir(short_tmp: Path) -> Path:
    """A folder for tools to work in; what else is in `short_tmp` is beside it."""
    path = short_tmp / "work"
    path.mkdir()
    return path
