"""Whether a person's answer fits the schema of the question. Pure.

What a check can cost is bounded by schemas/bundle/schema_limits.py, because a server may have written
the schema, and everybody shares the broker's loop. The library that checks is loaded with the first question.
"""

from __future__ import annotations

from typing import Any, Final

from goondan.schemas.wire.errors import fail

#: A value that is no object is checked as the one property of an object of this name.
_ANSWER: Final = "answer"
#: Issues that a person is told of.
_TOLD: Final = 5


def check_schema(schema: Any) -> None:
    """Raise GoondanError E_CONFIG_SCHEMA for what is no JSON Schema, or costs too much to check against."""
    from goondan.schemas.bundle.arguments import compile_arguments

    compile_arguments(schema, {}).compile()


def issues_of(schema: Any, answer: Any) -> list[str]:
    """What does not fit, in words; empty when the answer fits. Raises GoondanError as `check_schema`."""
    from goondan.schemas.bundle.arguments import compile_arguments

    if isinstance(answer, dict):
        _, issues = compile_arguments(schema, {}).apply(answer)
    else:
        wrapped = {"type": "object", "properties": {_ANSWER: schema}}
        _, issues = compile_arguments(wrapped, {}).apply({_ANSWER: answer})
    return [issue.replace(f"args.{_ANSWER}", _ANSWER, 1).replace("args", _ANSWER, 1) for issue in issues[:_TOLD]]


def check_answer(schema: Any, answer: Any) -> None:
    """Raise GoondanError E_USAGE for an answer that does not fit."""
    issues = issues_of(schema, answer)
    if issues:
        message = f"the answer does not fit the question: {'; '.join(issues)}"
        raise fail("E_USAGE", message, suggestion="`gdn approve show` has the schema of the answer.")
