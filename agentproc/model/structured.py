"""Judges answers that have to fit a schema. Pure.

An answer is JSON. A model that was not held to it may put it into a code fence, which is taken off. The check is that
of a tool's arguments, with its bounded cost.

Source: docs/design/structured-answers.md section 2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from goondan.agentproc.machine.verdicts import Verdict
from goondan.agentproc.providers.base import read_json, storable
from goondan.schemas.bundle.launch import OutputSpec
from goondan.schemas.wire.codec import check_depth, encode_value

if TYPE_CHECKING:
    from goondan.schemas.bundle.arguments import ArgumentChecker

#: How many violations a message names.
MAX_VIOLATIONS: Final = 8
_FENCE: Final = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


class OutputRule:
    """Judges the answers of one agent. The schema is compiled at the first answer."""

    def __init__(self, spec: OutputSpec) -> None:
        self._spec = spec
        self._checker: ArgumentChecker | None = None

    def judge(self, answer: str) -> Verdict:
        """What an answer of the model is."""
        text = answer.strip()
        fenced = _FENCE.fullmatch(text)
        text = text if fenced is None else fenced.group(1).strip()
        try:
            value = storable(read_json(text))
            encoded = encode_value(value)
            check_depth(encoded)
        except ValueError as error:
            return Verdict(None, text, [f"it is no JSON: {str(error)[:120]}"])
        except (RecursionError, OverflowError):
            return Verdict(None, text, ["it is nested too deep, or has a number that is too large"])
        violations = self._violations(value, len(encoded))
        return Verdict(None if violations else Raw(encoded), text, violations)

    def _violations(self, value: Any, size: int) -> list[str]:
        if self._checker is None:
            from goondan.schemas.bundle.arguments import compile_arguments  # most agents have no schema

            self._checker = compile_arguments(self._spec.schema, {})
        _, issues = self._checker.apply(value, size)
        shown = ["answer" + issue.removeprefix("args") for issue in issues[:MAX_VIOLATIONS]]
        more = len(issues) - len(shown)
        return [*shown, f"and {more} more"] if more else shown
