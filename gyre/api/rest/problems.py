"""Every error of the REST interface as `application/problem+json` (RFC 9457).

    {"type": "urn:gyre:problem:not_found", "title": "Not found", "status": 404,
     "detail": "There is no job 'grpp'.", "code": "not_found", "hint": "did you mean 'grpo'?"}

Invariants:
- *one shape*: 404, 405, 422 and 500 have it too, and so has a refused token;
- *stable codes*: `code` is the `code` of `gyre.errors`; only what HTTP itself refuses has one of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from gyre.errors import ConfigError, GyreError, NotFound, Unauthorized
from gyre.redaction import KNOWN

MEDIA_TYPE = "application/problem+json"

METHOD_NOT_ALLOWED = "method_not_allowed"
FORBIDDEN_ORIGIN = "forbidden_origin"

log = logging.getLogger(__name__)

_TITLES = {
    "config": "What was asked for makes no sense",
    "conflict": "The job's state does not permit it",
    "gyre": "A defect in Gyre",
    "not_found": "Not found",
    "unauthorized": "A token is missing or wrong",
    "unreachable": "No answer in time",
    METHOD_NOT_ALLOWED: "No such method here",
    FORBIDDEN_ORIGIN: "Asked from elsewhere",
}


def problem(
    *,
    status: int,
    code: str,
    detail: str,
    hint: str = "",
    headers: Mapping[str, str] | None = None,
    details: Mapping[str, Any] | None = None,
) -> JSONResponse:
    body: dict[str, Any] = {
        "type": f"urn:gyre:problem:{code}",
        "title": _TITLES.get(code, code.replace("_", " ").replace(".", ": ").capitalize()),
        "status": status,
        "detail": KNOWN.text(detail),
        "code": code,
        "hint": KNOWN.text(hint),
    }
    if details:
        body["details"] = KNOWN.data(dict(details))
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


def problem_of(error: GyreError) -> JSONResponse:
    """The response that a GyreError amounts to, here and in the guard."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    return problem(
        status=error.http_status, code=error.code, detail=error.message, hint=error.hint, headers=headers
    )


def install_handlers(app: FastAPI) -> None:
    """Let every exception that leaves a route become a problem."""
    app.add_exception_handler(GyreError, _on_gyre_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_defect)


async def _on_gyre_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GyreError)
    return problem_of(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    mistakes = [
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    ] or ["the request cannot be read"]
    return problem(
        status=422,
        code=ConfigError.code,
        detail="; ".join(mistakes) + ".",
        hint="See /api/v1/openapi.json for what is expected.",
        details={"mistakes": mistakes},
    )


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where, said = f"{request.method} {request.url.path}", str(error.detail).rstrip(".")
    headers = error.headers
    status = 422 if error.status_code == 400 else error.status_code  # one status for what cannot be read
    if error.status_code == 404:
        code, detail = NotFound.code, f"There is nothing at {request.url.path}."
    elif error.status_code == 405:
        code, detail = METHOD_NOT_ALLOWED, f"{where}: this path does not take {request.method}."
        if methods := _methods_at(request):
            headers = {"Allow": ", ".join(methods)}
    elif error.status_code < 500:
        code, detail = ConfigError.code, f"{where}: {said}."
    else:
        code, detail = GyreError.code, f"{where}: {said}."
    return problem(
        status=status,
        code=code,
        detail=detail,
        hint="See /api/v1/openapi.json for what there is.",
        headers=headers,
    )


def _methods_at(request: Request) -> list[str]:
    """What the path takes. The router names the methods of the first of its routes alone."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    fitting = [path for path in paths if compile_path(path)[0].match(request.url.path)]
    nearest = max(fitting, key=len, default="")  # a job's path fits those of its commands
    return sorted(method.upper() for method in paths.get(nearest, ()))


async def _on_defect(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(
        status=500,
        code=GyreError.code,
        detail=f"{request.method} {request.url.path} failed: {type(error).__name__}.",
        hint="This is a defect in Gyre; the traceback is in the master's log.",
    )
