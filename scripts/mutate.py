"""Run mutmut in the copy of the tree that mutants.py has made, and write its results down.

Started there, with the copy as current folder: mutmut reads its pyproject.toml when it is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from difflib import ndiff
from pathlib import Path
from typing import Any

import libcst
from mutmut.__main__ import _run
from mutmut.mutation import mutators
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import read_functions_from_index
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

#: The results of a change that no test has noticed.
UNNOTICED = {"survived", "no tests"}
TEXTS = (libcst.SimpleString, libcst.FormattedString, libcst.ConcatenatedString)


def arguments_but_texts(node: libcst.Call) -> Iterator[libcst.Call]:
    """mutmut's change of arguments (None instead of one, or one less), where the argument is no literal text."""
    for changed in mutators.operator_arg_removal(node):
        gone = [argument for argument in node.args if all(argument is not kept for kept in changed.args)]
        if not (gone and isinstance(gone[0].value, TEXTS)):
            yield changed


def leave_texts_alone() -> None:
    """Remove the changes of texts from mutmut's list, which its modules share."""
    kept: list[Any] = []
    for node, change in mutators.mutation_operators:
        if change is mutators.operator_string:
            continue
        kept.append((node, arguments_but_texts if change is mutators.operator_arg_removal else change))
    mutators.mutation_operators[:] = kept


def difference(name: str, path: Path) -> tuple[str, str]:
    """The first lines that a change removes and adds."""
    functions = read_functions_from_index(name, path)
    if functions is None:
        return "", name
    before, after = (libcst.Module([function]).code.splitlines() for function in functions)
    lines = list(ndiff(before, after))
    took = " / ".join(line[2:].strip() for line in lines if line.startswith("- "))
    put = " / ".join(line[2:].strip() for line in lines if line.startswith("+ "))
    return took, put


def results() -> dict[str, Any]:
    """How many changes were noticed, and the list of the others."""
    killed, survivors = 0, []
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        for name, code in data.exit_code_by_key.items():
            if status_by_exit_code[code] not in UNNOTICED:
                killed += 1
                continue
            before, after = difference(name, path)
            function = name.rpartition("__mutmut_")[0].rpartition(".")[2].removeprefix("x").lstrip("_ǁ")
            where = f"{path.relative_to('goondan')}: {function.replace('ǁ', '.')}"
            survivors.append({"where": where, "before": before, "after": after})
    return {"killed": killed, "survivors": survivors}


if __name__ == "__main__":
    leave_texts_alone()
    _run([], max_children=len(os.sched_getaffinity(0)))
    Path("mutants/results.json").write_text(json.dumps(results(), ensure_ascii=False), encoding="utf-8")
