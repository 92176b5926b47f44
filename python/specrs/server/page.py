"""The chat page at `/`: joins its parts into one file, and sets a policy under which nothing else loads or runs."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).with_name("page_files")
_SCRIPTS = ("dom", "stream", "markdown", "run_view", "figures", "history", "export", "chat")
"""Parts of the page's script, in order. A part may use what earlier parts declare; the last one starts the page."""


def page() -> str:
    """Return the page as one HTML text that includes its style and script."""
    style = (_FOLDER / "style.css").read_text(encoding="utf-8")
    scripts = [(_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    html = (_FOLDER / "page.html").read_text(encoding="utf-8")
    html = html.replace("<style></style>", f"<style>\n{style}</style>")
    return html.replace("<script></script>", "<script>\n" + "\n".join(['"use strict";', *scripts]) + "</script>")


def policy(html: str) -> str:
    """Return the Content-Security-Policy of `html`: only its own script and style run, and it sends requests only to
    its own server."""
    sources = []
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        sources.append(f"{directive} 'sha256-{digest}'")
    rest = "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {'; '.join(sources)}; {rest}"


def page_route() -> Route:
    """Return the route `GET /`, which answers with the page and its policy."""
    html = page()
    headers = {
        "Content-Security-Policy": policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def answer(_: Request) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    return Route("/", answer, methods=["GET"])
