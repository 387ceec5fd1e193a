"""What an agent's answers have to be, and which tools its model has to call.

Source: docs/structured-answers.md; docs/design/structured-answers.md sections 2 and 3.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class OutputSpec(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """The form of an agent's answers."""

    schema: Annotated[
        dict[str, Any], Meta(description="The JSON Schema that every answer fits. It describes an object.")
    ]
    via: Annotated[
        Literal["auto", "tool"],
        Meta(
            description="How the model is told: `auto` takes the vendor's own way where it has one for the schema; "
            "`tool` offers a tool `answer` that the model calls."
        ),
    ] = "auto"


class ForcedTool(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One tool that the model has to call."""

    tool: Annotated[str, Meta(min_length=1, description="Its full name.")]


#: Which tools a model may or has to call. `auto`: as it likes. `none`: none. `required`: any.
ToolChoice = Literal["auto", "none", "required"] | ForcedTool
