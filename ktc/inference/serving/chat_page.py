"""The chat page at `/`: one file of the templates, which asks the same server, and no other address.

Out: a route whose policy lets the page run its own script only. An answer is untrusted text, and the page makes no
markup of it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any, Final

from fastapi import Response

from ktc.foundation import resources
from ktc.inference.serving.guard import PAGE

PATH: Final = PAGE
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def add_route(app: Any) -> None:
    """Add the page to an application."""
    text = page()
    headers = {
        "Content-Security-Policy": policy(text), "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }  # fmt: skip

    @app.get(PATH)
    async def read_page() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)


def page() -> str:
    """Return the page."""
    return (resources.templates() / "chat.html").read_text(encoding="utf-8")


def policy(text: str) -> str:
    """Return the policy of a page: its script and style by their hashes, requests to its server, nothing else."""
    hashes = {kind: _hash(content) for kind, content in _INLINE.findall(text)}
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
