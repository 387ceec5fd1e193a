"""The page's files. They are read once, and have no secret in them, so who asks for them shows no token.

The page runs no script and no style but its own, is shown in no frame, and makes no text of a swarm into markup: the
browser sees to it (Trusted Types). The one script in index.html says where modules are; it is allowed by its digest.

Source: docs/decisions/176; W3C, Content Security Policy Level 3 and Trusted Types.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.responses import Response

from goondan.features.serve.api.gate import Way

FILES: Final = Path(__file__).with_name("files")
#: What is served, by the ends of names: the rest of the folder are licences and lists.
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INLINE: Final = re.compile(rb"<script[^>]*>([^<]+)</script>")
_POLICY: Final = (
    "default-src 'none'; script-src 'self' {digests}; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types goondan"
)


def policy(index: bytes) -> str:
    """The Content-Security-Policy of the page with this index.html (pure)."""
    digests = (b64encode(sha256(text).digest()).decode() for text in _INLINE.findall(index))
    return _POLICY.format(digests=" ".join(f"'sha256-{digest}'" for digest in digests))


def ways() -> list[Way]:
    """A way for each file. The page itself is at `/page/`."""
    headers = {
        "content-security-policy": policy((FILES / "index.html").read_bytes()),
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    paths = sorted(path for path in FILES.rglob("*") if path.suffix in TYPES)
    answers = (Response(path.read_bytes(), headers=headers, media_type=TYPES[path.suffix]) for path in paths)
    names = (f"/page/{path.relative_to(FILES)}".removesuffix("index.html") for path in paths)
    return [Way(name, answer, role=None) for name, answer in zip(names, answers, strict=True)]
