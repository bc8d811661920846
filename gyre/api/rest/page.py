"""The web page: its files, which lie in `gyre/api/page`, at `/` and `/assets`.

Invariants:
- *nothing from elsewhere*: the policy that goes with the page lets a browser load from this server alone, run no
  script and no style that stands in the document, and put the page into no frame;
- *no secret in it*: the files are the same for everybody, so they need no token; what they show does.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from gyre.api.page_files import FOLDER, is_built

HEADERS = {
    # React Flow and uPlot place what they draw by style attributes; there is no inline script anywhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "style-src-attr 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # an ETag makes it cheap, and an upgraded master shows its own page at once
}

_OPEN = frozenset(("/", "/index.html", "/favicon.svg"))


def is_page(path: str) -> bool:
    """Whether the path is one of the page's own files, which need no token."""
    return path in _OPEN or path.startswith("/assets/")


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes(folder: Path = FOLDER) -> list[BaseRoute]:
    """The routes of the page; none where its files are not there, as in a checkout that was never built."""
    if not is_built(folder):
        return []

    async def index(_: object) -> Response:
        return FileResponse(folder / "index.html", headers=HEADERS)

    async def icon(_: object) -> Response:
        return FileResponse(folder / "favicon.svg", headers=HEADERS)

    routes: list[BaseRoute] = [
        Route("/", index, methods=["GET"]),
        Route("/index.html", index, methods=["GET"]),
        Mount("/assets", _Files(directory=folder / "assets")),
    ]
    if (folder / "favicon.svg").is_file():
        routes.append(Route("/favicon.svg", icon, methods=["GET"]))
    return routes
