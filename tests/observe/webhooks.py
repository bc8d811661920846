"""A webhook on this machine, for tests: what it was sent, and what it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hook:
    """A webhook on this machine. `answers` has what the next requests get: a status, or what is done instead."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.answers: list[int | Callable[[BaseHTTPRequestHandler], None]] = []
        self.released = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.requests.append((dict(self.headers), body))
                answer = hook.answers.pop(0) if hook.answers else 200
                if callable(answer):
                    answer(self)
                    return
                self.send_response(answer)
                if 300 <= answer < 400:
                    self.send_header("Location", hook.address)
                self.end_headers()
                self.wfile.write(b"invalid_token " + b"x" * 5000)

            def log_message(self, *args: Any) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/services/T0/s3cret"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
