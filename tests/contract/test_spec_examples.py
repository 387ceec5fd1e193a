"""Which test runs which code example of the specification. An example without a test fails here.

The documents are the extension document of v0.9 and the tool document of v2. The tool document has two editions, with
the same examples. The documents are not in this repository, so the list of sections is written by hand. Blocks that
only declare types are no examples, and neither are placeholders.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = "tests/unit/agentproc/extensions/test_documented_examples.py"
DOCUMENTS = "tests/contract/test_spec_documents.py"
MCP = "tests/unit/agentproc/extensions/test_documented_mcp.py"
SKILLS = "tests/unit/agentproc/extensions/test_documented_skills.py"

#: Section of the extension document of v0.9 -> the tests that run its example.
EXTENSIONS: dict[str, list[str]] = {
    "2.3 an Extension document": [f"{DOCUMENTS}::test_the_extensions"],
    "3.2 the basic extension": [
        f"{EXAMPLES}::test_the_basic_extension",
        f"{EXAMPLES}::test_the_basic_extension_reads_its_config",
    ],
    "5.5 mutators": [f"{EXAMPLES}::test_the_mutators"],
    "5.6 middleware": [
        f"{EXAMPLES}::test_the_wraps",
        f"{EXAMPLES}::test_an_admin_may",
        f"{EXAMPLES}::test_who_only_says_that_it_is_an_admin_may_not",
    ],
    "6.3 dynamic tools": [f"{EXAMPLES}::test_the_dynamic_tools"],
    "6.4 what makes a dynamic tool seen": [
        "tests/features/live_config/test_documented_dynamic_tools.py::"
        "test_a_dynamic_tool_is_offered_when_a_patch_names_it",
        "tests/unit/agentproc/extensions/test_dynamic_tools.py::"
        "test_a_tool_of_a_v09_extension_is_offered_when_something_names_it",
    ],
    "7.3 events": [f"{EXAMPLES}::test_the_events"],
    "8.3 a changeset": ["tests/features/changesets/process/test_changesets.py::test_the_documented_example"],
    "9.1 state of an extension": [f"{EXAMPLES}::test_the_statistics"],
    "9.2 shared state": [f"{EXAMPLES}::test_what_extensions_share"],
    "9.3 state in a file": [f"{EXAMPLES}::test_state_that_an_extension_keeps_in_a_file"],
    "10.1 the order of loading": [
        "tests/unit/agentproc/extensions/test_reconcile.py::test_extensions_are_loaded_once_in_the_order_of_the_agent"
    ],
    "10.3 identity": ["tests/unit/agentproc/extensions/test_reconcile.py::test_another_order_recreates_nothing"],
    "10.4 cleanup": [f"{EXAMPLES}::test_the_connection_is_closed_at_the_end"],
    "11.2 MCP servers": [f"{DOCUMENTS}::test_both_mcp_documents"],
    "11.3 an MCP extension": [
        f"{MCP}::test_the_example_of_the_specification",
        f"{MCP}::test_the_example_without_a_command_or_a_config",
    ],
    "2.5, 12.2 documents of skills": [f"{DOCUMENTS}::test_the_extensions"],
    "12.3 directories of skills": [f"{SKILLS}::test_the_skills_are_found_opened_and_closed"],
    "12.4 a SKILL.md": [f"{SKILLS}::test_the_skills_are_found_opened_and_closed"],
    "12.5 the extension for skills": [
        f"{SKILLS}::test_the_skills_are_found_opened_and_closed",
        f"{SKILLS}::test_a_repository_is_scanned",
        f"{SKILLS}::test_a_command_of_the_documented_extension",
    ],
}

#: Sections of both editions of the tool document of v2 -> the tests that run their example.
TOOLS: dict[str, list[str]] = {
    "1.2, 3.1 identity": ["tests/unit/schemas/test_address.py::test_a_tool_is_identified_by_kind_and_name"],
    "2.1, 4.1 a Tool document": [f"{DOCUMENTS}::test_the_tools"],
    "3.1, 5.1 names": [f"{DOCUMENTS}::test_the_tools"],
    "3.3, 5.3 names taken apart and put together": [
        "tests/unit/schemas/test_address.py::test_tool_names_are_split_at_the_first_double_underscore",
        "tests/unit/schemas/test_address.py::test_tool_names_are_joined_by_a_double_underscore",
    ],
    "5.2, 7.2 handlers of bash": ["tests/contract/test_parity_bash.py::test_recorded"],
    "6.4, 8.4 toolCall middleware that times calls": [f"{EXAMPLES}::test_middleware_that_times_each_call"],
    "7.2, 9.2 a refusal": ["tests/unit/agentproc/test_catalog.py::test_refusals_are_the_recorded_ones"],
    "8.3, 10.3 an error as a result": ["tests/unit/toolhost/test_results.py::test_errors_are_completed_and_cut"],
    "8.4, 10.4 a message that is cut": ["tests/unit/toolhost/test_results.py::test_errors_are_completed_and_cut"],
    "10.2, 12.2 the weather": [f"{EXAMPLES}::test_the_weather"],
    "11.2, 13.2 a catalog": [
        "tests/process/test_tool_rules.py::test_the_model_is_shown_the_agents_tools_and_the_extensions"
    ],
    "12.1, 14.1 files": [f"{DOCUMENTS}::test_the_tools", "tests/contract/test_parity_tools.py::test_recorded"],
    "12.2, 14.2 HTTP": [f"{DOCUMENTS}::test_the_tools", "tests/contract/test_parity_http_fetch.py::test_recorded"],
}

#: Sections whose example needs a feature.
OF_FEATURES = {"6.4 what makes a dynamic tool seen", "8.3 a changeset"}


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize(
    "section",
    [
        *(section for section in [*EXTENSIONS, *TOOLS] if section not in OF_FEATURES),
        pytest.param("6.4 what makes a dynamic tool seen", marks=pytest.mark.feature("live_config")),
        pytest.param("8.3 a changeset", marks=pytest.mark.feature("changesets")),
    ],
)
def test_each_example_has_a_test(section: str) -> None:
    named = (EXTENSIONS | TOOLS)[section]
    assert named
    for test in named:
        file, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in functions_of(file), f"{test} is not there"


def test_each_test_of_the_examples_is_in_the_table() -> None:
    """So an example that gets a test gets its line here."""
    listed = {test for tests in [*EXTENSIONS.values(), *TOOLS.values()] for test in tests}
    there = {f"{EXAMPLES}::{name}" for name in functions_of(EXAMPLES) if name.startswith("test_")}
    assert there - listed == set()
