"""The page of `--ui`: one file with its own style and script, and a policy under which nothing else runs."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILE = Path(__file__).with_name("page.html")


def policy(html: str) -> str:
    """A Content-Security-Policy that lets this page's own script and style run, and it ask its own server."""
    sources = []
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        sources.append(f"{directive} 'sha256-{digest}'")
    rest = "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {'; '.join(sources)}; {rest}"


def page_route() -> Route:
    """`GET /`."""
    html = _FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(_: Request) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    return Route("/", page, methods=["GET"])
