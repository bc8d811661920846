"""Access control of the REST server: a bearer token, or without one only local programs.

Invariants:
- *token or loopback*: with a token set every path but `/healthz`, the page's own files and the one that takes the token
  requires it, as a header or as the cookie made from it; a server without one is only ever bound to loopback
  (`gyre.api.rest.serve` refuses else);
- *no stranger's page*: no changing request from another site's page is answered, with or without a token, so that
  no web page can stop a job. A server without a token answers no host name that is not loopback (DNS rebinding);
- *a cookie says where it comes from*: a changing request whose token is a cookie names its origin, as browsers do.

A plain ASGI middleware: it looks at headers only and never at a body, so streams pass through untouched.
"""

from __future__ import annotations

import time
from hmac import compare_digest
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gyre.api.loopback import is_loopback
from gyre.api.rest.page import is_page
from gyre.api.rest.problems import FORBIDDEN_ORIGIN, problem, problem_of
from gyre.api.rest.sessions import SessionCookies
from gyre.clock import Clock
from gyre.errors import Unauthorized

SESSION_PATH = "/api/v1/session"
_READS = ("GET", "HEAD", "OPTIONS")
OPEN_PATHS = frozenset({"/healthz", SESSION_PATH})


class Guard:
    def __init__(self, app: ASGIApp, *, token: str | None, clock: Clock = time) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._cookies = None if token is None else SessionCookies(token.encode())
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there is nothing else to reach
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        is_open = scope["path"] in OPEN_PATHS or is_page(scope["path"])
        refusal = (None if is_open else self._refusal(scope["method"], headers)) or _foreign(
            scope["method"], headers
        )
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ASGIApp | None:
        if self._token is not None:
            if self._is_valid(headers.get("authorization", "")):
                return None
            if not self._has_cookie(headers):
                return _unauthorized(headers)
            is_told = "origin" in headers or "sec-fetch-site" in headers
            return None if is_told or method in _READS else _no_origin()
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            return problem(
                status=403,
                code=FORBIDDEN_ORIGIN,
                detail=f"This server has no token, so it answers loopback names only, not {host!r}.",
                hint="Start the job with a token to reach it by another name.",
            )
        return None

    def _is_valid(self, header: str) -> bool:
        # Header values are latin-1 on the wire; a token beyond ASCII is sent as UTF-8.
        assert self._token is not None
        return is_bearer(header.encode("latin-1", "replace"), self._token)

    def _has_cookie(self, headers: Headers) -> bool:
        shown = headers.get("cookie", "").encode("latin-1", "replace")
        return self._cookies is not None and self._cookies.is_valid(shown, self._clock.time())


def is_bearer(header: bytes, token: bytes) -> bool:
    """Whether the value of an Authorization header has this token."""
    scheme, _, given = header.partition(b" ")
    return compare_digest(given.strip(), token) and scheme.lower() == b"bearer"


def _foreign(method: str, headers: Headers) -> ASGIApp | None:
    """The refusal of a change that a page of another site asks for, with or without a token; None for anything else.

    Browsers say so in `Sec-Fetch-Site`, also through a proxy that rewrites the host; where that header is missing, the
    origin is compared with the host. This is the order of Go's `http.CrossOriginProtection`.
    """
    if method in _READS:
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site is not None:
        is_foreign = site not in ("none", "same-origin")
    else:
        is_foreign = bool(origin) and _host_of(origin or "") != headers.get("host", "")
    if not is_foreign:
        return None
    return problem(
        status=403,
        code=FORBIDDEN_ORIGIN,
        detail=f"A page of {origin or 'another site'} may not change this job.",
        hint="Ask from the command line or a program.",
    )


def _no_origin() -> ASGIApp:
    return problem(
        status=403,
        code=FORBIDDEN_ORIGIN,
        detail="A change that comes with a cookie must say which page asks for it.",
        hint="Programs send `Authorization: Bearer TOKEN`.",
    )


def _unauthorized(headers: Headers) -> ASGIApp:
    missing = "authorization" not in headers
    return problem_of(
        Unauthorized(
            "This server requires a token." if missing else "The token is wrong.",
            hint="Send `Authorization: Bearer TOKEN`; on the command line: --token or GYRE_TOKEN.",
        )
    )


def _host_of(origin: str) -> str | None:
    """The host and port in an Origin header; None, which equals no host, if the header is not a URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
