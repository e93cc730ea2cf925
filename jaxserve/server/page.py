"""The page at `/`: one file, which asks nobody but this server."""

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


def _hash(text: str, tag: str) -> str:
    """What a content security policy calls the one `tag` of the page."""
    (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    return f"'sha256-{digest}'"


class Page:
    """Read once."""

    def __init__(self) -> None:
        text = resources.files("jaxserve.server").joinpath("page.html").read_text("utf-8")
        self._data = text.encode()
        self._headers = {
            "content-security-policy": (
                f"default-src 'none'; script-src {_hash(text, 'script')}; "
                f"style-src {_hash(text, 'style')}; connect-src 'self'; img-src data:; "
                "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
            ),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def show(self, request: Request) -> Response:
        return Response(self._data, headers=self._headers, media_type="text/html")
