"""What engines, and whoever starts them, raise.

    GyreError
    └── EngineError               an engine did not do what it was asked for
        ├── EngineUnreachable     nobody listens, or the connection broke: the engine may be dead
        │   └── EngineExited        the engine's process ended; `details["tail"]` is what it said last
        ├── EngineNotStarted      no engine could be started; `details["said"]` and `["traceback"]` are its last words
        ├── EngineTimeout         connected, and no answer within the deadline: the engine may hang
        ├── EngineRefused         it understood and said no (4xx): the same again is refused again
        │   └── RequestUnsafe     it would die of this request, which was kept from it
        ├── EngineFailed          it could not (5xx, or an error in mid-stream): elsewhere it may work
        └── EngineProtocolError   what it sent makes no sense: nothing of that reply may be used

The class alone says what to do: move the sample and replace the engine (unreachable, timeout, protocol), move the
sample (failed), or give the request up (refused).
"""

from __future__ import annotations

from gyre.errors import GyreError


class EngineError(GyreError):
    code = "engine"
    http_status = 502


class EngineUnreachable(EngineError):
    code = "engine.unreachable"
    http_status = 503


class EngineExited(EngineUnreachable):
    code = "engine.died"


class EngineNotStarted(EngineError):
    """`details["said"]` is the last sentence of the engine's output, `details["traceback"]` the lines around it; both
    "" if it printed nothing."""

    code = "engine.not_started"


class EngineTimeout(EngineError):
    code = "engine.timeout"
    http_status = 504


class EngineRefused(EngineError):
    """`details["status"]` is the HTTP status; the engine's own words stand in the message."""

    code = "engine.refused"
    http_status = 400


class RequestUnsafe(EngineRefused):
    """`details["reason"]` says of what: `token_out_of_vocabulary` or `min_p_with_seeds`."""

    code = "engine.request_unsafe"


class EngineFailed(EngineError):
    code = "engine.failed"


class EngineProtocolError(EngineError):
    code = "engine.protocol"
