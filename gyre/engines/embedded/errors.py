"""What the embedded engine raises on purpose, inside its own process.

    GyreError
    ├── BadRequest   a request that cannot be served; nothing was started
    └── LoopEnded    the engine's loop is over; the process must be started again

What a client of an engine sees is in `gyre.engines.errors`. This module must not import torch.
"""

from __future__ import annotations

from gyre.errors import GyreError


class BadRequest(GyreError):
    code = "engine.bad_request"
    http_status = 400


class LoopEnded(GyreError):
    code = "engine.loop_ended"
    http_status = 503
