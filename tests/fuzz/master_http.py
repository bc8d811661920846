"""The master's REST port below what its OpenAPI can say: raw bytes, strange headers, bodies, encodings and chunks."""

from __future__ import annotations

from random import Random

from gyre.api.rest import create_app
from gyre.api.rest.serve import RestServer
from tests.doubles.standing_job import StandingJob
from tests.fuzz.http_bytes import answer_to, status_of, strange_request
from tests.fuzz.manager_http import HONEST_EACH, Told
from tests.fuzz.target import Broken, Target

JOB = b"/api/v1/jobs/small"
PATHS = (
    b"/healthz",
    b"/metrics",
    b"/api/v1/jobs",
    b"/api/v1/openapi.json",
    JOB,
    *(
        JOB + b"/" + one
        for one in (b"graph", b"spec", b"vertices", b"nodes", b"tokens", b"incidents", b"metrics")
    ),
    JOB + b"/vertices/rollout-0",
    JOB + b"/events",
    JOB + b"/events?after=1&limit=2",
    JOB + b"/logs?role=rollout&rank=0&cursor=e30%3D&limit_bytes=10",
)
BODIES = (
    (JOB + b":scale", {"role": "nobody", "count": 2}),
    (JOB + b":drain", {"target": "nobody", "reason": "asked"}),
    (JOB + b":undrain", {"target": "nobody"}),
    (JOB + b":revoke_token", {"name": "nobody"}),
    (JOB + b":create_token", {"name": "a", "digest": "no digest", "expires_at": 5.0}),
    (b"/api/v1/jobs/another:stop", {"reason": "asked"}),
)
HEADERS = (b"Host: 127.0.0.1", b"Connection: close")


class MasterPort(Target):
    name = "master port"
    share = 0.005
    traced = False

    def start(self) -> None:
        self._told = Told("gyre", "uvicorn", "uvicorn.error", "asyncio")
        self._job = StandingJob()
        self._job.__enter__()
        self._server = RestServer(create_app(self._job.master, token=None))
        self._port = int(self._server.start().rpartition(":")[2])

    def stop(self) -> None:
        self._server.stop()
        self._job.__exit__(None, None, None)
        self._told.end()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        sent.append(strange_request(draw, PATHS, BODIES, HEADERS))
        status = status_of(answer_to(sent[0], self._port))
        self._told.check()
        if status >= 500:
            raise Broken(f"it answered {status}")
        if draw.randrange(HONEST_EACH) == 0:
            asked = b"GET /api/v1/jobs/small HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            if status_of(answer_to(asked, self._port, rude=False)) != 200:
                raise Broken("an honest client was not answered")
        return 0 < status < 400
