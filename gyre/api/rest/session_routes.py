"""Where a browser gives the token once, and gets a cookie for it (`gyre.api.rest.sessions`)."""

from __future__ import annotations

import time
from hmac import compare_digest
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from gyre.api.rest import schemas
from gyre.api.rest.sessions import SessionCookies
from gyre.errors import Unauthorized

sessions = APIRouter(tags=["session"])


class SessionBody(schemas.In):
    token: Annotated[str, Field(max_length=1000)]


class BrowserSessionSchema(BaseModel):
    """`needs_token`: whether this server asks for one at all. `lasts_s`: for how long the cookie is good."""

    needs_token: bool
    lasts_s: float = 0.0


@sessions.post("/session", response_model=BrowserSessionSchema)
async def open_session(request: Request, response: Response, body: SessionBody) -> Any:
    """Show the token once; the answer sets a cookie that no script can read and no other site can send."""
    cookies: SessionCookies | None = request.app.state.cookies
    token: str | None = request.app.state.token
    if cookies is None or token is None:
        return BrowserSessionSchema(needs_token=False)
    if not compare_digest(body.token.encode(), token.encode()):
        raise Unauthorized(
            "The token is wrong.", hint="It is the one that the job was started with (--token or GYRE_TOKEN)."
        )
    response.set_cookie(
        cookies.name,
        cookies.make(time.time()),
        max_age=int(cookies.lasts_s),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )
    return BrowserSessionSchema(needs_token=True, lasts_s=cookies.lasts_s)


@sessions.delete("/session", response_model=BrowserSessionSchema)
async def close_session(request: Request, response: Response) -> Any:
    """Forget the cookie of this browser."""
    cookies: SessionCookies | None = request.app.state.cookies
    if cookies is not None:
        response.delete_cookie(cookies.name, path="/", httponly=True, samesite="strict")
    return BrowserSessionSchema(needs_token=cookies is not None)
