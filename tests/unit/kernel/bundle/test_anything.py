"""Whatever stands in a bundle: structured problems, at places that exist, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.bundle.documents import BaseExtensions, PackageFolders
from goondan.kernel.bundle.files import BundleFiles
from goondan.kernel.bundle.rules.check import Checker
from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.kernel.bundle.rules.positions import Allowance, Mapping, compose
from goondan.kernel.bundle.rules.problems import Report
from goondan.kernel.bundle.rules.shape import Document
from goondan.schemas.wire.errors import CODES
from tests.unit.kernel.bundle.conftest import GOOD

DOCUMENTS: list[Any] = list(yaml.safe_load_all(GOOD))
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from(["Tool/words", "goondan.ai/v1", "Agent", "object", "${HOME}", "../x", "@goondan/base"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "ref", "kind", "type", "$ref", "env", "allow", "x"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above, *(path for key, item in inner for path in paths(item, (*above, key)))]


EVERY_PLACE = [path for path in paths(DOCUMENTS) if path]


@st.composite
def mutated(draw: st.DrawFn) -> list[Any]:
    """The good bundle with one to three places replaced, removed or renamed."""
    bundle = json.loads(json.dumps(DOCUMENTS))
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(EVERY_PLACE))
        node = bundle
        try:
            for step in above:
                node = node[step]
            match draw(st.integers(0, 2)):
                case 0:
                    node[last] = draw(ANY)
                case 1:
                    del node[last]
                case _:
                    node[draw(st.sampled_from(["name", "spec", "spce", "kind", "ref"]))] = node[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return bundle  # type: ignore[no-any-return]


@given(mutated())
def test_a_mutated_bundle_gives_structured_problems(
    tmp_path_factory: pytest.TempPathFactory, package: dict[str, CheckedTool], bundle: list[Any]
) -> None:
    root = tmp_path_factory.getbasetemp()
    (root / "tools").mkdir(exist_ok=True)
    (root / "tools" / "words.py").touch()
    text = "\n---\n".join(json.dumps(document) for document in bundle)
    composed = compose(text, Allowance())
    documents = [Document("f", node, from_file=True) for node in composed.documents if isinstance(node, Mapping)]
    report = Report()
    files, packages = BundleFiles(str(root)), PackageFolders(None, report)
    checker = Checker(documents, package, files, {}, report, packages=packages, base_extensions=BaseExtensions())
    checked = checker.check()
    lines = text.count("\n") + 1
    for problem in [*report.errors, *report.warnings]:
        assert problem.code in CODES or problem.code.startswith("W_CONFIG_")
        assert problem.message
        assert problem.suggestion
        assert 1 <= problem.line <= lines
        assert problem.column >= 1
    if not report.errors:
        assert all(agent.model is not None for agent in checked.agents.values())
        assert all(tool.entry and tool.root for tool in checked.tools.values())
