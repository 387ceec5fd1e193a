"""Parts of requests to model servers that the kernel and agents send alike. Pure.

Source: docs/design/turns.md section 6; docs/design/bundle.md section 6.
"""

from __future__ import annotations

from goondan.schemas.bundle.launch import ModelSpec


def key_headers(model: ModelSpec) -> dict[str, str]:
    """The header with the Model's key, in the way in which it is sent; none without a key."""
    if not model.api_key:
        return {}
    if model.auth == "x-api-key":
        return {"x-api-key": model.api_key}
    return {"authorization": f"Bearer {model.api_key}"}
